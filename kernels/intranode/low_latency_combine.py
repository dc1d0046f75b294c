"""Low-latency combine of few tokens inside a node, in one launch: sums announce themselves.

Protocol      The first programs reduce, the others sum.
              1 reduce: the first program publishes the number and the tag of this combine to every rank, in
              ll_combine_flag
              2 reduce: for each staging row of the dispatch, sum the outputs of its assignments in float32, in k order,
              round once, and store the sum at the token's rank: negated, and never as +0
              3 sum: the first of these programs waits until every rank has published the same number, and compares the
              tags (device/calls.py)
              4 sum: the others wait until no element of a token's sums is +0 any more, subtract the sums in float32,
              in the order of the ranks that the token went to, round, and reset the elements to +0
Layout        ll_combine [2, W, M, H]: by parity of the epoch, experts' rank, token. +0, which fresh memory holds, means
              "not arrived"; a sum of +0 or -0 travels as -0.
              ll_combine_flag [2, W] int64: (epoch << 32 | tag) of each rank, by parity of the epoch.
              EPOCH_LL_COMBINE is a turn (device/low_latency.py), which the programs of both launches end.
Memory order  None between 2 and 4: each element shows by itself that it has arrived, in whatever order elements come,
              and a thread uses the very values that it has checked. No stored sum equals "not arrived", so no bit
              pattern needs a separate marker. 1 releases and 3 acquires what Replay needs.
Progress      1 and 2 wait for nobody. 3 and 4 wait for other ranks, and for programs of 2 of their own launch, which
              have lower numbers and so have started before. At most as many programs wait as fit on half of the GPU
              (triton_ep/ops/tuning.py), so the reduce of another layer fits next to them.
Replay        A rank reduces for epoch n after its combine n - 1 has ended. For that, every rank had published its
              number n - 1, each after its own combine n - 2, the last reader of the half that is now written. A
              rank without tokens waits as well. Only sums are reset, each by the program that has read it.
Two launches  If sending and receiving are separate, the same kernel is launched twice: `first_waiting` is the number of
              programs of the first launch, and 0 in the second.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device import codes
from ..device.buffers import (
    EPOCH_LL_COMBINE,
    LL_COMBINE,
    LL_COMBINE_FLAG,
    STATUS,
    TIMEOUT_US,
    buffer_ptrs,
    own_buffer,
)
from ..device.calls import CALLS_LL_COMBINE, Combine, combine_tag, report_calls
from ..device.job import Job, in_one_node, is_rank, state_at
from ..device.low_latency import end_turn, first_of_half, owners, quotient, rank_bits, turn_of
from ..device.payload import Choices, RowTile
from ..device.spin import now_ns, pause
from ..device.waits import WAIT_LL_PARTIALS, release_flags, report_expiry, wait_values
from ..spec import ep_kernel

_TOLD = tl.constexpr(codes.LL_COUNT_SHIFT)
_POLLS_AWAKE = tl.constexpr(8)  # polls that `pause` counts as one, so that a program sleeps later
_LOOKS = tl.constexpr(16)  # polls between two checks of the clock and the status record


class Outputs(NamedTuple):
    """Outputs of this rank's experts.

    Attributes:
        y_ptr: [R, H].
        weights_ptr: [R] float32; read if HAS_WEIGHTS.
        copy_rows_ptr: [W * M, K] int32, from the expand kernel: rows of the assignments first, then -1.
        HAS_WEIGHTS: multiply each row by its weight.
    """

    y_ptr: Any
    weights_ptr: Any
    copy_rows_ptr: Any
    HAS_WEIGHTS: tl.constexpr


class SumTile(NamedTuple):
    """Block that a waiting program sums at once.

    Attributes:
        PARTS: parts of a row, each a separate work item.
        BLOCK_S: elements of a part, at least one word per thread, so that no two threads check the same word.
        PACKED: check words of two elements, which takes half the registers.
    """

    PARTS: tl.constexpr
    BLOCK_S: tl.constexpr
    PACKED: tl.constexpr


class Results(NamedTuple):
    """Sums of this rank's tokens.

    Attributes:
        out_ptr: [T, H].
        kept_idx_ptr: [T, K] int32, from the push kernel.
        num_tokens: T.
    """

    out_ptr: Any
    kept_idx_ptr: Any
    num_tokens: Any


@triton.jit
def _add_copy(acc, outputs, copy, column, in_row, hidden):
    """Add columns `column` of rows `copy` [ROWS] of y, times their weights, to `acc`; negative = no row."""
    rows = outputs.y_ptr + copy.to(tl.int64)[:, None] * hidden + column
    value = tl.load(rows, mask=(copy >= 0)[:, None] & in_row, other=0.0).to(tl.float32)
    if outputs.HAS_WEIGHTS:
        value *= tl.load(outputs.weights_ptr + copy, mask=copy >= 0, other=0.0)[:, None]
    return acc + value


@triton.jit
def _sum_copies(outputs, copies, column, in_row, hidden, TOPK: tl.constexpr):
    """Float32 sum [ROWS, BLOCK_H] of the rows `copies` of y, a tuple of [ROWS] row numbers; negative = no row."""
    acc = tl.zeros([copies[0].shape[0], column.shape[1]], tl.float32)
    for first in tl.static_range(0, TOPK, 2):  # two loads in flight at a time; few rows have more assignments
        if (first == 0) or (tl.max((copies[first] != -1).to(tl.int32)) > 0):
            acc = _add_copy(acc, outputs, copies[first], column, in_row, hidden)
            if first + 1 < TOPK:
                acc = _add_copy(acc, outputs, copies[first + 1], column, in_row, hidden)
    return acc


@triton.jit
def _tell(job, epoch, tag, healthy, WP: tl.constexpr):
    """Publish to every rank that this rank is in combine `epoch`, with this tag."""
    peers = tl.arange(0, WP)
    told = is_rank(job, peers) & healthy
    flag_ptrs = buffer_ptrs(job, LL_COMBINE_FLAG, peers, told, tl.int64) + first_of_half(job, epoch) + job.rank
    release_flags(flag_ptrs, told, tl.zeros([WP], tl.int64) + (epoch << _TOLD | tag))


@triton.jit
def _reduce(job, epoch, outputs, hidden, TOPK: tl.constexpr, tile):
    """Sum one tile of the outputs of some staging rows, and store it at the ranks of their tokens."""
    # After a failure store nothing; an early return instead would make every load wait for this one.
    healthy = tl.load(state_at(job, STATUS)) == 0
    piece = tl.program_id(0) % tile.TILES
    num_items = job.num_ranks * job.max_tokens
    item = tl.program_id(0) // tile.TILES + tl.arange(0, tile.ROWS) * tl.cdiv(num_items, tile.ROWS)
    alive = item < num_items
    # Neighbouring items go to different ranks, and each rank begins with a different one.
    token = quotient(item, job.num_ranks)
    source = job.rank + item - token * job.num_ranks
    source = tl.where(is_rank(job, source), source, source - job.num_ranks)
    copy_ptrs = outputs.copy_rows_ptr + (source * job.max_tokens + token) * TOPK
    # Load all row numbers at once; one after the other they would be a chain of loads.
    copies = ()
    for k in tl.static_range(TOPK):
        copies += (tl.load(copy_ptrs + k, mask=alive, other=-1),)
    came = tl.load(copy_ptrs, mask=alive, other=-1) != -1
    column = (piece * tile.BLOCK_H + tl.arange(0, tile.BLOCK_H))[None, :]
    in_row = column < hidden
    ELEMENT: tl.constexpr = outputs.y_ptr.dtype.element_ty
    BITS: tl.constexpr = tl.int32 if ELEMENT.primitive_bitwidth == 32 else tl.int16
    SIGN: tl.constexpr = -(1 << (ELEMENT.primitive_bitwidth - 1))
    dest = buffer_ptrs(job, LL_COMBINE, source, came, BITS)
    dest += ((first_of_half(job, epoch) + job.rank) * job.max_tokens + token).to(tl.int64) * hidden
    acc = _sum_copies(outputs, copies, column, in_row, hidden, TOPK)
    sign = tl.full(acc.shape, SIGN, BITS)
    bits = acc.to(ELEMENT).to(BITS, bitcast=True) ^ sign
    bits = tl.where(bits == 0, sign, bits)
    tl.store(dest[:, None] + column, bits, mask=(came & healthy)[:, None] & in_row)


@triton.jit
def _meet(job, epoch, tag, WP: tl.constexpr):
    """Wait until every rank has reached combine number `epoch`; report ranks whose tag differs."""
    peers = tl.arange(0, WP)
    in_group = is_rank(job, peers)
    first = first_of_half(job, epoch)
    flag_ptrs = own_buffer(job, LL_COMBINE_FLAG, tl.int64) + first + peers
    arrived, seen = wait_values(job, flag_ptrs, in_group, epoch << _TOLD, WAIT_LL_PARTIALS, first)
    if arrived:
        tags = seen.to(tl.int32)
        # The host raises, so sums of rows of different calls are not used.
        if tl.max((in_group & (tags != tag.to(tl.int32))).to(tl.int32)) > 0:
            report_calls(job, peers, tags, in_group, CALLS_LL_COMBINE)


@triton.jit
def _elements(words, ELEMENT: tl.constexpr, PACKED: tl.constexpr):
    """Elements of words as float32: even and odd elements if PACKED, else all elements twice."""
    if PACKED:
        even, odd = (words & 0xFFFF).to(tl.int16), (words >> 16).to(tl.int16)
        return even.to(ELEMENT, bitcast=True).to(tl.float32), odd.to(ELEMENT, bitcast=True).to(tl.float32)
    else:
        every = words.to(ELEMENT, bitcast=True).to(tl.float32)
        return every, every


@triton.jit
def _missing(words, PACKED: tl.constexpr):
    """Mask of the words with an element that has not arrived."""
    if PACKED:
        return ((words & 0xFFFF) == 0) | ((words >> 16) == 0)
    else:
        return words == 0


@triton.jit
def _report_missing(job, epoch, sums_ptrs, stride, mask, goes_to, WP: tl.constexpr, PACKED: tl.constexpr):
    """Write the status record for sums that did not arrive; arguments as in `_await_sums`."""
    peers = tl.arange(0, WP)
    offs = tl.arange(0, mask.shape[1])[None, :]
    late = peers < 0
    for peer in tl.static_range(WP):
        here = mask & (((goes_to >> peer) & 1) > 0)
        words = tl.load(sums_ptrs + peer * stride + offs, mask=here, other=-1, volatile=True)
        missing = tl.max(tl.max(_missing(words, PACKED).to(tl.int32), axis=1), axis=0)
        late |= (peers == peer) & (missing > 0)
    first = first_of_half(job, epoch)
    expected = epoch << _TOLD
    told = tl.load(own_buffer(job, LL_COMBINE_FLAG, tl.int64) + first + peers, mask=late, other=0)
    # A rank that has published its number, but whose sums are missing, counts as one call behind.
    told = tl.where(late, tl.minimum(told, expected - 1), expected)
    report_expiry(job, told, expected, first, WAIT_LL_PARTIALS)


@triton.jit
def _await_sums(
    job, epoch, sums_ptrs, stride, mask, goes_to, ELEMENT: tl.constexpr, WP: tl.constexpr, PACKED: tl.constexpr
):
    """Float32 sums, in the form of `_elements`, over the ranks in the bits `goes_to`, and whether all came in time.

    sums_ptrs: [ROWS, 1], first words of rank 0; `stride` words from one rank to the next. mask: mask of words.
    """
    # -0 in every element.
    NOTHING: tl.constexpr = -0x7FFF8000 if PACKED else -(1 << (ELEMENT.primitive_bitwidth - 1))
    limit = tl.load(state_at(job, TIMEOUT_US)) * 1000
    start = now_ns()
    offs = tl.arange(0, mask.shape[1])[None, :]
    polls = 0
    late = 1
    even, odd = tl.zeros(mask.shape, tl.float32), tl.zeros(mask.shape, tl.float32)
    while late == 1:
        even, odd = tl.zeros(mask.shape, tl.float32), tl.zeros(mask.shape, tl.float32)
        missing = even != 0
        tiles = ()
        for peer in tl.static_range(WP):  # start all loads before the first is checked
            here = mask & (((goes_to >> peer) & 1) > 0)
            tiles += (tl.load(sums_ptrs + peer * stride + offs, mask=here, other=NOTHING, volatile=True),)
        for peer in tl.static_range(WP):
            missing |= _missing(tiles[peer], PACKED)
            first, second = _elements(tiles[peer], ELEMENT, PACKED)
            even -= first
            odd -= second
        # Threads may see different values here, so the decision goes through the one reduction.
        given_up = 0
        if polls % _LOOKS == _LOOKS - 1:
            failed = tl.load(state_at(job, STATUS), volatile=True) != 0
            given_up = (failed | (now_ns() - start >= limit)).to(tl.int32)
        late = tl.max(tl.max(tl.where(missing, 1 + given_up, 0), axis=1), axis=0)
        if late == 1:
            pause(polls // _POLLS_AWAKE)
        polls += 1
    if late > 1:
        _report_missing(job, epoch, sums_ptrs, stride, mask, goes_to, WP, PACKED)
    return even, odd, late == 0


@triton.jit
def _sum(job, epoch, number, step, results, hidden, ROWS: tl.constexpr, choices, WP: tl.constexpr, sum_tile):
    """Sum items `number`, `number + step`, ...; an item is a tile of tokens and a part of their rows."""
    ELEMENT: tl.constexpr = results.out_ptr.dtype.element_ty
    IN_WORD: tl.constexpr = 2 if sum_tile.PACKED else 1
    WORD: tl.constexpr = tl.int16 if IN_WORD == 1 and ELEMENT.primitive_bitwidth == 16 else tl.int32
    row_words = hidden // IN_WORD
    sums_ptr = own_buffer(job, LL_COMBINE, WORD) + (first_of_half(job, epoch) * job.max_tokens).to(tl.int64) * row_words
    stride = job.max_tokens.to(tl.int64) * row_words
    ks = tl.arange(0, choices.KP)[None, :]
    for item in range(number, tl.cdiv(results.num_tokens, ROWS) * sum_tile.PARTS, step):
        token = item // sum_tile.PARTS * ROWS + tl.arange(0, ROWS)
        alive = token < results.num_tokens
        ids = tl.load(
            results.kept_idx_ptr + token[:, None] * choices.TOPK + ks,
            mask=alive[:, None] & (ks < choices.TOPK),
            other=-1,
        )
        goes_to = rank_bits(owners(ids, job.experts_per_rank), 1)[:, None]
        part = item % sum_tile.PARTS
        words = tl.arange(0, sum_tile.BLOCK_S // IN_WORD)[None, :]
        mask = alive[:, None] & (part * (sum_tile.BLOCK_S // IN_WORD) + words < row_words)
        row = token.to(tl.int64)[:, None]
        ptrs = sums_ptr + row * row_words + part * (sum_tile.BLOCK_S // IN_WORD)
        even, odd, came = _await_sums(job, epoch, ptrs, stride, mask, goes_to, ELEMENT, WP, sum_tile.PACKED)
        if came:
            sums = even
            if sum_tile.PACKED:
                sums = tl.reshape(tl.join(even, odd), [ROWS, sum_tile.BLOCK_S])
            h = part * sum_tile.BLOCK_S
            offs = tl.arange(0, sum_tile.BLOCK_S)[None, :]
            inside = alive[:, None] & (h + offs < hidden)
            tl.store(results.out_ptr + row * hidden + h + offs, sums.to(ELEMENT), mask=inside)
            for peer in tl.static_range(WP):
                here = mask & (((goes_to >> peer) & 1) > 0)
                tl.store(ptrs + peer * stride + words, tl.zeros(mask.shape, WORD), mask=here)


@ep_kernel(
    y_ptr="*{TOKEN}",
    weights_ptr="*fp32",
    copy_rows_ptr="*i32",
    out_ptr="*{TOKEN}",
    kept_idx_ptr="*i32",
    specialised=("hidden",),
    maxnreg=128,
)
def low_latency_combine_kernel(
    outputs: Outputs,
    results: Results,
    combine: Combine,
    job: Job,
    hidden,
    first_waiting,  # number of programs of this launch that reduce; they come first
    choices: Choices,
    WP: tl.constexpr,
    tile: RowTile,
    sum_tile: SumTile,
):
    job = in_one_node(job)
    turn_ptr = state_at(job, EPOCH_LL_COMBINE)
    epoch = turn_of(turn_ptr)
    number = tl.program_id(0) - first_waiting
    if number < 0:
        if tl.program_id(0) == 0:
            healthy = tl.load(state_at(job, STATUS)) == 0
            _tell(job, epoch, combine_tag(job, combine), healthy, WP)
        _reduce(job, epoch, outputs, hidden, choices.TOPK, tile)
    else:
        if number == 0:
            _meet(job, epoch, combine_tag(job, combine), WP)
        else:
            step = tl.num_programs(0) - first_waiting - 1
            _sum(job, epoch, number - 1, step, results, hidden, tile.ROWS, choices, WP, sum_tile)
    others = tl.cdiv(job.num_ranks * job.max_tokens, tile.ROWS) * tile.TILES + tl.num_programs(0) - first_waiting - 1
    end_turn(turn_ptr, number == 0, others)
