"""Intra-node combine: publish expert outputs, then pull and sum the rows of each token.

Protocol      1 stage or reduce: wait until every rank is done with the previous combine (done_flag)
              2 stage: copy the expert rows to combine_x; or reduce: write per arrival row the sum of the
              token's rows on this rank, so that one row per (token, rank) crosses the link; in steps, each some
              rows of every source, or with several nodes first those of other nodes, then those of this one
              3 set staged_flag[my local rank, program] on every rank of the node, after each step
              (the caller may do step 2 himself: combine_free is step 1 alone, combine_publish step 3)
              The flag carries the tag of the combine, and 4 compares: a rank in another one is reported, and its rows
              are not read (device/calls.py)
              4 pull: wait for the staged flags of all local ranks (with several nodes also for the
              partial sums of the others: internode/combine.py), as far as the next tokens need them, then sum
              the rows of each token in float32 in k order, and round once
              5 the last program of the pull posts done_flag = epoch to every rank (device/post.py)
Layout        combine_x [capacity, H]: by output row (stage) or by arrival row (reduce); combine_weight
              [capacity] float32, read by the pull if HAS_WEIGHTS; staged_flag [LW, MAX_PROGRAMS] int64: steps since
              the layer was made, STEPS per combine, above the tag.
Memory order  3 is a system-scope release per program and step, acquired in 4. 5 comes after all pulls of its rank:
              the program that posts has acquired that the others are done.
Progress      1 waits for step 5 of the previous call, which every rank posts without waiting for this call.
              4 waits for other ranks' step 3; its grid is independent of theirs. It may run beside this rank's
              own reduce, if that is launched first and both fit on the GPU.
Replay        Epochs: the device counter holds the last finished combine; this one is that + 1.
"""

import triton
import triton.language as tl

from ..device.buffers import (
    BARRIER_SCRATCH,
    COMBINE_WEIGHT,
    COMBINE_X,
    DONE_FLAG,
    EPOCH_COMBINE,
    PARTIAL_FLAG,
    PARTIAL_RECV,
    STAGED_FLAG,
    STATUS,
    buffer_ptr,
    buffer_ptrs,
)
from ..device.calls import CALLS_COMBINE, combine_tag, report_calls
from ..device.groups import my_first
from ..device.post import post_to_all
from ..device.rows import on_my_node, pull_sum, report_staged, staged_part, staged_steps, tags_of_rows, wait_staged
from ..device.tables import (
    DST_ROW,
    OWNER,
    PULL_PARTIAL,
    PULL_RANK,
    PULL_ROW,
    STEPS,
    entry_field,
    expert_offsets_of,
    part_begin,
    row_of,
    step_rows_of,
    tokens_per_node_of,
)
from ..device.waits import (
    TAG_BITS,
    WAIT_COMBINE_FREE,
    WAIT_NETWORK_PARTIALS,
    last_to_arrive,
    release_flags,
    wait_flags,
    wait_tagged,
)
from ..spec import ep_kernel


@triton.jit
def _wait_free(tables_ptr, state_ptr, rank, num_ranks, WP: tl.constexpr):
    """Wait until no rank reads combine_x any more."""
    epoch = tl.load(state_ptr + EPOCH_COMBINE)
    peers = tl.arange(0, WP)
    flag_ptrs = buffer_ptr(tables_ptr, DONE_FLAG, num_ranks, rank, tl.int64) + peers
    return wait_flags(flag_ptrs, peers < num_ranks, epoch, state_ptr, WAIT_COMBINE_FREE)


