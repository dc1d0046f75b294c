"""Stores of this process that its peers may not see yet: the memory model of chaos mode.

A plain store to a heap range is held back. It passes through these states, as a GPU must guarantee:

    fresh      stored by the program that runs now; other warps of its block may not have stored yet
    ordered    a block barrier came after it (a store of one element needs none)
    released   a release at GPU scope came after that: covered by any later system-scope release
    visible    a release at system scope by the same program came after `ordered`, or after `released`

Unreleased stores stay hidden until the kernel ends, or become visible bit by bit if programs of the kernel wait for
them (`leak`). Loads, atomics and stores of this process that overlap a held store apply
its overlapping elements first, so a process always sees its own memory in order. Addresses are those of this process.
Independent of Triton.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Writer = Callable[[Array, Array], None]


class HeapRanges:
    """Address ranges of symmetric memory, own and peers', as this process maps them."""

    def __init__(self) -> None:
        self._size: dict[int, int] = {}
        self._bases: list[int] = []

    def add(self, base: int, nbytes: int) -> None:
        """Register [base, base + nbytes), or change the size of a registered range."""
        self._size[base] = nbytes
        self._bases = sorted(self._size)

    def remove(self, base: int) -> None:
        """Unregister the range at `base`; KeyError if there is none."""
        del self._size[base]
        self._bases = sorted(self._size)

    def contains(self, addrs: Array) -> Array:
        """Bool per address [n] uint64: True if it lies in one of the ranges."""
        if not self._bases or addrs.size == 0:
            return np.zeros(addrs.shape, dtype=bool)
        low, high = int(addrs.min()), int(addrs.max())
        before = bisect_right(self._bases, low) - 1
        if before >= 0 and high < self._bases[before] + self._size[self._bases[before]]:
            return np.ones(addrs.shape, dtype=bool)
        bases = np.array(self._bases, dtype=np.uint64)
        ends = bases + np.array([self._size[base] for base in self._bases], dtype=np.uint64)
        index = np.searchsorted(bases, addrs, side="right")
        return (index > 0) & (addrs < ends[np.maximum(index, 1) - 1])


class _Store:
    """Elements of one store instruction, by ascending address."""

    def __init__(self, addrs: Array, values: Array) -> None:
        order = np.argsort(addrs, kind="stable")
        self.addrs, self.values = addrs[order], values[order]

    def overlaps(self, addrs: Array, itemsize: int) -> Array:
        """Bool per element of this store: True if it shares a byte with an element at `addrs` (sorted)."""
        own_size = np.uint64(self.values.itemsize)
        # The first of `addrs` whose element ends past the start of my element decides.
        first = np.searchsorted(addrs, self.addrs - np.uint64(itemsize), side="right")
        found = first < addrs.size
        return found & (addrs[np.minimum(first, addrs.size - 1)] < self.addrs + own_size)


class HeldStores:
    """All stores held back in this process, and the order in which they become visible.

    Args:
        write: writes values [n] to addresses [n] uint64.
        rng: decides the order.
        linger: called once, before one of the stores that become visible when a kernel ends, so that peers have
            time to act on a flag that they should not see yet.
    """

    def __init__(self, write: Writer, rng: np.random.Generator, linger: Callable[[], None]) -> None:
        self._write = write
        self._rng = rng
        self._linger = linger
        self._fresh: list[_Store] = []
        self._ordered: list[_Store] = []
        self._released: list[_Store] = []
        self._abandoned: list[_Store] = []

    def _lists(self) -> Iterator[list[_Store]]:
        yield from (self._abandoned, self._released, self._ordered, self._fresh)

    def __len__(self) -> int:
        """Number of store instructions that are held back, fully or in part."""
        return sum(map(len, self._lists()))

    def hold(self, addrs: Array, values: Array) -> None:
        """Hold back the store of one instruction: addrs [n] uint64, values [n]."""
        self.settle(addrs, values.itemsize)
        (self._ordered if addrs.size == 1 else self._fresh).append(_Store(addrs, values.copy()))

    def settle(self, addrs: Array, itemsize: int) -> None:
        """Make the held elements visible that overlap elements of `itemsize` bytes at `addrs` [n] uint64."""
        if not len(self) or addrs.size == 0:
            return
        addrs = np.sort(addrs)
        low, high = addrs[0], addrs[-1] + np.uint64(itemsize)
        for stores in self._lists():
            for store in list(stores):
                if store.addrs[0] >= high or store.addrs[-1] + np.uint64(store.values.itemsize) <= low:
                    continue
                hit = store.overlaps(addrs, itemsize)
                if not hit.any():
                    continue
                self._write(store.addrs[hit], store.values[hit])
                store.addrs, store.values = store.addrs[~hit], store.values[~hit]
                if not store.addrs.size:
                    stores.remove(store)

    def barrier(self) -> None:
        """Block barrier: all warps of the running program have stored."""
        self._ordered += self._fresh
        self._fresh = []

    def release_gpu(self) -> None:
        """Release at GPU scope by the running program: this GPU may see its ordered stores, peers not yet."""
        self._released += self._ordered
        self._ordered = []

    def release_system(self) -> None:
        """Release at system scope by the running program: peers see its ordered and all GPU-released stores."""
        self._let_go(self._released + self._ordered, pause=False)
        self._released, self._ordered = [], []

    def next_program(self) -> None:
        """Start of another program of the grid: its releases do not cover the stores that the last program left."""
        self._abandoned += self._ordered + self._fresh
        self._ordered, self._fresh = [], []

    def leak(self) -> None:
        """Make some unreleased elements of one store visible, also of the program that runs, which may wait itself."""
        filled = [stores for stores in self._lists() if stores]
        if not filled:
            return
        stores = filled[int(self._rng.integers(len(filled)))]
        which = int(self._rng.integers(len(stores)))
        store = stores[which]
        hit = self._rng.random(store.addrs.size) < 0.5
        self._write(store.addrs[hit], store.values[hit])
        store.addrs, store.values = store.addrs[~hit], store.values[~hit]
        if not store.addrs.size:
            del stores[which]

    def end_of_kernel(self) -> None:
        """Make all stores visible."""
        self._let_go([store for stores in self._lists() for store in stores], pause=True)
        self._fresh, self._ordered, self._released, self._abandoned = [], [], [], []

    def _let_go(self, stores: list[_Store], pause: bool) -> None:
        """Write stores in random order, and the elements of each store in random order."""
        cut = self._rng.integers(len(stores)) if stores else 0
        for done, which in enumerate(self._rng.permutation(len(stores))):
            if pause and done == cut:
                self._linger()
            store = stores[which]
            order = self._rng.permutation(store.addrs.size)
            self._write(store.addrs[order], store.values[order])
