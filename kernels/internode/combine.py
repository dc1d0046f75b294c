"""Inter-node combine: one partial sum per (token, node) crosses the network.

Protocol      1 wait until the ranks of this node have staged their rows (intranode/combine.py, step 3); if reduced, in
              the first half of the steps, which has the rows of other nodes' tokens, as far as the next chunk needs
              2 for the tokens that my counterpart of another node sent here: sum in float32, in k order, their rows,
              which the ranks of this node hold, or if reduced this rank, CHUNK tokens at a time, into partial_send
              3 put the chunk into partial_recv of that counterpart, with its flag = epoch above the tag of the combine;
              the counterpart adds the partial sums to its own (intranode/combine.py, step 4). The first chunk is always
              sent, to carry the tag; if ranks of this node are in different combines, the tag is MIXED_TAG
              (device/calls.py)
Layout        partial_send, partial_recv [N, max_tokens, stride] of the partial dtype, by the other node,
              then by the token's slot; partial_flag [N, MAX_CHUNKS] int64.
Memory order  3: put-with-signal orders data before flag; acquired in step 4 of intranode/combine.py.
Progress      Waits only for the stage or reduce kernels of this node, which precede every wait for partial sums. It may
              run concurrently with this rank's own reduce and pull, if reduce is launched first, then this kernel, and
              all three fit on the GPU.
Replay        partial_recv is free again when its owner has posted done_flag (intranode/combine.py, step 5).
"""

import triton
import triton.language as tl

from ..device.buffers import EPOCH_COMBINE, PARTIAL_FLAG, PARTIAL_RECV, PARTIAL_SEND, own_buffer
from ..device.calls import MIXED_TAG, Combine, combine_tag
from ..device.job import Job, is_local, num_nodes, other_node, rank_of, state_at
from ..device.payload import SumTile
from ..device.post import Chunk, Network, put_chunk
from ..device.pull import Held, PulledRows, bases_of, fewer, power_of_2, pull_sum
from ..device.staging import Staged, end_combine, report_staged, staged_part, wait_staged
from ..device.tables import STEPS, partial_stride, sum_ends_of, tokens_from_node_of
from ..device.waits import TAG_BITS
from ..spec import ep_kernel


