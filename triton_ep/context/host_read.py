"""Wait on the host for numbers that a kernel writes to host memory (kernels/device/host_read.py)."""

from __future__ import annotations

import ctypes
import os
import time
from functools import partial

import numpy as np
import torch

from triton_ep.context.overlap import current_stream

_LOOKS_AFTER_S = 0.05
"""Interval at which a waiting host checks with the driver whether the device has failed."""
_LOOKS = 32
"""Looks between two chances for other threads: a few microseconds."""
_NUMBERS = 2**31 - 1
_let_others_run = getattr(os, "sched_yield", None) or partial(time.sleep, 0)
"""Not time.sleep where there is a choice: since Python 3.11 its shortest sleep takes 50 us on Linux."""


class HostRead:
    """Reads of one layer, at most one at a time.

    On GPUs the memory is page-locked, and mapped at the same address. A word arrives whole, with the number of its
    read, so neither the kernel nor the host needs a barrier, not even on hosts that reorder loads.

    Args:
        num_words: words published in each read.
        limit_s: longest wait of the host, in seconds.

    Attributes:
        memory: [num_words] int64, where the kernel writes.
    """

    @torch.inference_mode(False)  # written for as long as the layer lives
    def __init__(self, num_words: int, limit_s: float, device: torch.device) -> None:
        self.limit_s = limit_s
        self._on_gpu = device.type == "cuda"
        self.memory = torch.zeros(num_words, dtype=torch.int64, pin_memory=self._on_gpu)
        self._last = ctypes.c_int64.from_address(self.memory.data_ptr() + 8 * (num_words - 1))
        self._words = self.memory.numpy()
        self._number = 0

    def begin(self) -> int:
        """The number of the next read, from 1, for the kernel that will publish the words."""
        self._number = self._number % _NUMBERS + 1
        return self._number

    def wait(self) -> list[int]:
        """The words that the kernel publishes in the latest read.

        Raises:
            TimeoutError: they do not come.
            RuntimeError: the GPU has failed, as torch reports it.
        """
        began = looked = time.monotonic()
        while True:
            for _ in range(_LOOKS):
                if (told := self._told()) is not None:
                    return told
            _let_others_run()
            now = time.monotonic()
            if now - looked > _LOOKS_AFTER_S and self._on_gpu:
                looked = now
                current_stream().query()  # raises the device's error
            if now - began > self.limit_s:
                raise TimeoutError

    def _told(self) -> list[int] | None:
        """The words, or None until all of them have come."""
        if self._last.value >> 32 != self._number:  # published last, so it usually arrives last
            return None
        # Each word is one load, which brings its number. Hot path: rows may have to wait until the host has read.
        halves = self._words.copy().view(np.int32)  # on little-endian hosts
        numbers = self._number.to_bytes(4, "little") * len(self._words)
        return halves[::2].tolist() if halves[1::2].tobytes() == numbers else None
