"""BarrierAllContext: a device-side barrier over the ranks of a layer."""

from __future__ import annotations

import torch

from triton_ep.context.context import DispatchCombineContext
from triton_ep.ops import barrier as ops


class BarrierAllContext:
    """Barriers over all ranks of a context, or over the ranks of one node.

    Lives as long as its context and owns no memory. All ranks of the scope must make the same sequence of calls.
    """

    def __init__(self, context: DispatchCombineContext) -> None:
        self.context = context

    def barrier_all(self, stream: torch.cuda.Stream | None = None, intra_node_only: bool = False) -> None:
        """Make `stream` wait until all ranks (of this node, if `intra_node_only`) have reached this call.

        Asynchronous on a GPU. After the barrier all earlier work on the streams of the other ranks is visible.
        stream: a torch.cuda.Stream; None = the current one. Ignored on a CPU.

        Raises:
            WaitTimeout: a rank did not come within `timeout_s` (on a GPU: from a later call).
        """
        self.context.check_open()
        if stream is not None and self.context.device.type == "cuda":
            with torch.cuda.stream(stream):
                ops.barrier_all(self.context, intra_node_only)
        else:
            ops.barrier_all(self.context, intra_node_only)
        self.context.poll_status()
