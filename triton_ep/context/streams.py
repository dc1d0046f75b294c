"""A side stream for work of a layer that runs concurrently with the current stream."""

from __future__ import annotations

from typing import NamedTuple

import torch

from triton_ep.context.overlap import current_stream


class _Side(NamedTuple):
    stream: torch.cuda.Stream
    forked: torch.cuda.Event
    joined: torch.cuda.Event


class SideStream:
    """A stream of a layer, created at first use, with the events that order it and the current stream.

    It has the priority of the current stream. With a higher one, programs that wait for rows take multiprocessors from
    the programs that send these rows where both kernels may begin at once, as in a CUDA graph (4 x H200: a dispatch of
    4096 tokens took 626 us there instead of 571).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_priority: dict[int, _Side] = {}
        self._latest: _Side | None = None

    def fork(self) -> torch.cuda.Stream:
        """The stream, ordered after all work launched on the current stream so far; `join` must follow."""
        current = current_stream()
        side = self._of_priority.get(current.priority)
        if side is None:
            stream = torch.cuda.Stream(self._device, priority=current.priority)
            side = self._of_priority[current.priority] = _Side(stream, torch.cuda.Event(), torch.cuda.Event())
        self._latest = side
        side.forked.record(current)
        side.forked.wait(side.stream)  # the same as stream.wait_event(forked)
        return side.stream

    def join(self) -> None:
        """Make the current stream wait for all work launched on this one."""
        if self._latest is not None:
            self._latest.joined.record(self._latest.stream)
            self._latest.joined.wait(current_stream())

    def wait_joined(self) -> None:
        """Make the current stream wait for the work that the latest `join` waited for."""
        if self._latest is not None:
            self._latest.joined.wait(current_stream())
