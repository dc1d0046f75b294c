"""Clock and pause of a waiting kernel: a pause lets other ranks run when interpreted, other warps when compiled.

Every function that the compiler meets, even in a dead branch, must be a Triton function, and Triton's interpreter
has no clock. So each name has two definitions, one of which is chosen when this module is imported; kernels call
either in the same way:

    start = now_ns()
    polls = 0
    seen = tl.load(flag_ptr, volatile=True)
    while (seen < expected) & (now_ns() - start < timeout_ns):
        pause(polls)
        polls += 1
        seen = tl.load(flag_ptr, volatile=True)

Import names (`from .spin import now_ns, pause`), not the module. `pause` never ends a wait: the caller
bounds the wait, in the same way for both definitions.
"""

import os
import time
from collections.abc import Callable
from operator import index

import triton
import triton.language as tl

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))

_YIELDS = 8  # one interpreted turn takes 60 to 100 us, so most waits end here
_SHORTEST_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 1e-3
_POLLS_AWAKE = tl.constexpr(16)  # more than 10 us: how long a rank waits for the counts of others
LOOKS = tl.constexpr(1 if INTERPRET.value else 16)
"""Polls between two looks at the clock and at the status record."""

_on_pause: Callable[[], None] | None = None


def call_on_pause(function: Callable[[], None] | None) -> None:
    """Call `function` at every pause of an interpreted wait in this process; None removes it.

    An exception that it raises ends the kernel. Used by triton_ep.runtime.interpreter; compiled kernels never call it.
    """
    global _on_pause
    _on_pause = function


if INTERPRET.value:
    from triton.runtime.interpreter import interpreter_builder

    def pause(polls):
        """Yield the core, or sleep 50 us to 1 ms, depending on `polls`, the number of polls so far."""
        if _on_pause is not None:
            _on_pause()
        turn = index(polls) - _YIELDS
        if turn < 0:
            os.sched_yield()
        else:
            time.sleep(min(_SHORTEST_SLEEP_S * 2 ** min(turn // 2, 16), _LONGEST_SLEEP_S))

    def now_ns():
        """Nanoseconds of a clock that only goes forward, as an int64 scalar."""
        return tl.core.tensor(interpreter_builder.get_int64(time.monotonic_ns()), tl.int64)

    @triton.jit
    def acquire_loads(addresses):
        """The int64 words at a block of addresses, each acquired at system scope."""
        return tl.atomic_add(addresses.to(tl.pointer_type(tl.int64)), 0, sem="acquire", scope="sys")

    @triton.jit
    def acquire_pairs(addresses):
        """The lower of two int64 words at each of a block of addresses, multiples of 16; both are acquired."""
        return tl.minimum(acquire_loads(addresses), acquire_loads(addresses + 8))

else:

    @triton.jit
    def pause(polls):
        """Do nothing for the first polls; after that, sleep for about half a microsecond.

        Blocks of other kernels may share the multiprocessor, including the ones that this block waits for. Polling at
        full rate would take issue slots from them.
        """
        if polls >= _POLLS_AWAKE:
            tl.inline_asm_elementwise(
                "nanosleep.u32 500; mov.u32 $0, $1;", "=r,r", [polls], dtype=tl.int32, is_pure=False, pack=1
            )

    @triton.jit
    def now_ns():
        """Nanoseconds of the GPU's global timer, as an int64 scalar."""
        return tl.extra.cuda.globaltimer()

    @triton.jit
    def acquire_loads(addresses):
        """The int64 words at a block of addresses, each acquired at system scope. Triton has no such load."""
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [addresses], dtype=tl.int64, is_pure=False, pack=1
        )

    @triton.jit
    def acquire_pairs(addresses):
        """The lower of two int64 words at each of a block of addresses, multiples of 16; both are acquired. A thread
        acquires several addresses one after the other, so with many words this takes half the time."""
        return tl.inline_asm_elementwise(
            "{ .reg .b64 a, b; ld.acquire.sys.global.v2.b64 {a, b}, [$1]; min.s64 $0, a, b; }",
            "=l,l",
            [addresses],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
