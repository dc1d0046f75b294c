"""Errors of triton_ep: every one names what happened, both numbers, and the remedy.

All derive from `EPError`, so that one `except` catches what this package raises on purpose.
Mistakes in arguments are also `ValueError`, expired waits are also `TimeoutError`.
"""


class EPError(Exception):
    """Base class of all errors raised on purpose by triton_ep."""


class ConfigError(EPError, ValueError):
    """A configuration that cannot work: sizes, topology, dtypes."""


class InputError(EPError, ValueError):
    """An argument of a call that does not fit the configuration; raised before any remote write.

    Attributes:
        bad_id: the expert id that a rank was found to have passed, the same on all ranks; None = something else.
    """

    bad_id: int | None = None


class CapacityError(EPError, RuntimeError):
    """More rows than the context holds, where it may not grow.

    Attributes:
        needed: rows, or tokens, that would have been enough; 0 = not said.
    """

    needed = 0


class HeapError(EPError, RuntimeError):
    """Symmetric memory could not be started, allocated or mapped."""


class StaleHandleError(EPError, RuntimeError):
    """A layout descriptor that this layer cannot combine: made by another layer, or outlived its own."""


class FinalizedError(EPError, RuntimeError):
    """A layer, context or heap used after its `finalize` or `close`."""


class LaunchError(EPError, RuntimeError):
    """A kernel could not be launched in the present mode (interpreter, JIT or AOT)."""


class AotMiss(EPError, RuntimeError):
    """The ahead-of-time library lacks the asked kernel variant."""


class AotCorrupted(EPError, RuntimeError):
    """A file of the ahead-of-time library is not what was built."""


class AotArchMismatch(EPError, RuntimeError):
    """The ahead-of-time library was built for GPUs of another architecture."""


class AotNvshmemMismatch(EPError, RuntimeError):
    """Kernels of the ahead-of-time library contain device code of an NVSHMEM that this node's cannot serve."""


class CallMismatch(EPError, RuntimeError):
    """Ranks of one layer are in different calls, or in one call with other descriptors: says which call each was in."""


class WaitTimeout(EPError, TimeoutError):
    """A bounded wait expired: names the operation, the missing ranks, expected and seen counters."""


class PeerFailed(EPError, RuntimeError):
    """A peer rank died, aborted, or rejected its own input."""
