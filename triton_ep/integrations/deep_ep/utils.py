"""deep_ep.utils: events of streams, over triton_ep.EPEvent."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from triton_ep.context.overlap import EPEvent
from triton_ep.errors import InputError

__all__ = ["EventHandle", "EventOverlap"]


class EventHandle:
    """A point of a stream: where the current one is now, or a given one."""

    def __init__(self, event: EPEvent | None = None) -> None:
        if event is not None and not isinstance(event, EPEvent):
            raise InputError(f"event must be an EPEvent or None, got {type(event).__name__}.")
        self.ep_event = EPEvent.record() if event is None else event

    def current_stream_wait(self) -> None:
        """Make the current stream wait for it; the host goes on."""
        self.ep_event.current_stream_wait()


class EventOverlap:
    """What calls take as `previous_event` and return last; also a context that waits at its end.

    Args:
        event: the point to wait for; None = there is none to wait for.
        extra_tensors: kept alive with it.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        if event is not None and not isinstance(event, EventHandle):
            raise InputError(f"event must be an EventHandle or None, got {type(event).__name__}.")
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Make the current stream wait for the event; nothing where there is none.

        release_handle: forget the event and `extra_tensors` then, so that their memory may be used again.
        """
        if self.event is not None:
            self.event.current_stream_wait()
        if release_handle:
            self.event = self.extra_tensors = None

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.current_stream_wait()


def to_ep_event(previous: Any) -> EPEvent | None:
    """The event in an EventOverlap; None where there is none.

    Raises:
        InputError: something else than an EventOverlap, an EventHandle or None.
    """
    if previous is not None and not isinstance(previous, EventOverlap | EventHandle):
        raise InputError(f"previous_event must be an EventOverlap or None, got {type(previous).__name__}.")
    handle = previous if isinstance(previous, EventHandle) else getattr(previous, "event", None)
    return None if handle is None else handle.ep_event


def order_of(previous_event: Any, async_finish: bool) -> dict[str, Any]:
    """When a call runs, in the layer's words; without `async_finish` the current stream waits for the event now."""
    previous = to_ep_event(previous_event)
    if async_finish:
        return {"async_finish": True, "previous_event": previous}
    if previous is not None:
        previous.current_stream_wait()
    return {}


def to_overlap(event: EPEvent | None) -> EventOverlap:
    """An EventOverlap of an event, or of none."""
    return EventOverlap(None if event is None else EventHandle(event))
