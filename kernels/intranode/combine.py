"""Intra-node combine: publish expert outputs, then bring together and sum the rows of each token.

Protocol      1 stage or reduce: wait until every rank is done with the previous combine (done_flag). If dispatches
              stage rows in the same memory, or the caller had it for the rows to be reduced and they have been moved, a
              kernel before reduce sets entered_flag at every rank of the node and waits until all have: until no rank
              of the node reads these rows there any more
              2 stage: copy the expert rows to combine_x; or reduce: write per staging row the sum of the
              token's rows on this rank, so that one row per (token, rank) crosses the link, to combine_x of the rank of
              this node that adds it up: the token's rank, or for a token of another node the counterpart of that rank.
              The reduce goes in steps. Each step has some rows of every source, one tile of each in turn, beginning
              with another source on each rank; with several nodes, rows of other nodes come first, then rows of this
              one. (OF_SLOTS: each expert row is one value, and the value of each slot gets its own column)
              3 set staged_flag[my local rank, program] on every rank of the node, after each step
              (the caller may do step 2 itself: combine_free is step 1 alone, combine_publish step 3; or copy engines
              do steps 2 and 3, after combine_begin, which is step 1, raises the own flags, which they send after the
              rows, or says that it waited in vain: device/overruns.py. This rank's own rows may then stay where they
              are, and 4 reads them there. combine_await waits before 4, so that the programs of 4 take multiprocessors
              from other kernels only when all rows are there)
              The flag carries the tag of the combine, which 4 compares: a rank in another combine is reported, and its
              rows are not read (device/calls.py)
              4 pull, in steps of consecutive tokens: wait for the staged flags of all local ranks, as far as the next
              tokens need them, and with several nodes for the partial sums that other nodes send of these tokens
              (internode/combine.py). Then start from the token's biases or zero, add its rows in k order, in float32,
              and round once
              5 the last program of the pull, with several nodes of pull and partial, posts done_flag = epoch to every
              rank (device/staging.py); with copy engines it reports overruns before
Layout        combine_x [capacity, H]: by output row (stage); by the token's node, then by the rank that sums, then by
              token (reduce: `sums` in device/tables.py); combine_weight [capacity] float32, read by the pull if
              HAS_WEIGHTS; staged_flag [LW, MAX_PROGRAMS] int64: steps since the layer was created, STEPS per combine,
              above the tag.
Memory order  3 is a system-scope release per program and step, acquired in 4. Rows that 4 copies ahead are of the step
              that it has waited for: no loop over tiles goes on into the next step. 5 comes after all pulls and
              partial sums of its rank: the program that posts has acquired the arrival of the others. So no rank stores
              to combine_x of another one that still reads it.
Progress      1 waits for step 5 of the previous call, which every rank posts without waiting for this call. The kernel
              that enters has one program, and waits for that of every rank.
              4 waits for other ranks' step 3; its grid is independent of theirs. It may run concurrently with this
              rank's own reduce, and with several nodes with its own partial sums, if those are launched first and all
              fit on the GPU. Launched early, it starts when all programs of reduce have, and ends after them
              (device/early.py).
Replay        Epochs: the device counter holds the number n of the last finished combine; this one is n + 1.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.buffers import (
    COMBINE_WEIGHT,
    COMBINE_X,
    DONE_FLAG,
    ENTERED_FLAG,
    EPOCH_COMBINE,
    PARTIAL_FLAG,
    PARTIAL_RECV,
    STATUS,
    address_of,
    own_buffer,
)
from ..device.calls import CALLS_COMBINE, Combine, combine_tag, report_calls
from ..device.early import await_previous, let_next_start
from ..device.groups import my_first, pick
from ..device.job import (
    Job,
    first_local,
    has_other_nodes,
    is_local,
    is_rank,
    local_rank,
    my_node,
    num_nodes,
    on_my_node,
    rank_of,
    state_at,
)
from ..device.overruns import post_overrun
from ..device.payload import SumTile, Tile
from ..device.post import Network, post_flag
from ..device.pull import Held, PulledRows, bases_of, fewer, power_of_2, pull_sum, with_own
from ..device.staging import (
    Staged,
    Stagers,
    end_combine,
    raise_for_copies,
    release_staged,
    report_staged,
    staged_part,
    staged_steps,
    tags_of_rows,
    wait_staged,
)
from ..device.tables import (
    DST_ROW,
    OWNER,
    PARTS,
    PULL_PARTIAL,
    PULL_ROW,
    REPORT_ARRIVALS,
    REPORT_ARRIVALS_HERE,
    STEPS,
    Entries,
    adder_of,
    entry_field,
    first_arrivals_of,
    num_rows_of,
    part_begin,
    partial_stride,
    parts_staged,
    rank_columns_of,
    report_ptrs,
    row_of,
    step_rows_of,
    step_tokens_of,
    sums_to_of,
    tokens_per_node_of,
)
from ..device.transport import P2P
from ..device.waits import (
    WAIT_COMBINE_ENTERED,
    WAIT_COMBINE_FREE,
    WAIT_NETWORK_PARTIALS,
    wait_flags,
    wait_tagged,
)
from ..spec import ep_kernel


class ExpertRows(NamedTuple):
    """Expert outputs to publish.

    Attributes:
        y_ptr: [R, H] elements, or words of them; with OF_SLOTS [R].
        weights_ptr: [R] float32, read if HAS_WEIGHTS.
        row_capacity: rows of combine_x.
        HAS_WEIGHTS: the kernel that sums rows multiplies them by their weights.
    """

    y_ptr: Any
    weights_ptr: Any
    row_capacity: Any
    HAS_WEIGHTS: tl.constexpr


class TokenCopies(NamedTuple):
    """Assignments of received tokens.

    Attributes:
        copy_rows_ptr: [C, K] int32, output rows of each staging row, -1 = none.
        TOPK: K.
        OF_SLOTS: each expert row is one value, y [R]; reduced rows have K columns, at most BLOCK_H.
    """

    copy_rows_ptr: Any
    TOPK: tl.constexpr
    OF_SLOTS: tl.constexpr


class Sums(NamedTuple):
    """Sums of this rank's tokens, and the biases that they start from.

    Attributes:
        out_ptr: out [T, H].
        bias_ptr: [T, H]; read if HAS_BIAS.
        second_bias_ptr: [T, H], added to the first; read if num_biases is 2.
        num_biases: 1 or 2.
        own_ptr: rows of this rank; those from `own_row` on are sums of its own tokens. Read with ENGINES.
        own_row: -1: these sums are in the combine buffer, too.
        HAS_BIAS: whether there are biases; otherwise sums start from zero.
    """

    out_ptr: Any
    bias_ptr: Any
    second_bias_ptr: Any
    num_biases: Any
    own_ptr: Any
    own_row: Any
    HAS_BIAS: tl.constexpr


class Turns(NamedTuple):
    """Steps in which a rank pulls the rows of its tokens.

    Attributes:
        num_steps: divides STEPS.
        BLOCK_T: tokens of a routing chunk; a step has whole chunks.
        ENGINES: copy engines may have sent the rows.
    """

    num_steps: Any
    BLOCK_T: tl.constexpr
    ENGINES: tl.constexpr


@triton.jit
def _wait_free(job, WP: tl.constexpr):
    """Wait until no rank reads this rank's combine_x any more."""
    epoch = tl.load(state_at(job, EPOCH_COMBINE))
    peers = tl.arange(0, WP)
    flag_ptrs = own_buffer(job, DONE_FLAG, tl.int64) + peers
    return wait_flags(job, flag_ptrs, is_rank(job, peers), epoch, WAIT_COMBINE_FREE)