@triton.jit
def _release_staged(
    tables_ptr, state_ptr, rank, num_ranks, ranks_per_node, steps, tag, LWP: tl.constexpr, MAX_PROGRAMS: tl.constexpr
):
    local = tl.arange(0, LWP)
    mask = local < ranks_per_node
    peers = rank - rank % ranks_per_node + local
    flag_ptrs = buffer_ptrs(tables_ptr, STAGED_FLAG, num_ranks, peers, mask, tl.int64)
    flag_ptrs += rank % ranks_per_node * MAX_PROGRAMS + tl.program_id(0)
    value = (staged_steps(state_ptr) + steps) << TAG_BITS | tag
    release_flags(flag_ptrs, mask, tl.zeros([LWP], tl.int64) + value)


@ep_kernel(num_warps=1)
def combine_free_kernel(state_ptr, tables_ptr, rank, num_ranks, WP: tl.constexpr):
    _wait_free(tables_ptr, state_ptr, rank, num_ranks, WP)


@ep_kernel(num_warps=1)
def combine_publish_kernel(
    placement_ptr,  # device/tables.py
    state_ptr,
    tables_ptr,
    experts_per_rank,
    rank,
    num_ranks,
    ranks_per_node,
    call,  # COMBINE_* (device/codes.py), as in the kernels below
    LWP: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
):
    tag = combine_tag(call, placement_ptr, num_ranks, experts_per_rank)
    if tl.load(state_ptr + STATUS) == 0:
        _release_staged(tables_ptr, state_ptr, rank, num_ranks, ranks_per_node, STEPS, tag, LWP, MAX_PROGRAMS)


