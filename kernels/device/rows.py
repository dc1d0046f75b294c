"""Rows of tokens: pushing a row to the ranks of this node that own its experts, pulling rows from them.

Shared by the intra-node and the inter-node kernels. A *tile* is [ROWS, BLOCK_H]: several rows at once,
because one program then has several independent accesses in flight, and because the interpreter pays per
operation, not per element.

What travels is a *payload* of opaque words, or a row quantised to MXFP8: `hidden` e4m3 bytes, then one e8m0
scale byte per 32 of them, padded to 16 bytes. A low-latency push quantises rows itself (QUANTISE); other kernels
get them quantised (MX).

Arrival buffers of a rank: `stage_x` [capacity, row] holds one row per (token, rank); `stage_meta`
[W * max_tokens, 2 * KP] int32 holds, for each of them, the output rows of its copies (-1 = none), then
their weights as float32 bits. KP is top-k rounded up to a power of two.

A rank pushes its tokens in up to STEPS steps, and each of its programs raises its arrival flag on every rank
of the node after each, so that a receiver can work on the first rows while the last are on their way. So it does with
the tokens of its counterpart on each other node. The high 32 bits of the flag count steps since the layer was made,
STEPS per call; the low 32 bits say how far the steps reach in the receiver's arrival rows of that source: their number
(own tokens), or the row behind them (other nodes'). Rows of a combine are staged in steps, too, STEPS per call: each
some rows of every source, or with several nodes first all rows of other nodes' tokens. Their flags count those steps,
and carry the tag of the combine (device/calls.py).
"""

import triton
import triton.language as tl

from . import codes
from .buffers import (
    ARRIVE_FLAG,
    COMBINE_WEIGHT,
    COMBINE_X,
    EPOCH_COMBINE,
    EPOCH_DISPATCH,
    STAGE_META,
    STAGED_FLAG,
    buffer_ptr,
    buffer_ptrs,
)
from .calls import CALLS_COMBINE, report_calls
from .mxfp8 import MODE_RCEIL, quantize_tile
from .tables import STEPS
from .waits import TAG_BITS, TAGS, WAIT_ARRIVALS, WAIT_COMBINE_STAGED, release_flags, wait_tagged, wait_values


@triton.jit
def on_my_node(peer, rank, ranks_per_node):
    """True for the ranks that share the node of `rank`."""
    first = rank - rank % ranks_per_node
    return (peer >= first) & (peer < first + ranks_per_node)


ALL_ROWS = tl.constexpr(2**31 - 1)

WORDS = tl.constexpr(codes.WORDS)
QUANTISE = tl.constexpr(codes.QUANTISE)
MX = tl.constexpr(codes.MX)
_BLOCK = tl.constexpr(32)

PULLED = tl.constexpr(4)
"""Rows of one token that are on their way at once; where it has fewer, those of more tokens (plans/exchange.py)."""


