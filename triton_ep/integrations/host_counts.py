"""Counts that the host knows, as tensors on the CPU."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch

_AT_ONCE = 64
"""Tensors that are made at once."""


class HostCounts:
    """Makes int64 tensors on the CPU for results of the same length in call after call.

    They are parts of one tensor, made for many calls at once: while a GPU waits for the host, a tensor of its own takes
    the host 20 us, most of them for code that no other part of the call has brought into the caches. Each part is
    handed out once.
    """

    def __init__(self) -> None:
        self._length = -1
        self._parts: list[tuple[int, torch.Tensor]] = []  # with their places in memory

    def tensor(self, counts: Sequence[int]) -> torch.Tensor:
        """The counts as int64."""
        if len(counts) != self._length or not self._parts:
            self._make(len(counts))
        at, part = self._parts.pop()
        self._layout.pack_into(self._bytes, at, *counts)
        return part

    @torch.inference_mode(False)  # a part may be used outside inference mode
    def _make(self, length: int) -> None:
        memory = torch.empty(_AT_ONCE, length, dtype=torch.int64, device="cpu")
        values: Any = memory.numpy()
        self._layout, self._bytes = struct.Struct(f"{length}q"), memoryview(values).cast("B")
        places = range(0, _AT_ONCE * self._layout.size, self._layout.size)
        self._length, self._parts = length, list(zip(places, memory.unbind(), strict=True))
