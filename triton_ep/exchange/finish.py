"""End a call of a layer: at once, by a hook, or on the layer's stream with an event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

from triton_ep.context.context import DispatchCombineContext
from triton_ep.context.overlap import CommStream, EPEvent, RecvHook
from triton_ep.exchange.ranges import call_range, records_ranges

Call = Literal["dispatch", "combine"]
Results = TypeVar("Results")


Launched = tuple[Results, Callable[[], None]]
"""The results of a call, and its receiving half, which has been launched unless a hook was requested."""


class Ending(NamedTuple):
    """How the caller wants a call to end. By default both halves have been launched when the call returns.

    Attributes:
        return_recv_hook: the caller gets a hook that launches the receiving half.
        async_finish: the call runs on `comm_stream`, and the caller gets an event.
        previous_event: with async_finish, the event to wait for in place of the current stream.
    """

    return_recv_hook: bool = False
    async_finish: bool = False
    previous_event: EPEvent | None = None


PLAIN = Ending()
"""The default; `ending_of` returns this object."""


def ending_of(return_recv_hook: bool, async_finish: bool, previous_event: EPEvent | None) -> Ending:
    """The ending with these arguments, which are not checked yet."""
    if return_recv_hook is async_finish is False and previous_event is None:
        return PLAIN
    return Ending(return_recv_hook, async_finish, previous_event)


class InFlight:
    """A call whose sending half has been launched and whose receiving half has not.

    Creating one opens the call: until its hook is called the layer may not begin another call of this kind.

    Args:
        receive: launches the receiving half.
    """

    def __init__(self, context: DispatchCombineContext, call: Call, receive: Callable[[], None]) -> None:
        self.context, self.call, self._receive = context, call, receive
        context.calls.begin(call, context.num_dispatches)

    def hook(self, *results: object) -> RecvHook:
        """The hook that ends the call. results: its results, and everything else that its receiving half reads."""
        ctx = self.context
        return RecvHook(self._end, results, ctx.device.type == "cuda", ctx.check_open)

    def _end(self) -> None:
        ctx = self.context
        try:
            ctx.calls.end(self.call)
            with call_range(f"hook of {self.call}", ctx):
                self._receive()
            ctx.poll_status()
        except Exception as error:
            ctx.fail(f"the hook of {self.call}", error, begun=True)
            raise


class Finisher:
    """Ends the calls of one layer as their callers request."""

    def __init__(self, context: DispatchCombineContext, comm: CommStream) -> None:
        self._context, self._comm = context, comm

    def __call__(
        self,
        call: Call,
        send: Callable[[], Launched[Results]],
        arguments: tuple[object, ...],
        ending: Ending,
    ) -> tuple[Results, RecvHook | EPEvent | None]:
        """Launch a call; return its results, and its hook or event if one was requested.

        Args:
            send: checks arguments and launches the call.
            arguments: everything that the call reads.
        """

        launch = self._named(call, send) if records_ranges() else send
        if ending is PLAIN:
            return launch()[0], None
        if ending.async_finish:
            return self._comm.run(lambda: launch()[0], arguments, ending.previous_event)
        results, receive = launch()
        if not ending.return_recv_hook:
            return results, None
        return results, InFlight(self._context, call, receive).hook(results, arguments)

    def _named(self, call: Call, send: Callable[[], Launched[Results]]) -> Callable[[], Launched[Results]]:
        def named() -> Launched[Results]:
            with call_range(call, self._context):
                return send()

        return named