@triton.jit
def wire_sizes(row_words, WORD: tl.constexpr, PAYLOAD: tl.constexpr):
    """Of a row on the wire: words from one to the next, bytes of its data, bytes of both; int64.

    row_words: words of the data; with QUANTISE its elements, each of which becomes one byte.
    """
    WORD_BYTES: tl.constexpr = 1 if PAYLOAD == QUANTISE else WORD.primitive_bitwidth // 8
    data_bytes = tl.cast(row_words, tl.int64) * WORD_BYTES
    if PAYLOAD == WORDS:
        return tl.cast(row_words, tl.int64), data_bytes, data_bytes
    else:
        sixteens = (data_bytes + data_bytes // _BLOCK + 15) // 16
        return sixteens * (16 // WORD_BYTES), data_bytes, sixteens * 16


@triton.jit
def load_payload(
    row_ptrs,  # [ROWS] pointers to rows of words, or of elements to quantise
    scale_ptrs,  # [ROWS] pointers to rows of uint8 scales; read with MX
    alive,  # [ROWS]
    h,  # first word of the tile
    row_words,
    PAYLOAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Tile [ROWS, BLOCK_H] of wire data and its scales [ROWS, BLOCK_H * word bytes / 32]; with WORDS the data twice."""
    data = load_row_tile(row_ptrs, alive, h, row_words, BLOCK_H)
    return wire_tile(data, scale_ptrs, alive, h, row_words, PAYLOAD)


@triton.jit
def load_row_tile(row_ptrs, alive, h, row_words, BLOCK_H: tl.constexpr):
    """Words `h` and on of some rows, [ROWS, BLOCK_H]; zero outside of them."""
    offs = h + tl.arange(0, BLOCK_H)
    return tl.load(row_ptrs[:, None] + offs[None, :], mask=alive[:, None] & (offs < row_words)[None, :], other=0)


@triton.jit
def wire_tile(data, scale_ptrs, alive, h, row_words, PAYLOAD: tl.constexpr):
    """What `load_payload` returns, from the words that `load_row_tile` loaded."""
    BLOCK_H: tl.constexpr = data.shape[1]
    if PAYLOAD == WORDS:
        return data, data
    elif PAYLOAD == QUANTISE:
        blocks = tl.reshape(data.to(tl.float32), [data.shape[0], BLOCK_H // _BLOCK, _BLOCK])
        codes, scales = quantize_tile(blocks, MODE_RCEIL, False)
        return tl.reshape(codes, [data.shape[0], BLOCK_H]).to(tl.uint8, bitcast=True), scales
    else:
        WORD_BYTES: tl.constexpr = data.dtype.primitive_bitwidth // 8
        at = h * WORD_BYTES // _BLOCK + tl.arange(0, BLOCK_H * WORD_BYTES // _BLOCK)
        mask = alive[:, None] & (at < row_words * WORD_BYTES // _BLOCK)[None, :]
        return data, tl.load(scale_ptrs[:, None] + at[None, :], mask=mask, other=0)


@triton.jit
def store_scales(scale_ptrs, mask, scales, h, row_words, WORD_BYTES: tl.constexpr):
    """Store scales [ROWS, n] of the tile that starts at word `h` to rows of scales at `scale_ptrs` [ROWS]."""
    at = h * WORD_BYTES // _BLOCK + tl.arange(0, scales.shape[1])
    mask = mask[:, None] & (at < row_words * WORD_BYTES // _BLOCK)[None, :]
    tl.store(scale_ptrs[:, None] + at[None, :], scales, mask=mask)


@triton.jit
def push_meta(
    weights,  # [n, KP] float32, or any if not HAS_WEIGHTS
    tables_ptr,
    owner,  # [n, KP] ranks, -1 = dropped
    dst_row,  # [n, KP] output rows, -1 = dropped
    arrival,  # [n, KP] arrival rows
    here,  # [n, KP] the first entry of each rank of this node
    num_ranks,
    HAS_WEIGHTS: tl.constexpr,
    KP: tl.constexpr,
):
    """Tell the rank of each entry, where `here`, which output rows its token fills there, and with what weights."""
    mine = owner[:, :, None] == owner[:, None, :]
    at = (arrival.to(tl.int64) * (2 * KP))[:, :, None] + tl.arange(0, KP)[None, None, :]
    to_all = tl.broadcast_to(here[:, :, None], mine.shape)
    addrs = tl.load(tables_ptr + STAGE_META * num_ranks + owner, mask=here, other=0)
    dest = tl.multiple_of(addrs.to(tl.pointer_type(tl.int32)), [16, 16])
    tl.store(dest[:, :, None] + at, tl.where(mine, dst_row[:, None, :], -1), mask=to_all)
    if HAS_WEIGHTS:
        dest = tl.multiple_of(addrs.to(tl.pointer_type(tl.float32)), [16, 16])
        tl.store(dest[:, :, None] + at + KP, tl.where(mine, weights[:, None, :], 0.0), mask=to_all)


@triton.jit
def _popcount(x):
    """Bits set in each element of a uint32 tensor, as int32."""
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def compact_position(here):
    """[n, KP]: where each entry goes when those `here` come first, in k order, and then the others.

    By bits of a word, KP <= 32: Triton 3.6 does not compile every scan of two elements with 16 warps.
    """
    k = tl.arange(0, here.shape[1])[None, :]
    bit = tl.full(here.shape, 1, tl.uint32) << k.to(tl.uint32)
    among = tl.sum(tl.where(here, bit, 0), axis=1)[:, None]
    before = _popcount(among & (bit - 1))
    return tl.where(here, before, _popcount(among) + k - before)


@triton.constexpr_function
def pull_batches(compact, topk, ranks_per_node):
    """Rows of one token that are loaded at once, and how many entries are looked at.

    Without gaps there is one row per rank of the node at most, so what comes first is all there is. A second batch
    is looked for even so: without that branch behind the first loads, the compiler spreads them between their uses,
    and half as many rows are on their way (4 x H200: a combine of 4096 tokens takes 700 us in place of 570).
    """
    most = min(topk, ranks_per_node) if compact else topk
    batch = min(PULLED.value, most)
    return batch, min(topk, max(most, 2 * batch))


@triton.jit
def pull_sum(
    acc,  # [ROWS, BLOCK_H] float32
    alive,  # [ROWS]
    h,  # first column of the tile
    owner_ptrs,  # [ROWS] pointers to K int32
    row_ptrs,  # [ROWS] pointers to K int32: row in the owner's combine buffer, -1 = none
    tables_ptr,
    hidden,
    row_capacity,
    rank,
    num_ranks,
    ranks_per_node,
    DTYPE: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    COMPACT: tl.constexpr,  # the rows of a token come first, then -1
    TOPK: tl.constexpr,
    LWP: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Add to `acc`, in k order, the rows that the ranks of this node hold for each token."""
    BATCHES: tl.constexpr = pull_batches(COMPACT, TOPK, LWP)
    BATCH: tl.constexpr = BATCHES[0]
    LOOKED_AT: tl.constexpr = BATCHES[1]
    for first in tl.static_range(0, LOOKED_AT, BATCH):
        row = tl.load(row_ptrs + first, mask=alive, other=-1)
        # Where rows come without gaps, there are few tokens with more than some.
        if first == 0 or (not COMPACT or tl.sum((row >= 0).to(tl.int32)) > 0):
            tiles = ()
            weights = ()
            # As many in the last batch as in the others: a branch cannot change the length of a tuple.
            for k in tl.static_range(first, first + BATCH):
                is_entry = alive & (k < TOPK)
                peer = tl.load(owner_ptrs + k, mask=is_entry, other=-1)
                row = tl.load(row_ptrs + k, mask=is_entry, other=-1)
                here = (row >= 0) & (row < row_capacity) & on_my_node(peer, rank, ranks_per_node)
                source = buffer_ptrs(tables_ptr, COMBINE_X, num_ranks, peer, here, DTYPE)
                source += row.to(tl.int64) * hidden
                offs = h + tl.arange(0, BLOCK_H)
                mask = here[:, None] & (offs < hidden)[None, :]
                tiles += (tl.load(source[:, None] + offs[None, :], mask=mask, other=0.0),)
                if HAS_WEIGHTS:
                    weight_ptrs = buffer_ptrs(tables_ptr, COMBINE_WEIGHT, num_ranks, peer, here, tl.float32)
                    weights += (tl.load(weight_ptrs + row, mask=here, other=0.0),)
            for k in tl.static_range(len(tiles)):
                tile = tiles[k].to(tl.float32)
                if HAS_WEIGHTS:
                    tile *= weights[k][:, None]
                acc += tile
    return acc


@triton.jit
def release_arrivals(
    tables_ptr,
    state_ptr,
    rank,
    num_ranks,
    ranks_per_node,
    step,  # 1 to STEPS, the last one
    rows,  # [LWP] how far all programs have come by then at each rank of the node; ALL_ROWS with the last step
    node,  # whose tokens they are
    LWP: tl.constexpr,
    SENDERS: tl.constexpr,
):
    """Raise arrive_flag[node, my local rank, this program] on every rank of my node."""
    local = tl.arange(0, LWP)
    peers = rank - rank % ranks_per_node + local
    mask = local < ranks_per_node
    flag_ptrs = buffer_ptrs(tables_ptr, ARRIVE_FLAG, num_ranks, peers, mask, tl.int64)
    flag_ptrs += (node * ranks_per_node + rank % ranks_per_node) * SENDERS + tl.program_id(0)
    done = arrival_steps(state_ptr) + step
    release_flags(flag_ptrs, mask, (done << 32) | rows.to(tl.int64))


@triton.jit
def wait_arrivals(
    flags_ptr,  # of this rank
    node,  # whose tokens they are
    steps,  # seen so far, int64
    done,  # [SOURCES] tiles seen so far of each rank's rows
    starts,  # [SOURCES] first arrival row of each rank of that node
    counts,  # [SOURCES] arrival rows of each
    state_ptr,
    rank,
    ranks_per_node,
    num_senders,  # programs that raise flags
    SOURCES: tl.constexpr,
    SENDERS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Wait until the rows of a node's tokens are a step further: whether they came, tiles [SOURCES] and steps by now.

    SOURCES and SENDERS are powers of two, at least `ranks_per_node` and `num_senders`, and their product is at least
    the number of threads: a flag that two threads read while it changes would be two flags, and their warps would
    disagree on what has been copied.
    """
    flag = tl.arange(0, SOURCES * SENDERS)
    used = (flag // SENDERS < ranks_per_node) & (flag % SENDERS < num_senders)
    first_flag = node * ranks_per_node * SENDERS
    before = arrival_steps(state_ptr)
    expected = (before + steps + 1) << 32
    arrived, seen = wait_values(flags_ptr + first_flag + flag, used, expected, state_ptr, WAIT_ARRIVALS, first_flag)
    # Of each source what all its programs have; flags not in use are as far as the last one will be.
    seen = tl.where(used, seen, (before + STEPS) << 32 | ALL_ROWS)
    of_source = tl.min(tl.reshape(seen, [SOURCES, SENDERS]), axis=1)
    ready = (of_source & ALL_ROWS).to(tl.int32) - tl.where(node == rank // ranks_per_node, 0, starts)
    ready = tl.where(ready < counts, ready // ROWS, tl.cdiv(counts, ROWS))
    # A forwarder that sent us nothing reports no progress, so keep the maximum (internode/dispatch.py).
    return arrived, tl.maximum(ready, done), (tl.min(of_source) >> 32) - before


@triton.jit
def arrival_steps(state_ptr):
    """Steps of all calls before this one, int64."""
    return (tl.load(state_ptr + EPOCH_DISPATCH) - 1) * STEPS


@triton.jit
def other_node(item, rank, num_ranks, ranks_per_node):
    """Node and chunk of a work item; neighbours first, so that nodes do not all send to the same one."""
    num_nodes = num_ranks // ranks_per_node
    node = (rank // ranks_per_node + 1 + item % (num_nodes - 1)) % num_nodes
    return node, item // (num_nodes - 1)


@triton.jit
def wait_staged(
    tables_ptr,
    state_ptr,
    rank,
    num_ranks,
    ranks_per_node,
    num_stage_programs,
    steps,  # of STEPS
    tag,  # int64, of this combine
    LWP: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
):
    """Wait until every rank of this node has staged its rows of this combine up to a step: whether all have, and
    whether one of them is in another combine."""
    flag = tl.arange(0, LWP * MAX_PROGRAMS)
    used = (flag // MAX_PROGRAMS < ranks_per_node) & (flag % MAX_PROGRAMS < num_stage_programs)
    flag_ptrs = buffer_ptr(tables_ptr, STAGED_FLAG, num_ranks, rank, tl.int64) + flag
    before = staged_steps(state_ptr)
    ready, differ, _ = wait_tagged(flag_ptrs, used, before + steps, before, tag, state_ptr, WAIT_COMBINE_STAGED)
    return ready, differ


@triton.jit
def report_staged(
    tables_ptr,
    state_ptr,
    rank,
    num_ranks,
    ranks_per_node,
    num_stage_programs,
    tag,
    LWP: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
):
    """After a `wait_staged` that failed: report the calls, if ranks of this node are in different combines.

    Apart from the wait: inside the loop that pulls rows, it took registers from the rows in flight, and combine took a
    tenth longer (4 x H200, 4096 tokens of 7168 elements).
    """
    flag = tl.arange(0, LWP * MAX_PROGRAMS)
    used = (flag // MAX_PROGRAMS < ranks_per_node) & (flag % MAX_PROGRAMS < num_stage_programs)
    flag_ptrs = buffer_ptr(tables_ptr, STAGED_FLAG, num_ranks, rank, tl.int64) + flag
    seen = tl.load(flag_ptrs, mask=used, other=0, volatile=True)
    known = tags_of_rows(seen, used, staged_steps(state_ptr), LWP)
    ranks = rank - rank % ranks_per_node + tl.arange(0, LWP)
    if tl.max(((known >= 0) & (known != tag)).to(tl.int32)) > 0:
        report_calls(state_ptr, ranks, known, known >= 0, CALLS_COMBINE)


@triton.jit
def tags_of_rows(seen, used, before, ROWS: tl.constexpr):
    """[ROWS] the tag in each row of tagged flags; -1 where none counts more than `before`."""
    tags = tl.where(used & ((seen >> TAG_BITS) > before), seen & TAGS, -1)
    return tl.max(tl.reshape(tags, [ROWS, seen.numel // ROWS]), axis=1)


@triton.jit
def staged_steps(state_ptr):
    """Steps of all combines before this one, int64."""
    return tl.load(state_ptr + EPOCH_COMBINE) * STEPS


@triton.jit
def staged_part(rows, step):
    """How many of `rows` rows of a source are staged after some of STEPS steps; the first ones are short."""
    return rows * (step * step) // (STEPS * STEPS)