@ep_kernel(num_warps=1)
def combine_free_kernel(job: Job, WP: tl.constexpr):
    _wait_free(job, WP)


@ep_kernel(num_warps=1)
def combine_begin_kernel(
    combine: Combine,
    job: Job,
    WP: tl.constexpr,
    stagers: Stagers,
):
    tag = combine_tag(job, combine)
    if _wait_free(job, WP):
        raise_for_copies(job, tag, stagers)
    else:  # the copies that follow cannot be held back
        post_overrun(job, stagers.LWP)


@ep_kernel(num_warps=4)
def combine_await_kernel(combine: Combine, job: Job, staged: Staged):
    # The kernel that pulls rows looks again, and reports what is wrong.
    wait_staged(job, staged, STEPS + tl.zeros([], tl.int32), combine_tag(job, combine))


@ep_kernel(num_warps=1)
def combine_enter_kernel(job: Job, LWP: tl.constexpr):
    # A barrier of this node, but for the epoch: that of this combine.
    epoch = tl.load(state_at(job, EPOCH_COMBINE)) + 1
    post_flag(job, epoch, ENTERED_FLAG, True, P2P, LWP)
    peers = tl.arange(0, LWP)
    flag_ptrs = own_buffer(job, ENTERED_FLAG, tl.int64) + first_local(job) + peers
    wait_flags(job, flag_ptrs, is_local(job, peers), epoch, WAIT_COMBINE_ENTERED, first_local(job))


