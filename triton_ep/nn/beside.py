"""A module that overlaps the exchange: shared experts, which see every token of this rank and need no other rank."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from triton_ep.context.overlap import current_stream


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The side stream that all modules of a device share."""
    return torch.cuda.Stream(device)


class Beside:
    """Start module(x) now on a side stream and join it later. Autograd runs the backward pass on that stream, too.

    On the CPU the module runs at once.
    """

    def __init__(self, module: nn.Module, x: torch.Tensor) -> None:
        self._side: torch.cuda.Stream | None = None
        if x.device.type != "cuda":
            self._result: Any = module(x)
            return
        self._side = _side_stream(x.device)
        self._side.wait_stream(current_stream())
        with torch.cuda.stream(self._side):
            self._result = module(x)
        if not torch.cuda.is_current_stream_capturing():
            x.record_stream(self._side)

    @property
    def early(self) -> Any:
        """What the module returned, whose values may not be there yet: for a look at its type and shape."""
        return self._result

    def join(self) -> torch.Tensor:
        """Return the result; the current stream waits for it."""
        if self._side is not None:
            current = current_stream()
            current.wait_stream(self._side)
            if not torch.cuda.is_current_stream_capturing():
                self._result.record_stream(current)
        result: torch.Tensor = self._result
        return result