@ep_kernel(y_ptr="*{WORD}", weights_ptr="*fp32", specialised=("row_words",), num_warps=16)
def combine_stage_kernel(
    y_ptr,  # [R, row_words] words
    weights_ptr,  # [R] float32, read if HAS_WEIGHTS
    placement_ptr,  # device/tables.py
    state_ptr,
    tables_ptr,
    row_words,
    row_capacity,
    experts_per_rank,
    rank,
    num_ranks,
    ranks_per_node,
    call,
    HAS_WEIGHTS: tl.constexpr,
    WP: tl.constexpr,
    LWP: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    tag = combine_tag(call, placement_ptr, num_ranks, experts_per_rank)
    if _wait_free(tables_ptr, state_ptr, rank, num_ranks, WP):
        combine_ptr = buffer_ptr(tables_ptr, COMBINE_X, num_ranks, rank, y_ptr.dtype.element_ty)
        combine_weight_ptr = buffer_ptr(tables_ptr, COMBINE_WEIGHT, num_ranks, rank, tl.float32)
        num_rows_ptr = expert_offsets_of(placement_ptr, num_ranks) + experts_per_rank
        num_rows = tl.minimum(tl.load(num_rows_ptr), row_capacity)
        offs = tl.arange(0, BLOCK_H)
        for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
            row = tile * ROWS + tl.arange(0, ROWS)
            for h in range(0, row_words, BLOCK_H):
                mask = (row < num_rows)[:, None] & (h + offs < row_words)[None, :]
                at = row.to(tl.int64)[:, None] * row_words + h + offs[None, :]
                tl.store(combine_ptr + at, tl.load(y_ptr + at, mask=mask, other=0), mask=mask)
            if HAS_WEIGHTS:
                weights = tl.load(weights_ptr + row, mask=row < num_rows, other=0.0)
                tl.store(combine_weight_ptr + row, weights, mask=row < num_rows)
        _release_staged(tables_ptr, state_ptr, rank, num_ranks, ranks_per_node, STEPS, tag, LWP, MAX_PROGRAMS)


@ep_kernel(y_ptr="*{TOKEN}", weights_ptr="*fp32", copy_rows_ptr="*i32", specialised=("hidden",), num_warps=32)
def combine_reduce_kernel(
    y_ptr,  # [R, H]
    weights_ptr,  # [R] float32, read if HAS_WEIGHTS
    copy_rows_ptr,  # [C, K] int32, output rows of each arrival row, -1 = none
    placement_ptr,  # device/tables.py
    state_ptr,
    tables_ptr,
    hidden,
    row_capacity,
    experts_per_rank,
    rank,
    num_ranks,
    ranks_per_node,
    num_steps,  # divides STEPS; with several nodes 2
    call,
    HAS_WEIGHTS: tl.constexpr,
    TOPK: tl.constexpr,
    WP: tl.constexpr,
    LWP: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    tag = combine_tag(call, placement_ptr, num_ranks, experts_per_rank)
    if _wait_free(tables_ptr, state_ptr, rank, num_ranks, WP):
        combine_ptr = buffer_ptr(tables_ptr, COMBINE_X, num_ranks, rank, y_ptr.dtype.element_ty)
        num_rows = tl.minimum(tl.load(placement_ptr + rank * 8 + 1), row_capacity)
        offs = tl.arange(0, BLOCK_H)
        tiles_before = tl.zeros([], tl.int32)
        for turn in range(num_steps):
            step = turn * STEPS // num_steps
            reached = step + STEPS // num_steps
            for source in range(num_ranks):
                first = tl.load(placement_ptr + source * 8 + 6)
                count = tl.load(placement_ptr + source * 8 + 7)
                if num_ranks > ranks_per_node:
                    # In two steps: what crosses the network once more comes first (internode/combine.py).
                    mine = on_my_node(source, rank, ranks_per_node) == (turn == 1)
                    begin = first
                    end = tl.minimum(first + tl.where(mine, count, 0), num_rows)
                else:
                    # Some rows of every source, so that all of them can begin to pull.
                    begin = first + staged_part(count, step)
                    end = tl.minimum(first + staged_part(count, reached), num_rows)
                tiles = tl.cdiv(tl.maximum(end - begin, 0), ROWS)
                for tile in range(my_first(0, tiles_before), tiles, tl.num_programs(0)):
                    row = begin + tile * ROWS + tl.arange(0, ROWS)
                    alive = row < end
                    for h in range(0, hidden, BLOCK_H):
                        in_row = (h + offs < hidden)[None, :]
                        acc = tl.zeros([ROWS, BLOCK_H], tl.float32)
                        for k in tl.static_range(TOPK):
                            copy = tl.load(copy_rows_ptr + row.to(tl.int64) * TOPK + k, mask=alive, other=-1)
                            rows = y_ptr + copy.to(tl.int64)[:, None] * hidden + h + offs[None, :]
                            part = tl.load(rows, mask=(copy >= 0)[:, None] & in_row, other=0.0).to(tl.float32)
                            if HAS_WEIGHTS:
                                part *= tl.load(weights_ptr + copy, mask=copy >= 0, other=0.0)[:, None]
                            acc += part
                        dest = combine_ptr + row.to(tl.int64)[:, None] * hidden + h + offs[None, :]
                        tl.store(dest, acc.to(y_ptr.dtype.element_ty), mask=alive[:, None] & in_row)
                tiles_before += tiles
            _release_staged(tables_ptr, state_ptr, rank, num_ranks, ranks_per_node, reached, tag, LWP, MAX_PROGRAMS)


@triton.jit
def _wait_partials(
    tokens_per_node_ptr,
    tables_ptr,
    state_ptr,
    rank,
    num_ranks,
    ranks_per_node,
    tag,
    NNP: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Wait for the partial sums that the other nodes owe for my tokens: flags [N, MAX_CHUNKS], one of each at least."""
    flag = tl.arange(0, NNP * MAX_CHUNKS)
    node = flag // MAX_CHUNKS
    remote = (node < num_ranks // ranks_per_node) & (node != rank // ranks_per_node)
    tokens = tl.load(tokens_per_node_ptr + node, mask=remote, other=0)
    used = remote & (flag % MAX_CHUNKS * CHUNK < tl.maximum(tokens, 1))
    flag_ptrs = buffer_ptr(tables_ptr, PARTIAL_FLAG, num_ranks, rank, tl.int64) + flag
    before = tl.load(state_ptr + EPOCH_COMBINE)
    ready, differ, seen = wait_tagged(flag_ptrs, used, before + 1, before, tag, state_ptr, WAIT_NETWORK_PARTIALS)
    if differ:
        nodes = tl.arange(0, NNP)
        known = tl.where(nodes == rank // ranks_per_node, tag, tags_of_rows(seen, used, before, NNP))
        ranks = nodes * ranks_per_node + rank % ranks_per_node
        report_calls(state_ptr, ranks, known, known >= 0, CALLS_COMBINE)
    return ready


@triton.jit
def _steps_needed(
    placement_ptr,
    part,  # 64ths of my tokens
    rank,
    num_ranks,
    experts_per_rank,
    ranks_per_node,
    LWP: tl.constexpr,
):
    """Steps after which every rank of this node has staged its rows of my tokens before a part."""
    local = tl.arange(0, LWP)
    first_rank = rank - rank % ranks_per_node
    row_ptr = row_of(placement_ptr, num_ranks, experts_per_rank, ranks_per_node) + num_ranks * experts_per_rank
    in_all = tl.load(row_ptr + first_rank + local, mask=local < ranks_per_node, other=0)
    step_rows_ptr = step_rows_of(placement_ptr, num_ranks, experts_per_rank, ranks_per_node)
    mask = (local < ranks_per_node) & (part < STEPS * STEPS)
    needed = tl.load(step_rows_ptr + part * ranks_per_node + local, mask=mask, other=0)
    needed = tl.where(part < STEPS * STEPS, needed, in_all)
    steps = tl.arange(0, STEPS)[None, :]
    short = staged_part(in_all[:, None], steps) < needed[:, None]
    return tl.max(tl.sum(short.to(tl.int32), axis=1))


@ep_kernel(out_ptr="*{TOKEN}", entries_ptr="*i32", specialised=("hidden",), num_warps=32)
def combine_pull_kernel(
    out_ptr,  # out [T, H]
    entries_ptr,  # [F, T, K] int32 (device/tables.py)
    placement_ptr,  # device/tables.py
    state_ptr,
    tables_ptr,
    num_tokens,
    max_tokens,
    hidden,
    row_capacity,
    experts_per_rank,
    rank,
    num_ranks,
    ranks_per_node,
    num_stage_programs,
    num_steps,  # divides STEPS
    call,
    REDUCED: tl.constexpr,  # rows were reduced: by arrival row, in steps; or staged: by output row
    PARTIAL_DTYPE: tl.constexpr,  # dtype of the other nodes' partial sums
    HAS_WEIGHTS: tl.constexpr,
    NETWORK: tl.constexpr,
    TOPK: tl.constexpr,
    LWP: tl.constexpr,
    NNP: tl.constexpr,  # nodes rounded up to a power of two; 1 = one node, no partial sums
    MAX_PROGRAMS: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    rank_ptr = entry_field(entries_ptr, PULL_RANK if REDUCED else OWNER, num_tokens, TOPK)
    row_ptr = entry_field(entries_ptr, PULL_ROW if REDUCED else DST_ROW, num_tokens, TOPK)
    partial_row_ptr = entry_field(entries_ptr, PULL_PARTIAL, num_tokens, TOPK)
    most_partials = tl.minimum(num_ranks // ranks_per_node - 1, TOPK)
    num_chunks = tl.cdiv(num_tokens, BLOCK_T)
    offs = tl.arange(0, BLOCK_H)
    partial_stride = (hidden + 7) // 8 * 8
    partial_ptr = buffer_ptr(tables_ptr, PARTIAL_RECV, num_ranks, rank, PARTIAL_DTYPE)
    tag = combine_tag(call, placement_ptr, num_ranks, experts_per_rank)
    ready = tl.load(state_ptr + STATUS) == 0
    if NNP > 1:
        if ready:
            ready, _ = wait_staged(
                tables_ptr,
                state_ptr,
                rank,
                num_ranks,
                ranks_per_node,
                num_stage_programs,
                STEPS,
                tag,
                LWP,
                MAX_PROGRAMS,
            )
        ready &= _wait_partials(
            tokens_per_node_of(placement_ptr, num_ranks, experts_per_rank, ranks_per_node),
            tables_ptr,
            state_ptr,
            rank,
            num_ranks,
            ranks_per_node,
            tag,
            NNP,
            MAX_CHUNKS,
            CHUNK,
        )
    for turn in range(num_steps):
        step = turn * STEPS // num_steps
        reached = step + STEPS // num_steps
        if ready:
            steps = STEPS + tl.zeros([], tl.int32)
            if REDUCED:
                steps = _steps_needed(
                    placement_ptr, reached * reached, rank, num_ranks, experts_per_rank, ranks_per_node, LWP
                )
                # In the end all ranks have been heard, whether they have rows for this one or not: for their tags.
                steps = tl.maximum(steps, (turn + 1) // num_steps)
            ready, _ = wait_staged(
                tables_ptr,
                state_ptr,
                rank,
                num_ranks,
                ranks_per_node,
                num_stage_programs,
                steps,
                tag,
                LWP,
                MAX_PROGRAMS,
            )
        if ready:
            begin = part_begin(step * step, num_chunks) * BLOCK_T
            end = tl.minimum(part_begin(reached * reached, num_chunks) * BLOCK_T, num_tokens)
            for tile in range(my_first(begin // ROWS, 0), tl.cdiv(end, ROWS), tl.num_programs(0)):
                token = tile * ROWS + tl.arange(0, ROWS)
                alive = token < end
                for h in range(0, hidden, BLOCK_H):
                    acc = pull_sum(
                        tl.zeros([ROWS, BLOCK_H], tl.float32),
                        alive,
                        h,
                        rank_ptr + token * TOPK,
                        row_ptr + token * TOPK,
                        tables_ptr,
                        hidden,
                        row_capacity,
                        rank,
                        num_ranks,
                        ranks_per_node,
                        out_ptr.dtype.element_ty,
                        HAS_WEIGHTS,
                        REDUCED,
                        TOPK,
                        LWP,
                        BLOCK_H,
                    )
                    in_row = (h + offs < hidden)[None, :]
                    if NNP > 1:
                        for j in range(most_partials):
                            partial = tl.load(partial_row_ptr + token * TOPK + j, mask=alive, other=-1)
                            num_nodes = num_ranks // ranks_per_node
                            source = (partial % num_nodes * max_tokens + partial // num_nodes).to(tl.int64)
                            source_ptrs = partial_ptr + (source * partial_stride)[:, None] + h + offs[None, :]
                            part = tl.load(source_ptrs, mask=(partial >= 0)[:, None] & in_row, other=0.0)
                            acc += part.to(tl.float32)
                    dest = out_ptr + token.to(tl.int64)[:, None] * hidden + h + offs[None, :]
                    tl.store(dest, acc.to(out_ptr.dtype.element_ty), mask=alive[:, None] & in_row)
    if not ready:
        report_staged(
            tables_ptr, state_ptr, rank, num_ranks, ranks_per_node, num_stage_programs, tag, LWP, MAX_PROGRAMS
        )
    if last_to_arrive(state_ptr):
        epoch = tl.load(state_ptr + EPOCH_COMBINE) + 1
        tl.debug_barrier()
        tl.store(state_ptr + EPOCH_COMBINE, epoch)
        post_to_all(
            tables_ptr,
            tl.cast(rank, tl.int64) * 16,
            tl.full([], 16, tl.int64),
            epoch,
            rank,
            num_ranks,
            ranks_per_node,
            BARRIER_SCRATCH,
            DONE_FLAG,
            False,
            False,
            NETWORK,
            LWP,
            16,
        )
