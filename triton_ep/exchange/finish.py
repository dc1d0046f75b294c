"""How a call of a layer ends: now, by a hook, or on the layer's stream with an event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from triton_ep.context.context import DispatchCombineContext
from triton_ep.context.overlap import CommStream, EPEvent, RecvHook

Results = TypeVar("Results")


@dataclass(slots=True)
class InFlight(Generic[Results]):
    """A call whose sending half has been launched.

    Attributes:
        call: its name.
        results: what it returns; the receiving half writes their tensors.
        receive: launches the receiving half; it has been launched unless a hook was asked for.
        used: what the receiving half reads besides.
    """

    context: DispatchCombineContext
    call: Literal["dispatch", "combine"]
    results: Results
    receive: Callable[[], None]
    used: object = None

    def hook(self) -> RecvHook:
        """The hook of this call; until it is called the layer may not begin another such call."""
        ctx = self.context
        ctx.calls.begin(self.call, ctx.num_dispatches)
        return RecvHook(self._end, (self.results, self.used), ctx.device.type == "cuda")

    def _end(self) -> None:
        ctx = self.context
        try:
            ctx.check_open()
            ctx.calls.end(self.call)
            self.receive()
            ctx.poll_status()
        except Exception as error:
            ctx.fail(f"the hook of {self.call}", error, begun=True)
            raise


class Finish(NamedTuple):
    """What a caller asks of the end of a call; arguments of `EPAll2AllLayer.dispatch`."""

    return_recv_hook: bool = False
    async_finish: bool = False
    previous_event: EPEvent | None = None

    def run(
        self, send: Callable[[], InFlight[Results]], comm: CommStream, arguments: tuple[object, ...]
    ) -> tuple[Results, RecvHook | EPEvent | None]:
        """What a call returns, and its hook or event, if one was asked for.

        send: checks arguments and launches the call, all of it unless a hook was asked for.
        arguments: what the call reads.
        """
        if self.async_finish:
            return comm.run(lambda: send().results, arguments, self.previous_event)
        call = send()
        return call.results, call.hook() if self.return_recv_hook else None