@ep_kernel(num_warps=1)
def combine_publish_kernel(
    combine: Combine,
    job: Job,
    stagers: Stagers,
):
    tag = combine_tag(job, combine)
    if tl.load(state_at(job, STATUS)) == 0:
        release_staged(job, staged_steps(job), STEPS, tag, stagers)


@ep_kernel(y_ptr="*{WORD}", weights_ptr="*fp32", specialised=("row_words",), num_warps=16)
def combine_stage_kernel(
    rows: ExpertRows,
    combine: Combine,
    job: Job,
    row_words,
    WP: tl.constexpr,
    stagers: Stagers,
    tile: Tile,
):
    tag = combine_tag(job, combine)
    if _wait_free(job, WP):
        combine_ptr = own_buffer(job, COMBINE_X, rows.y_ptr.dtype.element_ty)
        combine_weight_ptr = own_buffer(job, COMBINE_WEIGHT, tl.float32)
        num_rows = tl.minimum(tl.load(num_rows_of(job, combine.placement_ptr)), rows.row_capacity)
        offs = tl.arange(0, tile.BLOCK_H)
        for number in range(tl.program_id(0), tl.cdiv(num_rows, tile.ROWS), tl.num_programs(0)):
            row = number * tile.ROWS + tl.arange(0, tile.ROWS)
            for h in range(0, row_words, tile.BLOCK_H):
                mask = (row < num_rows)[:, None] & (h + offs < row_words)[None, :]
                at = row.to(tl.int64)[:, None] * row_words + h + offs[None, :]
                tl.store(combine_ptr + at, tl.load(rows.y_ptr + at, mask=mask, other=0), mask=mask)
            if rows.HAS_WEIGHTS:
                weights = tl.load(rows.weights_ptr + row, mask=row < num_rows, other=0.0)
                tl.store(combine_weight_ptr + row, weights, mask=row < num_rows)
        release_staged(job, staged_steps(job), STEPS, tag, stagers)


