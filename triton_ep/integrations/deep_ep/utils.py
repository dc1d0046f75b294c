"""deep_ep.utils: stream events, over triton_ep.EPEvent."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from triton_ep.context.overlap import EPEvent
from triton_ep.errors import InputError

__all__ = ["EventHandle", "EventOverlap"]


class EventHandle:
    """A point in a stream: the current point of the current stream, or the point of `event`."""

    def __init__(self, event: EPEvent | None = None) -> None:
        if event is not None and not isinstance(event, EPEvent):
            raise InputError(f"event must be an EPEvent or None, got {type(event).__name__}.")
        self.ep_event = EPEvent.record() if event is None else event

    def current_stream_wait(self) -> None:
        """Make the current stream wait for this point; the host does not wait."""
        self.ep_event.current_stream_wait()


class EventOverlap:
    """Event that calls take as `previous_event` and return last. As a context manager it waits on exit.

    Args:
        event: the point to wait for; None: no point.
        extra_tensors: tensors to keep alive as long as this object.
    """

    _hook: Callable[[], Any] | None = None
    _release_on_exit = False

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        if event is not None and not isinstance(event, EventHandle):
            raise InputError(f"event must be an EventHandle or None, got {type(event).__name__}.")
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Make the current stream wait for the event, if any, and run the hook of `register_hook_after_wait` once.

        release_handle: then drop the event and `extra_tensors`, so that their memory can be reused.

        Returns the result of the hook; None without one.
        """
        if self.event is not None:
            self.event.current_stream_wait()
        hook, self._hook = self._hook, None
        result = None if hook is None else hook()
        if release_handle:
            self.event = self.extra_tensors = None
        return result

    wait = current_stream_wait

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Call `hook_after_wait` after the next `current_stream_wait`.

        Raises:
            InputError: there is a hook already.
        """
        if self._hook is not None:
            raise InputError("this EventOverlap has a hook already. Wait for the event, then register another one.")
        self._hook = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Return this object for a `with` statement that waits with `release_handle`."""
        self._release_on_exit = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        release, self._release_on_exit = self._release_on_exit, False
        self.current_stream_wait(release)


def to_ep_event(previous: Any) -> EPEvent | None:
    """The event in an EventOverlap, or None.

    Raises:
        InputError: `previous` is none of EventOverlap, EventHandle and None.
    """
    if previous is not None and not isinstance(previous, EventOverlap | EventHandle):
        raise InputError(f"previous_event must be an EventOverlap or None, got {type(previous).__name__}.")
    handle = previous if isinstance(previous, EventHandle) else getattr(previous, "event", None)
    return None if handle is None else handle.ep_event


def order_of(previous_event: Any, async_finish: bool) -> dict[str, Any]:
    """`async_finish` and `previous_event` as arguments of a layer's call. Without `async_finish`: make the current
    stream wait for the event now, and return no arguments."""
    previous = to_ep_event(previous_event)
    if async_finish:
        return {"async_finish": True, "previous_event": previous}
    if previous is not None:
        previous.current_stream_wait()
    return {}


def to_overlap(event: EPEvent | None) -> EventOverlap:
    """Wrap an event or None in an EventOverlap."""
    return EventOverlap(None if event is None else EventHandle(event))
