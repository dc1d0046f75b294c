"""Arena: which bytes of one rank's symmetric memory are taken. First fit; freed neighbours are merged."""

from __future__ import annotations

from bisect import bisect_left, insort

from triton_ep.errors import HeapError


class Arena:
    """Free pieces of a range of `size` bytes; knows offsets, no memory.

    Pieces start at multiples of `align` and take a whole number of them. Several ranges may be joined with
    `extend`; a piece never crosses from one into the next.
    """

    def __init__(self, size: int, align: int) -> None:
        self._align = align
        self._free: list[tuple[int, int]] = []  # (start, end), ascending, no two touching inside one range
        self._walls: set[int] = set()
        self._taken: dict[int, int] = {}
        self.size = 0
        self.extend(size)

    def extend(self, size: int) -> int:
        """Add a range of `size` bytes, rounded down to the alignment; returns the offset of its start."""
        start = self.size
        size -= size % self._align
        self._walls.add(start)
        self.size += size
        if size:
            self._free.append((start, self.size))
        return start

    def take(self, nbytes: int) -> int | None:
        """Offset of a piece of at least `nbytes`, or None."""
        wanted = self._rounded(nbytes)
        for index, (start, end) in enumerate(self._free):
            if end - start >= wanted:
                if end - start == wanted:
                    del self._free[index]
                else:
                    self._free[index] = (start + wanted, end)
                self._taken[start] = wanted
                return start
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Give a piece back that `take(nbytes)` returned.

        Raises:
            HeapError: it was not taken, or is already back.
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

    def largest_free(self) -> int:
        """Bytes of the largest free piece."""
        return max((end - start for start, end in self._free), default=0)

    def free_bytes(self) -> int:
        """Bytes of all free pieces together."""
        return sum(end - start for start, end in self._free)

    def _rounded(self, nbytes: int) -> int:
        return -(-max(nbytes, 1) // self._align) * self._align
