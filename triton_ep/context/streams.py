"""What a layer does concurrently with the current stream: local work on a second one, and numbers read by the host."""

from __future__ import annotations

import time

import torch

from triton_ep.context.overlap import current_stream


class SideStream:
    """A stream of a layer, made at first use, with the events that order it and the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: tuple[torch.cuda.Stream, torch.cuda.Event, torch.cuda.Event] | None = None

    def fork(self) -> torch.cuda.Stream:
        """The stream, starting from where the current one is now; `join` must follow."""
        if self._made is None:
            # As that of `async_finish`: what an exchange waits for must not wait for the caller's own kernels.
            self._made = torch.cuda.Stream(self._device, priority=-1), torch.cuda.Event(), torch.cuda.Event()
        side, forked, _ = self._made
        forked.record(current_stream())
        side.wait_event(forked)
        return side

    def join(self) -> None:
        """Make the current stream wait for what was launched on this one."""
        if self._made is not None:
            side, _, joined = self._made
            joined.record(side)
            current_stream().wait_event(joined)

    def wait_joined(self) -> None:
        """Make the current stream wait for the work that the latest `join` waited for."""
        if self._made is not None:
            current_stream().wait_event(self._made[2])


class HostReads:
    """Reads small tensors of the device; the host waits for each, at most `limit_s` seconds."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._pinned: dict[int, tuple[torch.Tensor, torch.cuda.Event]] = {}  # by length

    def read(self, words: torch.Tensor) -> list[int]:
        """[n] integers of a tensor on a GPU, once the current stream has come there.

        Raises:
            TimeoutError: it does not come there.
        """
        count = words.shape[0]
        if count not in self._pinned:  # kept, because to make an event is a call of the driver
            with torch.inference_mode(False):
                self._pinned[count] = torch.empty(count, dtype=words.dtype, pin_memory=True), torch.cuda.Event()
        copied, done = self._pinned[count]
        copied.copy_(words, non_blocking=True)
        done.record(current_stream())
        deadline = time.monotonic() + self.limit_s
        while not done.query():
            if time.monotonic() > deadline:
                raise TimeoutError
        return copied.tolist()
