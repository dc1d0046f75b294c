"""A side stream for work of a layer that runs concurrently with the current stream."""

from __future__ import annotations

import torch

from triton_ep.context.overlap import current_stream


class SideStream:
    """A stream of a layer, created at first use, with the events that order it and the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: tuple[torch.cuda.Stream, torch.cuda.Event, torch.cuda.Event] | None = None

    def fork(self) -> torch.cuda.Stream:
        """The stream, ordered after all work launched on the current stream so far; `join` must follow."""
        if self._made is None:
            # High priority, as for `async_finish`: work that an exchange waits for must not queue behind other kernels.
            self._made = torch.cuda.Stream(self._device, priority=-1), torch.cuda.Event(), torch.cuda.Event()
        side, forked, _ = self._made
        forked.record(current_stream())
        forked.wait(side)  # the same as side.wait_event(forked)
        return side

    def join(self) -> None:
        """Make the current stream wait for all work launched on this one."""
        if self._made is not None:
            side, _, joined = self._made
            joined.record(side)
            joined.wait(current_stream())

    def wait_joined(self) -> None:
        """Make the current stream wait for the work that the latest `join` waited for."""
        if self._made is not None:
            self._made[2].wait(current_stream())
