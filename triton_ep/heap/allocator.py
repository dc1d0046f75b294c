"""Arena: allocator for the offsets of one rank's symmetric memory. First fit; freed neighbours are merged."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable

from triton_ep.errors import HeapError


class Arena:
    """Free pieces of a range of `size` bytes. Manages offsets only, no memory.

    Offsets and sizes of pieces are multiples of `align`. `extend` adds further ranges; a piece never crosses from one
    range into the next. A range may have an owner: only requests with that owner get pieces of it.
    """

    def __init__(self, size: int, align: int) -> None:
        self._align = align
        self._free: list[tuple[int, int]] = []  # (start, end), ascending, no two touching inside one range
        self._walls: list[int] = []  # start of each range, ascending
        self._owners: list[Hashable] = []  # owner of each range; None = open to all
        self._taken: dict[int, int] = {}
        self.size = 0
        self.extend(size)

    def extend(self, size: int, owner: Hashable = None) -> int:
        """Add a range of `size` bytes, rounded down to the alignment; return the offset of its start."""
        start = self.size
        size -= size % self._align
        self._walls.append(start)
        self._owners.append(owner)
        self.size += size
        if size:
            self._free.append((start, self.size))
        return start

    def take(self, nbytes: int, owner: Hashable = None) -> int | None:
        """Take a piece of at least `nbytes` that is open to `owner`; return its offset, or None without room."""
        wanted = self._rounded(nbytes)
        for index, (start, end) in enumerate(self._free):
            if end - start >= wanted and self._open_to(start, owner):
                if end - start == wanted:
                    del self._free[index]
                else:
                    self._free[index] = (start + wanted, end)
                self._taken[start] = wanted
                return start
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Give back a piece that `take(nbytes)` returned.

        Raises:
            HeapError: the piece was not taken, or was given back before.
        """
        if self._taken.get(offset) != self._rounded(nbytes):
            raise HeapError(
                f"{nbytes} bytes at offset {offset} of the symmetric heap are not allocated (freed twice?)."
            )
        start, end = offset, offset + self._taken.pop(offset)
        index = bisect_left(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end and end not in self._walls:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start and start not in self._walls:
            start = self._free.pop(index - 1)[0]
        insort(self._free, (start, end))

    def largest_free(self, owner: Hashable = None) -> int:
        """Bytes of the largest free piece that is open to `owner`."""
        return max((end - start for start, end in self._free if self._open_to(start, owner)), default=0)

    def free_bytes(self) -> int:
        """Bytes of all free pieces together."""
        return sum(end - start for start, end in self._free)

    def _open_to(self, start: int, owner: Hashable) -> bool:
        """Whether the piece at `start` is open to `owner`."""
        return self._owners[bisect_right(self._walls, start) - 1] in (None, owner)

    def _rounded(self, nbytes: int) -> int:
        return -(-max(nbytes, 1) // self._align) * self._align
