"""Chaos mode: the interpreter orders as badly as a GPU may, so that ordering bugs show on a CPU.

Programs of a grid run in random order. If a kernel has the argument `first_waiting`, programs from that number on run
after the others, for which they wait; while they wait, unreleased stores become visible bit by bit.
Masked-off lanes of loads without `other`, and of atomics, hold garbage. Plain stores to heap ranges stay invisible to
peers until they are properly released (held.py).

Chaos mode cannot find: a missing acquire on the reader's side, races inside one block other than a missing
barrier before a release, warp divergence.
"""

import itertools
import time
from typing import Any

import numpy as np
from triton.runtime import interpreter

from . import spinning
from .held import HeapRanges, HeldStores

_ir = interpreter._ir
_SCOPE = _ir.MEM_SYNC_SCOPE
_RELEASES = (_ir.MEM_SEMANTIC.RELEASE, _ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_GARBAGE = 0x7F  # NaN in e4m3 and fp16, 3.4e38 in bf16 and fp32, a huge index, an unmapped address
_LINGER_S = 0.002  # longer than the longest sleep of a waiting peer

_StockBuilder: Any = interpreter.InterpreterBuilder
_StockExecutor: Any = interpreter.GridExecutor


def start(seed: int, ranges: HeapRanges) -> None:
    """Make launches of this process chaotic, from `seed`; restart if they are already."""
    builder = interpreter.interpreter_builder
    builder.__class__ = ChaosBuilder
    builder.begin(seed, ranges)
    interpreter.GridExecutor = ChaosExecutor
    spinning.call_at_each_turn(builder.while_waiting)


def stop() -> None:
    """Return to the usual order. No store is held back between launches, so none is lost."""
    interpreter.interpreter_builder.__class__ = _StockBuilder
    interpreter.GridExecutor = _StockExecutor
    spinning.call_at_each_turn(None)


def _write(addrs: Any, values: Any) -> None:
    interpreter._interpreter.store(addrs, values, np.ones(addrs.shape, dtype=bool))


def _active(ptrs: Any, mask: Any) -> tuple[Any, Any]:
    """Addresses [n] of the active lanes, and the mask of these lanes (`mask` is a handle, an array or None)."""
    lanes = np.ones(ptrs.data.shape, dtype=bool) if mask is None else np.asarray(mask.data, dtype=bool)
    lanes = np.broadcast_to(lanes, ptrs.data.shape)
    return ptrs.data[lanes], lanes


def _garbage(shape: tuple[int, ...], dtype: Any) -> Any:
    """Array whose bytes are all _GARBAGE; for bool: all True."""
    if dtype == np.bool_:
        return np.ones(shape, dtype=bool)
    return np.full((*shape, dtype.itemsize), _GARBAGE, dtype=np.uint8).view(dtype).reshape(shape)


class ChaosBuilder(_StockBuilder):
    """The interpreter's builder with a weak memory and a grid in random order."""

    def begin(self, seed: int, ranges: HeapRanges) -> None:
        """Start a chaotic run of this process; its state depends on `seed` alone."""
        self._rng = np.random.default_rng(seed)
        self._ranges = ranges
        self._held = HeldStores(_write, self._rng, linger=lambda: time.sleep(_LINGER_S))
        self._first_waiting = 0

    def let_programs_wait_from(self, first: int) -> None:
        """In the next launch, run programs from number `first` on after all lower ones, for which they wait."""
        self._first_waiting = first

    def while_waiting(self) -> None:
        """While a program of this process waits: make some of the stores visible that no program will release."""
        if self._first_waiting:
            self._held.leak()

    def set_grid_dim(self, nx: int, ny: int, nz: int) -> None:
        """At the start of a launch: shuffle its programs."""
        super().set_grid_dim(nx, ny, nz)
        programs = list(itertools.product(range(nx), range(ny), range(nz)))
        first = min(self._first_waiting, len(programs))
        order = [*self._rng.permutation(first), *(first + self._rng.permutation(len(programs) - first))]
        self._programs = [programs[i] for i in order]

    def set_grid_idx(self, x: int, y: int, z: int) -> None:
        """At the start of a program: run another one than the executor asks for."""
        self._held.next_program()
        _, ny, nz = self.grid_dim
        super().set_grid_idx(*self._programs[(x * ny + y) * nz + z])

    def end_launch(self) -> None:
        """At the end of a launch, or when it failed: make all stores visible."""
        self._held.end_of_kernel()

    def create_barrier(self) -> None:
        """Block barrier: orders the program's stores before a later release."""
        self._held.barrier()
        super().create_barrier()

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *rest: Any, **options: Any) -> Any:
        """Load; reads this process's own held stores, and garbage in masked-off lanes without `other`."""
        dtype_tt = ptrs.get_element_ty()
        dtype = interpreter._get_np_dtype(dtype_tt)
        addrs, lanes = _active(ptrs, mask)
        self._held.settle(addrs, dtype.itemsize)
        if other is None and not lanes.all():
            other = interpreter.TensorHandle(_garbage(ptrs.data.shape, dtype), dtype_tt)
        return super().create_masked_load(ptrs, mask, other, *rest, **options)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        """Store; elements in a heap are held back."""
        addrs, lanes = _active(ptrs, mask)
        values = np.broadcast_to(value.data, ptrs.data.shape)[lanes]
        in_heap = self._ranges.contains(addrs)
        if in_heap.any():
            self._held.hold(addrs[in_heap], values[in_heap])
        if not in_heap.all():
            _write(addrs[~in_heap], values[~in_heap])

    def create_atomic_rmw(self, rmwOp: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        """Atomic; only atomics release. Inactive lanes return garbage."""
        addrs, lanes = _active(ptr, mask)
        self._before_atomic(addrs, val.data.itemsize, sem, scope)
        result = super().create_atomic_rmw(rmwOp, ptr, val, mask, sem, scope)
        if not lanes.all():
            data = np.where(lanes, result.data, _garbage(result.data.shape, result.data.dtype))
            result = interpreter.TensorHandle(data, result.dtype)
        return result

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        """Atomic compare and swap; counts as a release even when it fails."""
        self._before_atomic(_active(ptr, None)[0], val.data.itemsize, sem, scope)
        return super().create_atomic_cas(ptr, cmp, val, sem, scope)

    def create_atomic_store(self, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        """Atomic store (Triton 3.9): visible at once, and a release if `sem` says so."""
        addrs, lanes = _active(ptr, mask)
        self._before_atomic(addrs, val.data.itemsize, sem, scope)
        _write(addrs, np.broadcast_to(val.data, ptr.data.shape)[lanes])

    def _before_atomic(self, addrs: Any, itemsize: int, sem: Any, scope: Any) -> None:
        self._held.settle(addrs, itemsize)
        if addrs.size == 0 or sem not in _RELEASES:
            return
        if scope == _SCOPE.SYSTEM:
            self._held.release_system()
        elif scope == _SCOPE.GPU:
            self._held.release_gpu()


class ChaosExecutor(_StockExecutor):
    """Runs a launch; when it ends, no store is held back."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all programs of the grid."""
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        first = given.get("first_waiting", 0)
        for group in given.values():  # a kernel may have it in a group of arguments
            first = getattr(group, "first_waiting", first)
        interpreter.interpreter_builder.let_programs_wait_from(first)
        try:
            return super().__call__(*args, **kwargs)
        finally:
            interpreter.interpreter_builder.end_launch()
