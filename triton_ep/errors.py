"""Errors of triton_ep. Each names the problem, expected and actual value, and the remedy.

All derive from `EPError`, so that one `except` catches every error that this package raises on purpose.
Mistakes in arguments are also `ValueError`, expired waits are also `TimeoutError`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping


class EPError(Exception):
    """Base class of all errors raised on purpose by triton_ep."""


class ConfigError(EPError, ValueError):
    """A configuration that cannot work: sizes, topology, dtypes."""


class InputError(EPError, ValueError):
    """An argument of a call that does not fit the configuration; raised before any remote write."""

    def with_names(self, names: Mapping[str, str]) -> InputError:
        """Begin with the name of an argument as its caller knows it, and return the error: given {"input": "x"}, "input
        must be torch.bfloat16" becomes "x must be torch.bfloat16"."""
        self.args = (re.sub(r"^\w+", lambda name: names.get(name[0], name[0]), str(self)), *self.args[1:])
        return self


class CapacityError(EPError, RuntimeError):
    """A call needs a larger layer or buffer.

    A dispatch for which the host waits raises it on all ranks, with the same numbers, before any row is sent: create a
    layer that is large enough by these numbers on all ranks, and call again.

    Attributes:
        needed_tokens: `max_tokens` that the call needs, the largest number of tokens of any rank; 0 = `max_tokens`
            suffices.
        needed_topk: `topk` that the call needs, the experts of one token that has too many. Another token may need
            more, so the call with the larger layer may raise once more. 0 = no such token was found.
    """

    def __init__(self, message: str = "", *, needed_tokens: int = 0, needed_topk: int = 0) -> None:
        super().__init__(message)
        self.needed_tokens, self.needed_topk = needed_tokens, needed_topk

    @property
    def needed(self) -> int:
        """`needed_tokens`."""
        return self.needed_tokens


class HeapError(EPError, RuntimeError):
    """The symmetric heap could not be started, or symmetric memory not be allocated or mapped."""


class StaleHandleError(EPError, RuntimeError):
    """A layout descriptor that this layer cannot use: it belongs to another layer, or its layer is gone."""


class FinalizedError(EPError, RuntimeError):
    """A layer, context or heap used after its `finalize` or `close`."""


class LaunchError(EPError, RuntimeError):
    """A kernel could not be launched in the current mode (interpreter, JIT or AOT)."""


class AotMiss(EPError, RuntimeError):
    """The ahead-of-time library lacks the requested kernel variant."""


class AotCorrupted(EPError, RuntimeError):
    """A file of the ahead-of-time library differs from the built one."""


class AotArchMismatch(EPError, RuntimeError):
    """The ahead-of-time library was built for GPUs of another architecture."""


class AotNvshmemMismatch(EPError, RuntimeError):
    """Kernels of the ahead-of-time library contain NVSHMEM device code that this node's NVSHMEM cannot serve."""


class CallMismatch(EPError, RuntimeError):
    """Ranks of one layer are in different calls, or in one call with different descriptors; names each rank's call."""


class WaitTimeout(EPError, TimeoutError):
    """A bounded wait expired: names the operation, the missing ranks, expected and seen counters."""


class PeerFailed(EPError, RuntimeError):
    """A peer rank died, aborted, or rejected its own input."""