@triton.jit
def _without_lowest(bits):
    """`bits` [ROWS] uint32 without the lowest bit set in each, and the number of that bit; negative if none is set."""
    rest = bits & (bits - 1)
    return rest, ((bits ^ rest).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _output(rows, copy, here, offs, hidden):
    """Columns `offs` [1, BLOCK_H] of rows `copy` [ROWS] of y in float32, times their weights; zeros unless `here`."""
    ptrs = rows.y_ptr + copy.to(tl.int64)[:, None] * hidden + offs
    row = tl.load(ptrs, mask=here[:, None] & (offs < hidden), other=0.0).to(tl.float32)
    if rows.HAS_WEIGHTS:
        row *= tl.load(rows.weights_ptr + copy, mask=here, other=0.0)[:, None]
    return row


@triton.jit
def _add_outputs(
    rows,  # ExpertRows
    acc,  # [ROWS, BLOCK_H] float32
    copies,  # [ROWS, KP] rows of y
    left,  # [ROWS] uint32, bits of the slots to add
    offs,  # [1, BLOCK_H] columns
    hidden,
    NUMBER: tl.constexpr,
):
    """Add the rows of the first NUMBER slots in `left`; returns the slots left, too."""
    slot = tl.arange(0, copies.shape[1])[None, :]
    for _ in tl.static_range(NUMBER):
        here = left != 0
        left, first = _without_lowest(left)
        copy = tl.sum(tl.where(slot == first[:, None], copies, 0), axis=1)
        acc += _output(rows, copy, here, offs, hidden)
    return acc, left


@triton.jit
def _reduce_tile(
    rows,  # ExpertRows
    copies_ptrs,  # [ROWS] pointers to K rows of y, -1 = none
    dest_ptrs,  # [ROWS]
    alive,  # [ROWS]
    h,  # first column of the tile
    hidden,
    TOPK: tl.constexpr,
    tile,
):
    """Store a tile of sums of rows of y, computed in float32 in k order and rounded once.

    With AT_ONCE below K no more rows are loaded and added than there are, because most tokens have few assignments on
    one rank. The same instructions for all K slots take less time if others can be spared for them.
    """
    offs = (h + tl.arange(0, tile.BLOCK_H))[None, :]
    dest_ptrs = dest_ptrs[:, None] + offs
    mask = alive[:, None] & (offs < hidden)
    if TOPK == 1 and not rows.HAS_WEIGHTS:  # opaque elements take fewer registers
        copy = tl.load(copies_ptrs, mask=alive, other=-1)
        source_ptrs = rows.y_ptr + copy.to(tl.int64)[:, None] * hidden + offs
        tl.store(dest_ptrs, tl.load(source_ptrs, mask=mask & (copy >= 0)[:, None], other=0.0), mask=mask)
        return
    acc = tl.zeros([tile.ROWS, tile.BLOCK_H], tl.float32)
    if tile.AT_ONCE < TOPK:
        slot = tl.arange(0, power_of_2(TOPK))[None, :]
        copies = tl.load(copies_ptrs[:, None] + slot, mask=alive[:, None] & (slot < TOPK), other=-1)
        bits = tl.full(copies.shape, 1, tl.uint32) << slot.to(tl.uint32)
        left = tl.sum(tl.where(copies >= 0, bits, 0), axis=1)
        acc, left = _add_outputs(rows, acc, copies, left, offs, hidden, tile.AT_ONCE)
        for first in tl.static_range(tile.AT_ONCE, TOPK, tile.AT_ONCE):
            if tl.max((left != 0).to(tl.int32)) > 0:
                acc, left = _add_outputs(rows, acc, copies, left, offs, hidden, fewer(tile.AT_ONCE, TOPK - first))
    else:
        for k in tl.static_range(TOPK):
            copy = tl.load(copies_ptrs + k, mask=alive, other=-1)
            acc += _output(rows, copy, copy >= 0, offs, hidden)
    tl.store(dest_ptrs, acc.to(rows.y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gather_slots(
    values_ptr,  # [R]
    copies_ptrs,  # [ROWS] pointers to K rows, -1 = none
    dest_ptrs,  # [ROWS]
    alive,  # [ROWS]
    num_slots,
    BLOCK_H: tl.constexpr,
):
    """Store the values of the assignments of received tokens; 0 in slots without an assignment."""
    slot = tl.arange(0, BLOCK_H)[None, :]
    mask = alive[:, None] & (slot < num_slots)
    copy = tl.load(copies_ptrs[:, None] + slot, mask=mask, other=-1)
    tl.store(dest_ptrs[:, None] + slot, tl.load(values_ptr + copy, mask=copy >= 0, other=0.0), mask=mask)


@triton.jit
def _rows_of_step(job, placement_ptr, source, step, reached, num_rows):
    """Staging rows of a block of sources that are reduced after `step` and up to `reached` of STEPS steps: the first
    ones, and the ends."""
    first = tl.load(first_arrivals_of(job, placement_ptr) + source, mask=is_rank(job, source), other=0)
    count = tl.load(report_ptrs(placement_ptr, source, REPORT_ARRIVALS_HERE), mask=is_rank(job, source), other=0)
    # Some rows of every source, so that all ranks can begin to pull; with several nodes, rows whose sums cross the
    # network come first (internode/combine.py).
    mine = on_my_node(job, source)
    end = first + staged_part(job, count, mine, reached)
    return first + staged_part(job, count, mine, step), tl.minimum(end, num_rows)


@triton.jit
def _sums_of(job, placement_ptr, source, row_bytes):
    """Addresses int64 of where the sums of staging row 0 of a block of sources would be, in combine_x of the ranks that
    add them up."""
    shift = tl.load(sums_to_of(job, placement_ptr) + source, mask=is_rank(job, source), other=0)
    return address_of(job, COMBINE_X, adder_of(job, source)) + shift.to(tl.int64) * row_bytes


@triton.jit
def _sources_of_step(job, step):
    """The first source of a step and the number of its sources, which follow each other modulo the ranks."""
    others = has_other_nodes(job) & (step < STEPS // 2)
    first = first_local(job) + tl.where(others, job.ranks_per_node, 0)
    return first, tl.where(others, job.num_ranks - job.ranks_per_node, job.ranks_per_node)


@triton.jit
def _reduce_item(
    rows,  # ExpertRows
    copies,  # TokenCopies
    sums_ptr,  # from `_sums_of`
    begin,  # staging rows of one source in this step: the first one, and the end
    end,
    place,  # number of the tile among them
    hidden,
    tile,
):
    """Store a tile of sums, or with OF_SLOTS of values."""
    row = begin + place // tile.TILES * tile.ROWS + tl.arange(0, tile.ROWS)
    alive = row < end
    copies_ptrs = copies.copy_rows_ptr + row.to(tl.int64) * copies.TOPK
    dest_ptrs = sums_ptr + row.to(tl.int64) * hidden
    if copies.OF_SLOTS:
        _gather_slots(rows.y_ptr, copies_ptrs, dest_ptrs, alive, hidden, tile.BLOCK_H)
    else:
        h = place % tile.TILES * tile.BLOCK_H
        _reduce_tile(rows, copies_ptrs, dest_ptrs, alive, h, hidden, copies.TOPK, tile)


@ep_kernel(y_ptr="*{TOKEN}", weights_ptr="*fp32", copy_rows_ptr="*i32", specialised=("hidden",), num_warps=None)
def combine_reduce_kernel(
    rows: ExpertRows,
    copies: TokenCopies,
    combine: Combine,
    job: Job,
    hidden,
    num_steps,  # divides STEPS; with several nodes even
    WP: tl.constexpr,
    stagers: Stagers,
    tile: SumTile,
):
    let_next_start()
    tag = combine_tag(job, combine)
    before = staged_steps(job)
    if _wait_free(job, WP):
        num_rows = tl.minimum(tl.load(report_ptrs(combine.placement_ptr, job.rank, REPORT_ARRIVALS)), rows.row_capacity)
        every = tl.arange(0, WP)
        ELEMENT: tl.constexpr = rows.y_ptr.dtype.element_ty
        sums = _sums_of(job, combine.placement_ptr, every, hidden * (ELEMENT.primitive_bitwidth // 8))
        for turn in range(num_steps):
            step = turn * STEPS // num_steps
            reached = step + STEPS // num_steps
            begins, ends = _rows_of_step(job, combine.placement_ptr, every, step, reached, num_rows)
            most = tl.max(tl.cdiv(tl.maximum(ends - begins, 0), tile.ROWS)) * tile.TILES
            first_source, sources = _sources_of_step(job, step)
            # One tile of each source in turn keeps all links busy; sources with fewer tiles have empty ones at the end.
            for number in tl.range(tl.program_id(0), most * sources, tl.num_programs(0), num_stages=tile.STAGES):
                source = (first_source + (number + job.rank) % sources) % job.num_ranks
                # Picked from registers: loads would keep the tile waiting.
                sums_ptr = tl.multiple_of(pick(sums, source).to(tl.pointer_type(ELEMENT)), 16)
                begin, end = pick(begins, source), pick(ends, source)
                _reduce_item(rows, copies, sums_ptr, begin, end, number // sources, hidden, tile)
            release_staged(job, before, reached, tag, stagers)


@triton.jit
def _partial_flags(job, placement_ptr, part, NNP: tl.constexpr, network):
    """Flags [N, MAX_CHUNKS] of the other nodes' partial sums: pointers, and whether my tokens before `part` (of PARTS)
    need them; at least one flag per node."""
    flag = tl.arange(0, NNP * network.MAX_CHUNKS)
    node = flag // network.MAX_CHUNKS
    nodes = num_nodes(job)
    remote = (node < nodes) & (node != my_node(job))
    all_ptrs = tokens_per_node_of(job, placement_ptr) + node
    part_ptrs = step_tokens_of(job, placement_ptr) + part * nodes + node
    tokens = tl.load(tl.where(part < PARTS, part_ptrs, all_ptrs), mask=remote, other=0)
    used = remote & (flag % network.MAX_CHUNKS * network.CHUNK < tl.maximum(tokens, 1))
    return own_buffer(job, PARTIAL_FLAG, tl.int64) + flag, used


@triton.jit
def _wait_partials(job, placement_ptr, part, tag, NNP: tl.constexpr, network):
    """Wait for the other nodes' partial sums of my tokens before `part` (of PARTS)."""
    flag_ptrs, used = _partial_flags(job, placement_ptr, part, NNP, network)
    before = tl.load(state_at(job, EPOCH_COMBINE))
    ready, _, _ = wait_tagged(job, flag_ptrs, used, before + 1, before, tag, WAIT_NETWORK_PARTIALS)
    return ready


@triton.jit
def _report_partials(job, placement_ptr, tag, NNP: tl.constexpr, network):
    """After a failed wait: report the calls if ranks of other nodes are in other combines (as `report_staged`)."""
    flag_ptrs, used = _partial_flags(job, placement_ptr, PARTS, NNP, network)
    seen = tl.load(flag_ptrs, mask=used, other=0, volatile=True)
    nodes = tl.arange(0, NNP)
    tags = tags_of_rows(seen, used, tl.load(state_at(job, EPOCH_COMBINE)), NNP)
    known = tl.where(nodes == my_node(job), tag, tags)
    if tl.max(((known >= 0) & (known != tag)).to(tl.int32)) > 0:
        report_calls(job, rank_of(job, nodes, local_rank(job)), known, known >= 0, CALLS_COMBINE)


@triton.jit
def _steps_needed(job, placement_ptr, part, LWP: tl.constexpr):
    """Steps after which every rank of this node has staged its rows of my tokens before `part` (of PARTS)."""
    local = tl.arange(0, LWP)
    rows_ptr = rank_columns_of(job, row_of(job, placement_ptr)) + first_local(job)
    in_all = tl.load(rows_ptr + local, mask=is_local(job, local), other=0)
    step_rows_ptr = step_rows_of(job, placement_ptr)
    mask = is_local(job, local) & (part < PARTS)
    needed = tl.load(step_rows_ptr + part * job.ranks_per_node + local, mask=mask, other=0)
    needed += in_all * (part // PARTS)
    steps = tl.arange(0, STEPS)[None, :]
    short = staged_part(job, in_all[:, None], is_local(job, local)[:, None], steps) < needed[:, None]
    return tl.max(tl.sum(short.to(tl.int32), axis=1))


@triton.jit
def _add_partials(
    job,
    acc,  # [ROWS, BLOCK_H] float32
    alive,  # [ROWS]
    h,  # first column of the tile
    partial_ptr,  # [N, max_tokens, stride] partial sums of the other nodes
    slot_ptrs,  # [ROWS] pointers to K int32, the field PULL_PARTIAL
    hidden,
    TOPK: tl.constexpr,
):
    """Add to `acc` the partial sums of each token from the other nodes."""
    offs = h + tl.arange(0, acc.shape[1])
    stride = partial_stride(hidden)
    nodes = num_nodes(job)
    for j in range(tl.minimum(nodes - 1, TOPK)):
        partial = tl.load(slot_ptrs + j, mask=alive, other=-1)
        source = (partial % nodes * job.max_tokens + partial // nodes).to(tl.int64)
        source_ptrs = partial_ptr + (source * stride)[:, None] + offs[None, :]
        part = tl.load(source_ptrs, mask=(partial >= 0)[:, None] & (offs < hidden)[None, :], other=0.0)
        acc += part.to(tl.float32)
    return acc


@triton.jit
def _first_sum(sums, at, mask):
    """Initial float32 sums of a tile: biases at elements `at`, or zeros."""
    acc = tl.zeros(mask.shape, tl.float32)
    if sums.HAS_BIAS:
        if sums.num_biases > 0:  # a branch: only loads outside of branches are copied ahead (SumTile)
            acc += tl.load(sums.bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
            two = mask & (sums.num_biases > 1)
            acc += tl.load(sums.second_bias_ptr + at, mask=two, other=0.0).to(tl.float32)
    return acc


@ep_kernel(
    out_ptr="*{TOKEN}",
    bias_ptr="*{TOKEN}",
    second_bias_ptr="*{TOKEN}",
    own_ptr="*{TOKEN}",
    entries_ptr="*i32",
    specialised=("hidden",),
    num_warps=None,
)
def combine_pull_kernel(
    sums: Sums,
    entries: Entries,
    combine: Combine,
    job: Job,
    rows: PulledRows,
    staged: Staged,
    turns: Turns,
    network: Network,
    NNP: tl.constexpr,  # nodes rounded up to a power of two; 1 = one node, no partial sums
    tile: SumTile,
):
    ELEMENT: tl.constexpr = sums.out_ptr.dtype.element_ty
    rank_ptr = entry_field(entries, OWNER)
    row_ptr = entry_field(entries, PULL_ROW if rows.REDUCED else DST_ROW)
    partial_row_ptr = entry_field(entries, PULL_PARTIAL)
    num_chunks = tl.cdiv(entries.num_tokens, turns.BLOCK_T)
    bases = bases_of(job, rows.REDUCED, staged.LWP)
    if turns.ENGINES and rows.REDUCED:
        row_bytes = rows.hidden * (ELEMENT.primitive_bitwidth // 8)
        bases = with_own(job, bases, sums.own_ptr, sums.own_row, row_bytes)
    partial_ptr = own_buffer(job, PARTIAL_RECV, rows.PARTIAL_DTYPE)
    tag = combine_tag(job, combine)
    ready = tl.load(state_at(job, STATUS)) == 0
    for turn in range(turns.num_steps):
        step = turn * STEPS // turns.num_steps
        reached = step + STEPS // turns.num_steps
        if ready:
            steps = STEPS + tl.zeros([], tl.int32)
            if rows.REDUCED:
                steps = _steps_needed(job, combine.placement_ptr, parts_staged(reached), staged.LWP)
                # Hear every rank by the last turn, even one without rows for this rank: its tag must be compared.
                steps = tl.maximum(steps, (turn + 1) // turns.num_steps)
            ready, _ = wait_staged(job, staged, steps, tag)
        if NNP > 1:
            ready &= _wait_partials(job, combine.placement_ptr, parts_staged(reached), tag, NNP, network)
        if ready:
            begin = part_begin(parts_staged(step), num_chunks) * turns.BLOCK_T
            end = tl.minimum(part_begin(parts_staged(reached), num_chunks) * turns.BLOCK_T, entries.num_tokens)
            items = tl.cdiv(end, tile.ROWS) * tile.TILES
            mine = my_first(begin // tile.ROWS * tile.TILES, 0)
            for item in tl.range(mine, items, tl.num_programs(0), num_stages=tile.STAGES):
                token = item // tile.TILES * tile.ROWS + tl.arange(0, tile.ROWS)
                alive = token < end
                h = item % tile.TILES * tile.BLOCK_H
                offs = h + tl.arange(0, tile.BLOCK_H)
                at = token.to(tl.int64)[:, None] * rows.hidden + offs[None, :]
                mask = alive[:, None] & (offs < rows.hidden)[None, :]
                acc = pull_sum(
                    job,
                    rows,
                    bases,
                    _first_sum(sums, at, mask),
                    alive,
                    h,
                    Held(rank_ptr + token * entries.TOPK, row_ptr + token * entries.TOPK, entries.TOPK),
                    ELEMENT,
                    staged.LWP,
                    tile,
                )
                if NNP > 1:
                    if has_other_nodes(job):  # a branch around the loop inside: the compiler copies ahead in one loop
                        slot_ptrs = partial_row_ptr + token * entries.TOPK
                        acc = _add_partials(job, acc, alive, h, partial_ptr, slot_ptrs, rows.hidden, entries.TOPK)
                tl.store(sums.out_ptr + at, acc.to(ELEMENT), mask=mask)
    if not ready:
        report_staged(job, staged, tag)
        if NNP > 1:
            _report_partials(job, combine.placement_ptr, tag, NNP, network)
    end_combine(job, network, staged.LWP, turns.ENGINES)
    await_previous()
