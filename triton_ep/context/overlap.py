"""Split-phase calls and calls on a stream of their own: hooks, events, and the calls that a layer refuses meanwhile."""

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
    """The current stream, cached per stream handle because torch.cuda.current_stream costs microseconds."""
    device = torch._C._cuda_getDevice()
    return _stream_of(device, torch._C._cuda_getCurrentRawStream(device))


@dataclass
class OpenCalls:
    """Open calls of a layer: at most one dispatch and one combine at a time.

    Attributes:
        dispatch: number of the dispatch whose hook is still to be called; 0 = none.
        combine: the hook of a combine is still to be called.
        lent: the caller may write into the combine buffer.
    """

    dispatch: int = 0
    combine: bool = False
    lent: bool = False

    def begin(self, call: Literal["dispatch", "combine"], number: int) -> None:
        """Open a call whose hook the caller has got; number: number of the dispatch."""
        if call == "dispatch":
            self.dispatch = number
        else:
            self.combine = True

    def end(self, call: Literal["dispatch", "combine"]) -> None:
        """Close a call whose hook has been called."""
        if call == "dispatch":
            self.dispatch = 0
        else:
            self.combine = False

    def check_dispatch(self) -> None:
        """Raise if a dispatch may not begin.

        Raises:
            InputError: the hook of the previous dispatch has not been called.
        """
        if self.dispatch:
            raise InputError(
                f"dispatch was called before the hook of dispatch number {self.dispatch} of this layer, whose rows it "
                "would overwrite. Call that hook first, or give each micro-batch a layer of its own."
            )

    def check_combine(self, number: int = 0) -> None:
        """Raise if a combine of the dispatch with that number may not begin.

        Raises:
            InputError: the hook of that dispatch, or of the previous combine, has not been called.
        """
        if self.combine:
            raise InputError(
                "combine was called before the hook of the previous combine on this layer, whose rows it would "
                "overwrite. Call that hook first, or give each micro-batch a layer of its own."
            )
        if self.dispatch and self.dispatch == number:
            raise InputError(
                f"combine got the descriptor of dispatch number {number}, whose hook has not been called: its rows are "
                "not there yet. Call the hook, then the experts, then combine."
            )

    def lend(self) -> None:
        """Lend the combine buffer to the caller.

        Raises:
            InputError: other ranks still read it.
        """
        if self.combine:
            raise InputError(
                "combine_buffer was called before the hook of the previous combine on this layer, whose rows are still "
                "read from there. Call that hook first."
            )
        self.lent = True

    def end_loan(self, used: bool) -> None:
        """End the loan because a combine begins. used: its rows are in the combine buffer; else they are copied there.

        Raises:
            InputError: the rows are in the combine buffer, but the caller does not have the loan.
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
    """A point of a stream, for which other streams can wait.

    Attributes:
        event: event of torch; None on the CPU, where calls have ended when they return.
    """

    event: torch.cuda.Event | None = None

    @classmethod
    def record(cls) -> EPEvent:
        """The current point of the current stream; without a GPU, an event that has already passed."""
        if not _on_gpu():
            return cls()
        event = torch.cuda.Event()
        event.record(current_stream())
        return cls(event)

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the event; the host does not wait."""
        if self.event is not None:
            current_stream().wait_event(self.event)


class RecvHook:
    """The receiving half of a `dispatch` or `combine`. Call it once, on the stream that uses the outputs.

    Raises when called:
        InputError: it is called a second time; another GPU than that of the layer is current, and it may be called
            again.
        FinalizedError, WaitTimeout: the layer was finalized, or has failed.
        The errors of the call itself.
    """

    def __init__(
        self, receive: Callable[[], None], results: tuple[object, ...], on_gpu: bool, check: Callable[[], None]
    ) -> None:
        self._receive: Callable[[], None] | None = receive
        self._check = check  # raises if it may not be called now
        self._results = results
        self._sent = EPEvent.record() if on_gpu else EPEvent()
        self._stream = current_stream() if on_gpu else None

    def __call__(self) -> None:
        """Launch the receiving half on the current stream, after the sending half."""
        if self._receive is None:
            raise InputError("a hook was called twice. The outputs of its call have been valid since the first time.")
        self._check()
        receive, self._receive = self._receive, None
        if self._stream is not None and current_stream() != self._stream:
            self._sent.current_stream_wait()
            keep(tensors_in(*self._results), current_stream())
        self._results = ()
        receive()


class CommStream:
    """A layer's own stream for calls with `async_finish`; created at first use, on a GPU only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._called: torch.cuda.Event | None = None  # kept, because creating an event calls the driver

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream, of high priority; None on the CPU."""
        if self._stream is None and self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device, priority=-1)
        return self._stream

    def join(self) -> None:
        """Make the current stream wait for all work on this one."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def run(
        self, call: Callable[[], _Result], arguments: tuple[object, ...], previous: EPEvent | None
    ) -> tuple[_Result, EPEvent]:
        """Run `call` on the stream, after `previous` or else the current stream; return its result and end event.

        arguments: everything that the call reads, allocated on the current stream. Results are allocated on this one.
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
        elif isinstance(previous, EPEvent) and previous.event is not None:  # the call refuses other types
            stream.wait_event(previous.event)
        torch.cuda.set_stream(stream)  # torch.cuda.stream queries the current stream twice
        try:
            result = call()
            done = EPEvent.record()
        finally:
            torch.cuda.set_stream(current)
        keep(tensors_in(*arguments), stream)
        keep(tensors_in(result), current)
        return result, done


def tensors_in(*values: object) -> list[torch.Tensor]:
    """All tensors in the arguments or results of a call."""
    found: list[torch.Tensor] = []
    for value in values:
        if type(value) is int or value is None:  # first, because lists of counts have an int for each expert
            continue
        if type(value) is torch.Tensor:
            found.append(value)
        elif isinstance(value, torch.Tensor):
            # A tensor that wraps other tensors has no memory of its own.
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
    """Record that `stream` uses the tensors: the caching allocator reuses freed ones only after that stream's work."""
    for tensor in tensors:
        tensor.record_stream(stream)
