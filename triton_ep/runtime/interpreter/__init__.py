"""Adapts Triton's interpreter to CPU ranks: numeric fix-ups, waits that yield, chaos mode.

Importing this package does nothing and imports no Triton. `install()` changes the interpreter of this process, if
kernels are interpreted; the other functions configure the changed interpreter.
"""

import sys
from collections.abc import Callable

from triton_ep.errors import EPError

from . import spinning
from .held import HeapRanges

__all__ = [
    "install",
    "register_heap",
    "self_test",
    "set_chaos",
    "set_wait_hook",
    "translate_kernels",
    "unregister_heap",
]

_applied = False
_tested = False
_ranges = HeapRanges()


def install() -> None:
    """Fix the interpreter of this process and test it; does nothing once that has succeeded.

    Raises:
        EPError: kernels are not interpreted here, or a fix-up does not work with this Triton.
    """
    global _applied, _tested
    if not _applied:
        _require_interpreting()
        _apply()
        _applied = True
    if not _tested:
        self_test()
        _tested = True


def _apply() -> None:
    from triton_ep.kernels.device import spin

    from . import fixups, speed

    fixups.apply()
    speed.apply()
    spin.call_on_pause(spinning.while_waiting)


def self_test() -> None:
    """Check the fix-ups by interpreting a small function; takes a few milliseconds.

    Raises:
        EPError: a fix-up fails (with expected and seen values), or `install` has not been called.
    """
    if not _applied:
        raise EPError("the interpreter's fix-ups are not installed; call triton_ep.runtime.interpreter.install().")
    from . import selftest

    selftest.run()


def translate_kernels() -> None:
    """Translate the sources of all kernels now; the interpreter otherwise does so at the first call of a kernel.

    For a process that will be forked: its children share the result. Takes some milliseconds per function.

    Raises:
        EPError: `install` has not been called.
    """
    if not _applied:
        raise EPError("the interpreter's fix-ups are not installed; call triton_ep.runtime.interpreter.install().")
    from . import speed

    speed.translate_kernels()


def set_chaos(seed: int | None) -> None:
    """Switch chaos mode of this process on with a seed (its state starts anew), or off with None.

    On: the programs of a grid run in random order; masked-off lanes of loads without `other`, and of atomics,
    hold garbage; plain stores to registered heaps are hidden from peers until a release covers them, then
    appear in random order. The release must come from the same program, at system scope, after a
    tl.debug_barrier() (held.py has the whole rule). Stores that no release covers appear when the kernel ends.
    Call it between launches.

    Raises:
        EPError: a seed is given and the fix-ups are not installed.
    """
    if seed is None:
        if _applied:
            from . import chaos

            chaos.stop()
        return
    if not _applied:
        raise EPError(
            "chaos mode belongs to interpreted kernels; import triton_ep.runtime.launch on a machine without a GPU "
            "(or with TRITON_INTERPRET=1), or call triton_ep.runtime.interpreter.install()."
        )
    from . import chaos

    chaos.start(seed, _ranges)


def register_heap(base: int, nbytes: int) -> None:
    """Let chaos mode hold back plain stores to [base, base + nbytes); `base` is an address of this process."""
    _ranges.add(base, nbytes)


def unregister_heap(base: int) -> None:
    """End `register_heap(base, ...)`; KeyError if nothing is registered there."""
    _ranges.remove(base)


def set_wait_hook(fn: Callable[[], None] | None) -> None:
    """Call `fn` about every 20 ms from a kernel that waits; None: call nothing.

    An exception of `fn` ends the kernel; the launch raises triton.runtime.errors.InterpreterError with that exception
    as its __cause__ (of the __cause__ ...).
    """
    spinning.set_wait_hook(fn)


def _require_interpreting() -> None:
    import triton

    remedy = "import triton_ep before triton, or set TRITON_INTERPRET=1 in the environment."
    if not triton.knobs.runtime.interpret:
        raise EPError(f"TRITON_INTERPRET is off, so there is no interpreter to fix; {remedy}")
    if isinstance(triton.language.sum, triton.runtime.JITFunction):
        file = sys.modules["triton"].__file__
        raise EPError(f"triton ({file}) was imported before TRITON_INTERPRET was set; {remedy}")
