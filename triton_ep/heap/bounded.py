"""A time limit for calls without one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def within(limit_s: float, work: Callable[[], _Result]) -> _Result:
    """Run `work()` in a separate thread; return its result or raise its error.

    For calls that wait in C without a limit: a store whose server has been stopped, a GPU that does not end its work.

    Raises:
        TimeoutError: `work` has not ended after `limit_s` seconds. Its thread goes on, but keeps no process alive.
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
