"""Bulk copies: rows that go through shared memory without passing through registers (cp.async.bulk, sm_90 and later).

A program of one warp has a *ring* of slots in shared memory, one row each. Its first thread loads rows ahead; a row
that has come to its slot is stored from there to all its destinations, each by another thread. These copies occupy no
load or store unit, so stores that wait for the links hold up no other program, and few programs move as many bytes as
many that copy through registers.

Row n since `begin_rows` is in slot n % SLOTS. Example with 3 slots: while row 4 is stored from slot 1, rows 5 and 6 are
on their way to slots 2 and 0; when row 4 has left slot 1, row 7 is loaded into it. The barrier of a slot completes once
per row, so its parity is that of n // SLOTS.

Interpreted kernels have no shared memory: there `store_row` copies from the source at once, and the other functions do
nothing.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import codes
from .spin import INTERPRET

LANES = tl.constexpr(codes.LANES)
_slot_bytes = triton.constexpr_function(codes.slot_bytes)
_ring_bytes = triton.constexpr_function(codes.ring_bytes)


@triton.constexpr_function
def filled_bytes(slots):
    """Bytes that a program fills at a time, eight per thread: it has one warp if it copies in bulk, or four."""
    return 256 if slots > 0 else 1024


class Ring(NamedTuple):
    """Rows of a program in shared memory.

    Attributes:
        SLOTS: rows; 0: rows are copied through registers.
        ROW_BYTES: bytes of a row, a multiple of 16.
        SCALE_BYTES: of these, bytes of scales, a multiple of 16, after 32 times as many bytes of data; padding may
            follow. 0: rows have no scales.
    """

    SLOTS: tl.constexpr
    ROW_BYTES: tl.constexpr
    SCALE_BYTES: tl.constexpr


if INTERPRET.value:
    _PIECE = tl.constexpr(2048)

    @triton.jit
    def open_ring(ring):
        """Nothing."""
        return tl.zeros([], tl.int32)

    @triton.jit
    def begin_rows(ring, base):
        """Nothing."""

    @triton.jit
    def load_row(ring, base, n, source, scales, APART: tl.constexpr, here):
        """Nothing."""

    @triton.jit
    def await_row(ring, base, n):
        """Nothing."""

    @triton.jit
    def _copy(source, dests, BYTES: tl.constexpr):
        """Copy `BYTES` bytes from an address to several."""
        offs = tl.arange(0, _PIECE)
        for at in range(0, BYTES, _PIECE):
            inside = at + offs < BYTES
            piece = tl.load(source.to(tl.pointer_type(tl.uint8)) + at + offs, mask=inside)
            mask = (dests != 0)[:, None] & inside[None, :]
            tl.store(dests.to(tl.pointer_type(tl.uint8))[:, None] + (at + offs)[None, :], piece[None, :], mask=mask)

    @triton.jit
    def store_row(
        ring, base, n, source, scales, APART: tl.constexpr, dests, FIRST: tl.constexpr, BYTES: tl.constexpr,
        KEEP: tl.constexpr,
    ):  # fmt: skip
        """Copy part of a row from its source, or with scales from elsewhere all of it."""
        if APART:
            _copy(source, dests, 32 * ring.SCALE_BYTES)
            _copy(scales, tl.where(dests != 0, dests + 32 * ring.SCALE_BYTES, 0), ring.SCALE_BYTES)
        else:
            _copy(source + FIRST, dests, BYTES)

    @triton.jit
    def close_ring(ring):
        """Nothing."""

    @triton.jit
    def end_row():
        """Nothing."""

    @triton.jit
    def wait_left(ROWS: tl.constexpr):
        """Nothing."""

    @triton.jit
    def wait_stored():
        """Nothing."""

else:

    @triton.constexpr_function
    def _open(slots, row_bytes):
        first = slots * _slot_bytes(row_bytes)
        starts = "".join(f"@p mbarrier.init.shared::cta.b64 [ring+{first + 8 * i}], 1; " for i in range(slots))
        return (
            f"{{ .shared .align 128 .b8 ring[{_ring_bytes(slots, row_bytes)}]; .reg .pred p; .reg .b32 tid; "
            f"mov.u32 $0, ring; mov.u32 tid, %tid.x; setp.eq.u32 p, tid, 0; {starts} }}"
        )

    @triton.constexpr_function
    def _begin(slots, row_bytes):
        """Assembly: start the barriers of a ring at $1 anew, and let loads see all that this thread sees."""
        first = slots * _slot_bytes(row_bytes)
        again = "".join(
            f"@p mbarrier.inval.shared::cta.b64 [$1+{first + 8 * i}]; "
            f"@p mbarrier.init.shared::cta.b64 [$1+{first + 8 * i}], 1; "
            for i in range(slots)
        )
        return (
            f"{{ .reg .pred p; .reg .b32 tid; mov.u32 $0, 0; mov.u32 tid, %tid.x; setp.eq.u32 p, tid, 0; {again}"
            "@p fence.mbarrier_init.release.cluster; fence.proxy.async; }"
        )

    @triton.constexpr_function
    def _place(slots, row_bytes):
        """Assembly: slot of row $2 in a ring at $1, and its barrier."""
        slot = _slot_bytes(row_bytes)
        return (
            f".reg .b32 slot, place, bar; rem.u32 slot, $2, {slots}; mad.lo.u32 place, slot, {slot}, $1; "
            f"mad.lo.u32 bar, slot, 8, $1; add.u32 bar, bar, {slots * slot}; "
        )

    @triton.constexpr_function
    def _load(slots, row_bytes, scale_bytes):
        """scale_bytes: of scales at $4; 0: the row is in one piece, at $3."""
        copy = "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        data, scales = row_bytes, ""
        if scale_bytes:
            data = 32 * scale_bytes
            scales = f"{copy} [place+{data}], [$4], {scale_bytes}, [bar], policy; "
        return (
            f"{{ .reg .pred p; .reg .b32 tid; .reg .b64 state, policy; {_place(slots, row_bytes)}"
            "mov.u32 $0, 0; mov.u32 tid, %tid.x; setp.eq.u32 p, tid, 0; setp.ne.and.b32 p, $5, 0, p; "
            "createpolicy.fractional.L2::evict_first.b64 policy, 1.0; "
            f"@p mbarrier.arrive.expect_tx.shared::cta.b64 state, [bar], {data + scale_bytes}; "
            f"{copy} [place], [$3], {data}, [bar], policy; {scales}"
            "setp.eq.u32 p, tid, 0; setp.eq.and.b32 p, $5, 0, p; @p mbarrier.arrive.shared::cta.b64 state, [bar]; }"
        )

    @triton.constexpr_function
    def _await(slots, row_bytes):
        return (
            f"{{ .reg .pred p; .reg .b32 parity; {_place(slots, row_bytes)}"
            f"mov.u32 $0, 0; div.u32 parity, $2, {slots}; and.b32 parity, parity, 1; "
            "AWAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [bar], parity; @!p bra AWAIT; }"
        )

    @triton.constexpr_function
    def _store(slots, row_bytes, first, nbytes, keep):
        hint, policy = ("", "") if keep else (".L2::cache_hint", ", policy")
        return (
            f"{{ .reg .pred p; .reg .b64 policy; {_place(slots, row_bytes)}"
            "mov.u32 $0, 0; setp.ne.b64 p, $3, 0; createpolicy.fractional.L2::evict_first.b64 policy, 1.0; "
            f"@p cp.async.bulk.global.shared::cta.bulk_group{hint} [$3], [place+{first}], {nbytes}{policy}; }}"
        )

    @triton.constexpr_function
    def _wait_left(rows):
        return f"mov.u32 $0, 0; cp.async.bulk.wait_group.read {rows};"

    @triton.jit
    def run_assembly(ASM: tl.constexpr):
        """Run assembly without operands in each thread."""
        none = tl.full([], 0, tl.int32)
        tl.inline_asm_elementwise(ASM, "=r,r", [none], dtype=tl.int32, is_pure=False, pack=1)

    @triton.jit
    def open_ring(ring):
        """Make the ring, if it has slots; returns its address. In the first line of a kernel: after a branch the
        compiler may double this code, and each copy takes shared memory of its own."""
        none = tl.full([], 0, tl.int32)
        if ring.SLOTS == 0:
            return none
        else:
            asm: tl.constexpr = _open(ring.SLOTS, ring.ROW_BYTES)
            return tl.inline_asm_elementwise(asm, "=r,r", [none], dtype=tl.int32, is_pure=False, pack=1)

    @triton.jit
    def begin_rows(ring, base):
        """Count rows from 0 again. All rows loaded before have come. Loads will see what this program has acquired."""
        wait_left(0)
        asm: tl.constexpr = _begin(ring.SLOTS, ring.ROW_BYTES)
        tl.inline_asm_elementwise(asm, "=r,r", [base], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()

    @triton.jit
    def close_ring(ring):
        """Wait until all rows of a ring that has slots have been stored: its memory ends with the program."""
        if ring.SLOTS > 0:
            run_assembly("mov.u32 $0, 0; cp.async.bulk.wait_group 0;")

    @triton.jit
    def load_row(ring, base, n, source, scales, APART: tl.constexpr, here):
        """Start to load row n from address `source`, a multiple of 16, unless it is not `here`. Its slot must be free:
        `wait_left`. APART: its scales come from address `scales`, likewise; otherwise they follow the data."""
        asm: tl.constexpr = _load(ring.SLOTS, ring.ROW_BYTES, ring.SCALE_BYTES if APART else 0)
        given = [base, n, source, scales, tl.cast(here, tl.int32)]
        tl.inline_asm_elementwise(asm, "=r,r,r,l,l,r", given, dtype=tl.int32, is_pure=False, pack=1)

    @triton.jit
    def await_row(ring, base, n):
        """Wait until row n has come to its slot."""
        asm: tl.constexpr = _await(ring.SLOTS, ring.ROW_BYTES)
        tl.inline_asm_elementwise(asm, "=r,r,r", [base, n], dtype=tl.int32, is_pure=False, pack=1)

    @triton.jit
    def store_row(
        ring, base, n, source, scales, APART: tl.constexpr, dests, FIRST: tl.constexpr, BYTES: tl.constexpr,
        KEEP: tl.constexpr,
    ):  # fmt: skip
        """Start to store `BYTES` bytes of row n, from byte `FIRST` on, to each of the addresses `dests` [LANES] int64,
        0 = none. KEEP: they are read again soon, so they stay in L2. The others: what `load_row` got."""
        asm: tl.constexpr = _store(ring.SLOTS, ring.ROW_BYTES, FIRST, BYTES, KEEP)
        tl.inline_asm_elementwise(asm, "=r,r,r,l", [base, n, dests], dtype=tl.int32, is_pure=False, pack=1)

    @triton.jit
    def end_row():
        """All stores of a row have been started."""
        run_assembly("mov.u32 $0, 0; cp.async.bulk.commit_group;")

    @triton.jit
    def wait_left(ROWS: tl.constexpr):
        """Wait until all rows but the last `ROWS` have left their slots."""
        run_assembly(_wait_left(ROWS))
        tl.debug_barrier()

    @triton.jit
    def wait_stored():
        """Wait until all rows have been stored, so that a release covers them."""
        run_assembly("mov.u32 $0, 0; cp.async.bulk.wait_group 0; fence.proxy.async;")
