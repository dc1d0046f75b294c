"""Calls in two halves and calls on a stream of their own: hooks, events, and what a layer may not do in between."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass
from typing import Literal, TypeVar

import torch
from torch.utils import _pytree

from triton_ep.errors import InputError

_Result = TypeVar("_Result")
_on_gpu = functools.cache(torch.cuda.is_available)


@functools.lru_cache(maxsize=32)
def _stream_of(device: int, handle: int) -> torch.cuda.Stream:
    return torch.cuda.current_stream(device)


def current_stream() -> torch.cuda.Stream:
    """Cached per stream handle, because torch.cuda.current_stream costs microseconds."""
    device = torch._C._cuda_getDevice()
    return _stream_of(device, torch._C._cuda_getCurrentRawStream(device))


@dataclass
class OpenCalls:
    """What has begun on a layer and not ended: at most one dispatch and one combine at a time.

    Attributes:
        dispatch: number of the dispatch whose hook is still to be called; 0 = none.
        combine: the hook of a combine is still to be called.
        lent: the caller may write into the combine buffer.
    """

    dispatch: int = 0
    combine: bool = False
    lent: bool = False

    def begin(self, call: Literal["dispatch", "combine"], number: int) -> None:
        """The caller has got a hook; number: of the dispatch."""
        if call == "dispatch":
            self.dispatch = number
        else:
            self.combine = True

    def end(self, call: Literal["dispatch", "combine"]) -> None:
        """The hook has been called."""
        if call == "dispatch":
            self.dispatch = 0
        else:
            self.combine = False

    def check_dispatch(self) -> None:
        """Raise if a dispatch may not begin.

        Raises:
            InputError: the hook of the one before has not been called.
        """
        if self.dispatch:
            raise InputError(
                f"dispatch was called before the hook of dispatch number {self.dispatch} of this layer, whose rows it "
                "would overwrite. Call that hook first, or give each micro-batch a layer of its own."
            )

    def check_combine(self, number: int = 0) -> None:
        """Raise if a combine of the dispatch with that number may not begin.

        Raises:
            InputError: the hook of that dispatch, or of the combine before, has not been called.
        """
        if self.combine:
            raise InputError(
                "combine was called before the hook of the combine before on this layer, whose rows it would "
                "overwrite. Call that hook first, or give each micro-batch a layer of its own."
            )
        if self.dispatch and self.dispatch == number:
            raise InputError(
                f"combine got the descriptor of dispatch number {number}, whose hook has not been called: its rows are "
                "not there yet. Call the hook, then the experts, then combine."
            )

    def lend(self) -> None:
        """The caller gets the combine buffer.

        Raises:
            InputError: other ranks still read it.
        """
        if self.combine:
            raise InputError(
                "combine_buffer was called before the hook of the combine before on this layer, whose rows are still "
                "read from there. Call that hook first."
            )
        self.lent = True

    def end_loan(self, used: bool) -> None:
        """A combine begins, from rows in the combine buffer (`used`) or from others, which go there.

        Raises:
            InputError: the caller wrote there without having been lent it.
        """
        if used and not self.lent:
            raise InputError(
                "combine got rows in the combine buffer, but another combine has begun since combine_buffer lent it. "
                "Call combine_buffer again before each combine, and write the rows after that."
            )
        self.lent = False

    def check_growth(self, rows: int) -> None:
        """Raise if the combine buffer may not be replaced by one of `rows` rows.

        Raises:
            InputError: other ranks still read it, or the caller may write into it.
        """
        if self.combine or self.lent:
            why = "the hook of a combine is still to be called" if self.combine else "combine_buffer has lent it"
            raise InputError(
                f"the combine buffer must grow to {rows} rows, but {why}. Combine first, or make the layer with a "
                "capacity, which never grows."
            )


@dataclass(frozen=True)
class EPEvent:
    """A point of a stream, which other streams can wait for.

    Attributes:
        event: of torch; None on the CPU, where calls have ended when they return.
    """

    event: torch.cuda.Event | None = None

    @classmethod
    def record(cls) -> EPEvent:
        """The point that the current stream has come to; on a machine without a GPU one that has passed already."""
        if not _on_gpu():
            return cls()
        event = torch.cuda.Event()
        event.record(current_stream())
        return cls(event)

    def current_stream_wait(self) -> None:
        """Make the current stream wait for it; the host goes on."""
        if self.event is not None:
            current_stream().wait_event(self.event)


class RecvHook:
    """The receiving half of a `dispatch` or `combine`; called once, on the stream that is to have the outputs.

    Raises when called:
        InputError: a second time.
        FinalizedError, WaitTimeout: the layer was finalized, or has failed.
        What the call itself raises.
    """

    def __init__(self, receive: Callable[[], None], results: tuple[object, ...], on_gpu: bool) -> None:
        self._receive: Callable[[], None] | None = receive
        self._results = results
        self._sent = EPEvent.record() if on_gpu else EPEvent()
        self._stream = current_stream() if on_gpu else None

    def __call__(self) -> None:
        """Launch the receiving half on the current stream, after the sending half."""
        if self._receive is None:
            raise InputError("a hook was called twice. The outputs of its call are valid since the first time.")
        receive, self._receive = self._receive, None
        if self._stream is not None and current_stream() != self._stream:
            self._sent.current_stream_wait()
            keep(tensors_in(*self._results), current_stream())
        self._results = ()
        receive()


class CommStream:
    """A layer's own stream for calls with `async_finish`; made at first use, on a GPU only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._called: torch.cuda.Event | None = None  # kept, because to make an event is a call of the driver

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Of high priority; None on the CPU."""
        if self._stream is None and self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device, priority=-1)
        return self._stream

    def join(self) -> None:
        """Make the current stream wait for what this one has been given."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def run(
        self, call: Callable[[], _Result], arguments: tuple[object, ...], previous: EPEvent | None
    ) -> tuple[_Result, EPEvent]:
        """What `call` returns on the stream, after `previous` or else the current stream, and the event of its end.

        arguments: what the call reads; it was made for the current stream, and what it returns for the other one.
        """
        stream = self.stream
        if stream is None:
            return call(), EPEvent()
        current = current_stream()
        if previous is None:
            if self._called is None:
                self._called = torch.cuda.Event()
            self._called.record(current)
            stream.wait_event(self._called)
        elif isinstance(previous, EPEvent) and previous.event is not None:  # else the call refuses it
            stream.wait_event(previous.event)
        torch.cuda.set_stream(stream)  # torch.cuda.stream asks for the current one twice
        try:
            result = call()
            done = EPEvent.record()
        finally:
            torch.cuda.set_stream(current)
        keep(tensors_in(*arguments), stream)
        keep(tensors_in(result), current)
        return result, done


def tensors_in(*values: object) -> list[torch.Tensor]:
    """All tensors of what a call takes or returns."""
    found: list[torch.Tensor] = []
    for value in values:
        if type(value) is int or value is None:  # first, because counts have one for each expert
            continue
        if type(value) is torch.Tensor:
            found.append(value)
        elif isinstance(value, torch.Tensor):
            # A tensor made of others has no memory of its own.
            inner = getattr(value, "__tensor_flatten__", None)
            found += [value] if inner is None else tensors_in(*(getattr(value, name) for name in inner()[0]))
        elif isinstance(value, tuple | list):
            found += tensors_in(*value)
        elif is_dataclass(value):
            found += tensors_in(*vars(value).values())
        else:
            found += tensors_in(*(leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)))
    return found


def keep(tensors: Iterable[torch.Tensor], stream: torch.cuda.Stream) -> None:
    """Record that `stream` uses them: the caching allocator does not hand freed ones out before it is through."""
    for tensor in tensors:
        tensor.record_stream(stream)
