"""Hooks of interpreted waits: a wait regularly calls a hook, which can end it.

`kernels/device/spin.py` yields the core at every turn of a waiting loop, and calls this module.
Independent of Triton, so a hook may be set before Triton is imported.
"""

import time
from collections.abc import Callable

HOOK_INTERVAL_S = 0.02

_hook: Callable[[], None] | None = None
_at_each_turn: Callable[[], None] | None = None
_next_call_s = 0.0


def set_wait_hook(function: Callable[[], None] | None) -> None:
    """Set or clear the hook of this process."""
    global _hook
    _hook = function


def call_at_each_turn(function: Callable[[], None] | None) -> None:
    """Set or clear the function that every turn of a wait calls (chaos mode)."""
    global _at_each_turn
    _at_each_turn = function


def while_waiting() -> None:
    """Call the hook if the last call is HOOK_INTERVAL_S or longer ago; an exception of the hook ends the kernel."""
    global _next_call_s
    if _at_each_turn is not None:
        _at_each_turn()
    now = time.monotonic()
    if _hook is not None and now >= _next_call_s:
        _next_call_s = now + HOOK_INTERVAL_S
        _hook()
