"""A time limit for calls that have none of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def within(limit_s: float, work: Callable[[], _Result]) -> _Result:
    """What `work()` returns or raises, from a thread of its own.

    For calls that wait in C without a limit: a store whose server has been stopped, a GPU that does not end its work.

    Raises:
        TimeoutError: it has not ended after `limit_s` seconds; the thread goes on, and keeps no process alive.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread: Any = threading.Thread(target=run, name="triton_ep-bounded", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return results[0]
