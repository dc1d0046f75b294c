"""A push of a dispatch within one node whose rows go through shared memory by bulk copies (cp.async.bulk), which occupy
no load or store unit. A way of bench_exchange_tiles.py; it runs on GPUs only.

One thread of a program copies its rows through a ring in shared memory: it loads some rows ahead, and stores each row
that has come to all its addresses. The shared memory is declared in the assembly, so Triton does not count it.
"""

from typing import NamedTuple

from triton_ep.runtime.launch import INTERPRETING
from triton_ep.runtime.plans.shape import Plan, Shape

# isort: split
import triton
import triton.language as tl

from triton_ep.kernels.device.arrivals import ALL_ROWS, Senders, release_arrivals
from triton_ep.kernels.device.buffers import STATUS
from triton_ep.kernels.device.groups import my_first
from triton_ep.kernels.device.host_read import is_held
from triton_ep.kernels.device.job import Job, is_local, my_node, state_at
from triton_ep.kernels.device.payload import Source
from triton_ep.kernels.device.tables import STEPS, part_begin, part_of_step, step_rows_of
from triton_ep.kernels.spec import ep_kernel

STATIC_BYTES = 48 * 1024
"""Most static shared memory of a program."""


@triton.constexpr_function
def copies(stages: int, row_bytes: int, most: int) -> str:
    """Assembly that pushes rows; $0 out: 0; $1 address of row 0; $2 addresses [T, TOPK] int64 of staging rows, 0 for
    none; $3 first row, $4 end, $5 rows from one to the next; $6 bytes of a row's addresses.

    stages: rows in shared memory. most: addresses of a row that are looked at.
    """
    slot = -(-row_bytes // 128) * 128
    assert row_bytes % 16 == 0
    assert stages * (slot + 8) <= STATIC_BYTES
    stores = "".join(
        f"""
        ld.global.b64 dst, [at+{8 * k}];
        setp.ne.b64 q, dst, 0;
        @q cp.async.bulk.global.shared::cta.bulk_group [dst], [place], {row_bytes};"""
        for k in range(most)
    )
    load = f"""
        mad.lo.u32 place, into, {slot}, base;
        mad.lo.u32 bar, into, 8, bars;
        mul.wide.u32 wide, ahead, {row_bytes};
        add.u64 src, $1, wide;
        mbarrier.arrive.expect_tx.shared::cta.b64 state, [bar], {row_bytes};
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [place], [src], {row_bytes}, [bar];
        add.s32 ahead, ahead, $5;
        add.u32 into, into, 1;
        setp.eq.u32 q, into, {stages};
        @q mov.u32 into, 0;"""
    begin = "".join(f"\n        mbarrier.init.shared::cta.b64 [bars+{8 * i}], 1;" for i in range(stages))
    finish = "".join(f"\n        mbarrier.inval.shared::cta.b64 [bars+{8 * i}];" for i in range(stages))
    return f"""
    {{
        .shared .align 128 .b8 rows[{stages * slot}];
        .shared .align 8 .b64 signals[{stages}];
        .reg .pred p, q;
        .reg .b32 tid, base, bars, row, ahead, into, from, phase, place, bar;
        .reg .b64 src, dst, at, wide, state;
        mov.u32 $0, 0;
        mov.u32 tid, %tid.x;
        setp.ne.u32 p, tid, 0;
        @p bra DONE;
        setp.ge.s32 p, $3, $4;
        @p bra DONE;
        mov.u32 base, rows;
        mov.u32 bars, signals;{begin}
        fence.mbarrier_init.release.cluster;
        fence.proxy.async;
        mov.u32 ahead, $3;
        mov.u32 into, 0;
        mov.u32 row, 0;
    FILL:
        setp.ge.s32 p, ahead, $4;
        @p bra FILLED;
        setp.eq.u32 p, row, {stages};
        @p bra FILLED;{load}
        add.u32 row, row, 1;
        bra FILL;
    FILLED:
        mov.u32 row, $3;
        mov.u32 from, 0;
        mov.u32 phase, 0;
    NEXT:
        mad.lo.u32 place, from, {slot}, base;
        mad.lo.u32 bar, from, 8, bars;
    AWAIT:
        mbarrier.try_wait.parity.shared::cta.b64 p, [bar], phase;
        @!p bra AWAIT;
        mul.wide.u32 wide, row, $6;
        add.u64 at, $2, wide;{stores}
        cp.async.bulk.commit_group;
        // The stores of the row before have read their place: load into it.
        setp.eq.u32 p, row, $3;
        @p bra KEEP;
        setp.ge.s32 p, ahead, $4;
        @p bra KEEP;
        cp.async.bulk.wait_group.read 1;{load}
    KEEP:
        add.u32 from, from, 1;
        setp.eq.u32 q, from, {stages};
        @q mov.u32 from, 0;
        @q xor.b32 phase, phase, 1;
        add.s32 row, row, $5;
        setp.lt.s32 p, row, $4;
        @p bra NEXT;
        cp.async.bulk.wait_group 0;{finish}
    DONE:
    }}
    """


class Bulk(NamedTuple):
    """How rows are copied.

    Attributes:
        STAGES, ROW_BYTES, MOST: as in `copies`.
    """

    STAGES: tl.constexpr
    ROW_BYTES: tl.constexpr
    MOST: tl.constexpr


@ep_kernel(x_ptr="*{WORD}", scale_ptr="*u8", push_addrs_ptr="*i64", specialised=("row_words",), num_warps=1)
def bulk_push_kernel(
    source: Source,
    push_addrs_ptr,
    placement_ptr,
    job: Job,
    num_tokens,
    TOPK: tl.constexpr,
    senders: Senders,
    BLOCK_T: tl.constexpr,
    STEP_CHUNKS: tl.constexpr,
    bulk: Bulk,
):
    if (tl.load(state_at(job, STATUS)) != 0) | is_held(job, placement_ptr):
        return
    step_rows_ptr = step_rows_of(job, placement_ptr)
    local = tl.arange(0, senders.LWP)
    num_chunks = tl.cdiv(num_tokens, BLOCK_T)
    num_steps = tl.minimum(tl.maximum(num_chunks // STEP_CHUNKS, 1), STEPS)
    for step in range(num_steps):
        begin = part_begin(part_of_step(step, num_steps), num_chunks) * BLOCK_T
        next_part = part_of_step(step + 1, num_steps)
        end = tl.minimum(part_begin(next_part, num_chunks) * BLOCK_T, num_tokens)
        given = [
            source.x_ptr.to(tl.int64),
            push_addrs_ptr.to(tl.int64),
            my_first(begin, 0),
            end,
            tl.num_programs(0),
            tl.full([], TOPK * 8, tl.int32),
        ]
        tl.inline_asm_elementwise(
            copies(bulk.STAGES, bulk.ROW_BYTES, bulk.MOST),
            "=r,l,l,r,r,r,r",
            given,
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        more = tl.cast(step + 1, tl.int32) < num_steps
        mask = is_local(job, local) & more
        counts = tl.load(step_rows_ptr + next_part * job.ranks_per_node + local, mask=mask, other=ALL_ROWS)
        release_arrivals(job, tl.where(more, step + 1, STEPS), counts, my_node(job), senders)


def plan(pushed: Plan, s: Shape) -> Plan:
    """The plan of this kernel in place of `pushed`, the built-in one from all multiprocessors."""
    assert not INTERPRETING, "bulk copies are assembly"
    slot = -(-s.wire_bytes // 128) * 128
    stages = min(STATIC_BYTES // (slot + 8), 8)
    kept = ("TOPK", "LWP", "SENDERS", "BLOCK_T", "STEP_CHUNKS", "PAYLOAD")
    values = {name: pushed.constexprs[name] for name in kept}
    values |= {"STAGES": stages, "ROW_BYTES": s.wire_bytes, "MOST": min(s.topk, s.local_world_size)}
    return Plan("bulk_push_kernel", values, 1, side_by_side=pushed.side_by_side)