@triton.jit
def _steps_needed(
    job,
    placement_ptr,
    node,
    rows_ptr,  # [num_tokens, K] int32, rows of sums of the tokens from a chunk on, without gaps, then -1
    num_tokens,
    TOPK: tl.constexpr,
    LWP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Steps after which every rank of this node has staged its rows of a chunk of another node's tokens."""
    local = tl.arange(0, LWP)
    at = rank_of(job, node, local)
    end_ptrs = sum_ends_of(job, placement_ptr) + at
    first = tl.load(end_ptrs - 1, mask=is_local(job, local) & (at > 0), other=0)
    count = tl.load(end_ptrs, mask=is_local(job, local), other=0) - first
    MOST: tl.constexpr = power_of_2(fewer(TOPK, LWP))
    token = tl.arange(0, CHUNK)[:, None]
    k = tl.arange(0, MOST)[None, :]
    row = tl.load(rows_ptr + token * TOPK + k, mask=(token < num_tokens) & (k < TOPK), other=-1)
    place = tl.reshape(row, [CHUNK * MOST])[:, None] - first[None, :]
    needed = tl.max(tl.where((place >= 0) & (place < count[None, :]), place + 1, 0), axis=0)
    steps = tl.arange(0, STEPS)[None, :]
    short = staged_part(job, count[:, None], False, steps) < needed[:, None]
    return tl.max(tl.sum(short.to(tl.int32), axis=1))


@ep_kernel(like_x_ptr="*{TOKEN}", forward_ptr="*i32", specialised=("hidden",), num_warps=None)
def combine_partial_kernel(
    like_x_ptr,  # any pointer to the token dtype; only its type is used
    combine: Combine,
    forward_ptr,  # [2, N, max_tokens, K] int32 (internode/dispatch.py)
    job: Job,
    rows: PulledRows,
    staged: Staged,
    TOPK: tl.constexpr,
    network: Network,
    tile: SumTile,
):
    tag = combine_tag(job, combine)
    # Hear every rank before anything is sent: its tag must be compared.
    steps = tl.full([], 1 if rows.REDUCED else STEPS, tl.int32)
    ready, differ = wait_staged(job, staged, steps, tag)
    if differ:
        report_staged(job, staged, tag)
    if ready | differ:
        sent_tag = tl.where(differ, MIXED_TAG, tag)
        tokens_from_node_ptr = tokens_from_node_of(job, combine.placement_ptr)
        num_entries = tl.cast(num_nodes(job), tl.int64) * job.max_tokens * TOPK
        row_table_ptr = forward_ptr + num_entries
        epoch = tl.load(state_at(job, EPOCH_COMBINE)) + 1
        stride = partial_stride(rows.hidden)
        offs = tl.arange(0, tile.BLOCK_H)
        bases = bases_of(job, rows.REDUCED, staged.LWP)
        send_ptr = own_buffer(job, PARTIAL_SEND, rows.PARTIAL_DTYPE)
        row_bytes = tl.cast(stride, tl.int64) * (rows.PARTIAL_DTYPE.primitive_bitwidth // 8)
        num_items = (num_nodes(job) - 1) * tl.cdiv(job.max_tokens, network.CHUNK)
        for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
            node, chunk = other_node(job, item)
            tokens = tl.load(tokens_from_node_ptr + node)
            first = chunk * network.CHUNK
            if rows.REDUCED:
                if ready & (first < tokens) & (steps < STEPS // 2):
                    rows_ptr = row_table_ptr + (node * job.max_tokens + first).to(tl.int64) * TOPK
                    needed = _steps_needed(
                        job, combine.placement_ptr, node, rows_ptr, tokens - first, TOPK, staged.LWP, network.CHUNK
                    )
                    steps = tl.maximum(steps, needed)
                    ready, _ = wait_staged(job, staged, steps, tag)
            tokens = tl.where(ready, tokens, 0)
            if first < tokens:
                pieces = tl.cdiv(tl.minimum(tokens - first, network.CHUNK), tile.ROWS) * tile.TILES
                for piece in tl.range(0, pieces, num_stages=tile.STAGES):
                    slot = first + piece // tile.TILES * tile.ROWS + tl.arange(0, tile.ROWS)
                    alive = slot < tokens
                    row = (node * job.max_tokens + slot).to(tl.int64)
                    h = piece % tile.TILES * tile.BLOCK_H
                    acc = pull_sum(
                        job,
                        rows,
                        bases,
                        tl.zeros([tile.ROWS, tile.BLOCK_H], tl.float32),
                        alive,
                        h,
                        Held(forward_ptr + row * TOPK, row_table_ptr + row * TOPK, TOPK),
                        like_x_ptr.dtype.element_ty,
                        staged.LWP,
                        tile,
                    )
                    mask = alive[:, None] & (h + offs < rows.hidden)[None, :]
                    dest = send_ptr + row[:, None] * stride + h + offs[None, :]
                    tl.store(dest, acc.to(rows.PARTIAL_DTYPE), mask=mask)
            if (first < tokens) | ((chunk == 0) & (ready | differ)):
                count = tl.minimum(tl.maximum(tokens - first, 1), network.CHUNK)
                put_chunk(
                    job,
                    Chunk(node, chunk, first, count, job.max_tokens, row_bytes),
                    epoch << TAG_BITS | sent_tag,
                    PARTIAL_SEND,
                    PARTIAL_RECV,
                    PARTIAL_FLAG,
                    network,
                    tile.BLOCK_H,
                )
    end_combine(job, network, staged.LWP, False)
