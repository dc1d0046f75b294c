"""Low-latency combine of few tokens inside a node, in one launch: sums announce themselves, and so do weights.

Protocol      Program 0 tells; if weights are given per token, the next programs are messengers. The last one meets. The
              others are workers; each takes a share of 3, then of 5.
              1 tell: publish the number and the tag of this combine to every rank, in ll_combine_flag
              2 messengers: store each weight of this rank's tokens, next to the number of this combine, at the rank
              that owns the expert. A token's weights for one rank lie there one after the other, in k order
              3 reduce: for each staging row of the dispatch, sum the outputs of its assignments in float32, in k order,
              each times its weight, once the weights of 2 have come; round once, and store the sum at the token's rank:
              negated, and never as +0
              4 meet: wait until every rank has told the same number, and compare the tags (device/calls.py). In the
              interpreter, which runs programs one after the other, the only worker meets, before it sums
              5 sum: wait until no element of a token's sums is +0 any more, subtract the sums in float32, in the order
              of the ranks that the token went to, round, and reset the elements to +0
Layout        ll_combine [2, W, M, H]: by parity of the epoch, experts' rank, token. +0, which fresh memory holds, means
              "not arrived"; a sum of +0 or -0 travels as -0.
              ll_combine_flag [2, W] int64: (epoch << 32 | tag) of each rank, by parity of the epoch.
              ll_weights [2, W * M, K] int64: (epoch << 32 | bits of a float32), by parity of the epoch, source rank,
              token.
              EPOCH_LL_COMBINE is a turn (device/low_latency.py), which the programs of both launches end.
              W ranks, M max_tokens.
Memory order  None between 2 and 3 or 3 and 5: each word shows by itself that it has arrived, in whatever order words
              come, and a thread uses the very values that it has checked. No stored sum equals "not arrived", and no
              older word has the number, so no bit pattern needs a separate marker. 1 releases and 4 acquires what
              Replay needs.
Progress      1 and 2 wait for nobody, 3 and 4 for other ranks, 5 for other ranks and for 3 of all workers of this rank.
              So all ranks get on if all workers run at the same time. They are at most as many as fit on half
              of the GPU (triton_ep/ops/tuning.py), so those of another layer fit next to them. Launched early
              (device/early.py), all programs first wait for the end of the kernel ahead. Each lets the next kernel
              start when it has no more sums to wait for, so those that wait for their turn keep no place from others.
Replay        A rank stores for epoch n after its combine n - 1 has ended. For that, every rank had told its number
              n - 1, each after its own combine n - 2, the last reader of the halves that are now written. A rank
              without tokens waits as well. Only sums are reset, each by the worker that has read it.
Two launches  If sending and receiving are separate, the same kernel is launched twice: first with 1 to 3, then with 4
              and 5.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device import codes
from ..device.buffers import (
    EPOCH_LL_COMBINE,
    LL_COMBINE,
    LL_COMBINE_FLAG,
    LL_WEIGHTS,
    STATUS,
    buffer_ptrs,
    own_buffer,
    table_ptrs,
)
from ..device.calls import CALLS_LL_COMBINE, Combine, combine_tag, report_calls
from ..device.early import await_previous, let_next_start
from ..device.job import Job, in_one_node, is_rank, state_at
from ..device.low_latency import (
    POLLS_AWAKE,
    await_words,
    end_turn,
    first_of_half,
    lacking,
    load_words,
    owners,
    quotient,
    rank_after,
    rank_bits,
    turn_of,
)
from ..device.payload import Choices, RowTile
from ..device.spin import pause
from ..device.tables import REPORT_TOKENS, report_ptrs
from ..device.waits import (
    WAIT_LL_PARTIALS,
    deadline_of,
    has_given_up,
    release_flags,
    report_expiry,
    wait_values,
)
from ..spec import ep_kernel

_CALL_SHIFT = tl.constexpr(codes.LL_CALL_SHIFT)
_SENDS = tl.constexpr(codes.LL_SENDS)
_RECEIVES = tl.constexpr(codes.LL_RECEIVES)
_ROW_WEIGHTS = tl.constexpr(codes.LL_ROW_WEIGHTS)
_TOKEN_WEIGHTS = tl.constexpr(codes.LL_TOKEN_WEIGHTS)
_BITS = tl.constexpr(0xFFFFFFFF)


class Outputs(NamedTuple):
    """Outputs of this rank's experts.

    Attributes:
        y_ptr: [R, H].
        weights_ptr: [R] float32 with LL_ROW_WEIGHTS, [T, K] with LL_TOKEN_WEIGHTS, else not read.
        copy_rows_ptr: [W * M, K] int32, from the dispatch: rows of the assignments first, then -1.
        WEIGHTS: LL_*_WEIGHTS (device/codes.py); with weights, each row is multiplied by its own.
    """

    y_ptr: Any
    weights_ptr: Any
    copy_rows_ptr: Any
    WEIGHTS: tl.constexpr


class Launch(NamedTuple):
    """Programs of a launch: those that tell and push weights come first.

    Attributes:
        first_waiting: their number.
        halves: LL_SENDS | LL_RECEIVES (device/codes.py): what the workers do.
        others: programs of the call, in both launches, but one.
        SHARE: tokens of which a messenger sends the weights.
    """

    first_waiting: Any
    halves: Any
    others: Any
    SHARE: tl.constexpr


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
        kept_idx_ptr: [T, K] int32, from the dispatch, -1 = dropped.
        num_tokens: T.
    """

    out_ptr: Any
    kept_idx_ptr: Any
    num_tokens: Any


@triton.jit
def _push_weights(job, epoch, share, outputs, results, choices, SHARE: tl.constexpr):
    """Store the weights of tokens share * SHARE to (share + 1) * SHARE - 1 at the ranks that own the experts."""
    healthy = tl.load(state_at(job, STATUS)) == 0
    ks = tl.arange(0, choices.KP)
    token = share * SHARE + tl.arange(0, SHARE)
    mine = (token < results.num_tokens)[:, None] & (ks < choices.TOPK)[None, :]
    entry = token[:, None] * choices.TOPK + ks[None, :]
    weights = tl.load(outputs.weights_ptr + entry, mask=mine, other=0.0)
    owner = owners(job, tl.load(results.kept_idx_ptr + entry, mask=mine, other=-1))
    same = (owner[:, :, None] == owner[:, None, :]) & (ks[None, :] < ks[:, None])[None, :, :]
    position = tl.sum(same.to(tl.int32), axis=2)  # how many weights of the token precede it at that rank
    sent = (owner >= 0) & healthy
    dest = tl.load(table_ptrs(job, LL_WEIGHTS, owner), mask=sent, other=0).to(tl.pointer_type(tl.int64))
    dest += ((first_of_half(job, epoch) + job.rank) * job.max_tokens + token)[:, None] * choices.TOPK + position
    bits = weights.to(tl.int32, bitcast=True).to(tl.int64) & _BITS
    tl.store(dest, epoch << _CALL_SHIFT | bits, mask=sent)


@triton.jit
def _await_weights(job, epoch, arrival, source, copy_ptrs, alive, choices, WP: tl.constexpr):
    """Bits of the float32 weights of staging rows `arrival` [ROWS], [ROWS, KP] int32, and whether all came in time.

    source: [ROWS] ranks that they come from. copy_ptrs: [ROWS], first assignment of each row.
    """
    ks = tl.arange(0, choices.KP)[None, :]
    inside = alive[:, None] & (ks < choices.TOPK)
    words_ptr = own_buffer(job, LL_WEIGHTS, tl.int64)
    offs = (first_of_half(job, epoch) * job.max_tokens + arrival)[:, None] * choices.TOPK + ks
    # In flight while the row numbers are.
    words = load_words(words_ptr, offs, inside)
    wanted = tl.load(copy_ptrs[:, None] + ks, mask=inside, other=-1) != -1
    words, in_time = await_words(job, words_ptr, offs, wanted, words, epoch)
    if in_time == 0:
        peers = tl.arange(0, WP)[None, :]
        lacks = tl.max(lacking(words, wanted, epoch).to(tl.int32), axis=1)[:, None] > 0
        of_peer = lacks & (source[:, None] == peers)
        _report_late(job, epoch, tl.max(of_peer.to(tl.int32), axis=0) > 0, WP)
    return words.to(tl.int32), in_time


@triton.jit
def _copies_of(copy_ptrs, alive, healthy, TOPK: tl.constexpr):
    """Row numbers of the assignments of staging rows, a tuple of [ROWS]; copy_ptrs: [ROWS], first assignment.

    None after a failure: a dispatch that failed has written no numbers.
    """
    # Load all at once; one after the other they would be a chain of loads.
    loaded = ()
    for k in tl.static_range(TOPK):
        loaded += (tl.load(copy_ptrs + k, mask=alive, other=-1),)
    copies = ()
    for k in tl.static_range(TOPK):
        copies += (tl.where(healthy, loaded[k], -1),)
    return copies


@triton.jit
def _load_copy(outputs, copy, column, in_row, hidden):
    """Columns `column` of rows `copy` [ROWS] of y; negative = no row."""
    rows = outputs.y_ptr + copy.to(tl.int64)[:, None] * hidden + column
    return tl.load(rows, mask=(copy >= 0)[:, None] & in_row, other=0.0)


@triton.jit
def _weighted(value, outputs, copy, bits, k, WEIGHTS: tl.constexpr):
    """Float32 rows `value` of assignment `k`, times their weights; bits: [ROWS, KP] of `_await_weights`."""
    value = value.to(tl.float32)
    if WEIGHTS == _ROW_WEIGHTS:
        value *= tl.load(outputs.weights_ptr + copy, mask=copy >= 0, other=0.0)[:, None]
    elif WEIGHTS == _TOKEN_WEIGHTS:
        # The word of an assignment that a row does not have is left from an earlier call.
        here = (tl.arange(0, bits.shape[1])[None, :] == k) & (copy >= 0)[:, None]
        weight = tl.sum(tl.where(here, bits, 0), axis=1)
        if copy.shape[0] == 1:
            # A scalar: else the rows would be held as `bits` are, in many more registers.
            value *= tl.sum(weight).to(tl.float32, bitcast=True)
        else:
            value *= weight.to(tl.float32, bitcast=True)[:, None]
    return value


@triton.jit
def _tell(job, epoch, tag, WP: tl.constexpr):
    """Publish to every rank that this rank is in combine `epoch`, with this tag."""
    healthy = tl.load(state_at(job, STATUS)) == 0
    peers = tl.arange(0, WP)
    told = is_rank(job, peers) & healthy
    flag_ptrs = buffer_ptrs(job, LL_COMBINE_FLAG, peers, told, tl.int64) + first_of_half(job, epoch) + job.rank
    release_flags(flag_ptrs, told, tl.zeros([WP], tl.int64) + (epoch << _CALL_SHIFT | tag))


@triton.jit
def _reduce_item(job, epoch, healthy, item, piece, outputs, hidden, choices, WP: tl.constexpr, tile):
    """Sum tile `piece` of the outputs of staging rows `item` [ROWS], and store it at the ranks of their tokens."""
    alive = item < job.num_ranks * job.max_tokens
    # Neighbouring items go to different ranks, and each rank begins with a different one.
    token = quotient(item, job.num_ranks)
    source = rank_after(job, job.rank + item - token * job.num_ranks)
    arrival = tl.where(alive, source * job.max_tokens + token, 0)
    ELEMENT: tl.constexpr = outputs.y_ptr.dtype.element_ty
    BITS: tl.constexpr = tl.int32 if ELEMENT.primitive_bitwidth == 32 else tl.int16
    # Also of rows without assignments: the addresses then do not wait for these.
    dest = buffer_ptrs(job, LL_COMBINE, source, alive, BITS)
    copy_ptrs = outputs.copy_rows_ptr + arrival * choices.TOPK
    copies = _copies_of(copy_ptrs, alive, healthy, choices.TOPK)
    came = tl.load(copy_ptrs, mask=alive, other=-1) != -1
    column = (piece * tile.BLOCK_H + tl.arange(0, tile.BLOCK_H))[None, :]
    in_row = column < hidden
    # Two loads in flight at a time, the first two while weights are awaited. Few rows have more assignments.
    value = _load_copy(outputs, copies[0], column, in_row, hidden)
    second = value
    if choices.TOPK > 1:
        second = _load_copy(outputs, copies[1], column, in_row, hidden)
    bits = copies[0][:, None]
    if outputs.WEIGHTS == _TOKEN_WEIGHTS:
        bits, in_time = _await_weights(job, epoch, arrival, source, copy_ptrs, alive, choices, WP)
        came &= in_time
    acc = tl.zeros([tile.ROWS, tile.BLOCK_H], tl.float32)
    acc += _weighted(value, outputs, copies[0], bits, 0, outputs.WEIGHTS)
    if choices.TOPK > 1:
        acc += _weighted(second, outputs, copies[1], bits, 1, outputs.WEIGHTS)
    for k in tl.static_range(2, choices.TOPK, 2):
        if tl.max((copies[k] != -1).to(tl.int32)) > 0:
            value = _load_copy(outputs, copies[k], column, in_row, hidden)
            acc += _weighted(value, outputs, copies[k], bits, k, outputs.WEIGHTS)
            if k + 1 < choices.TOPK:
                second = _load_copy(outputs, copies[k + 1], column, in_row, hidden)
                acc += _weighted(second, outputs, copies[k + 1], bits, k + 1, outputs.WEIGHTS)
    SIGN: tl.constexpr = -(1 << (ELEMENT.primitive_bitwidth - 1))
    dest += ((first_of_half(job, epoch) + job.rank) * job.max_tokens + token).to(tl.int64) * hidden
    sign = tl.full(acc.shape, SIGN, BITS)
    bits = acc.to(ELEMENT).to(BITS, bitcast=True) ^ sign
    bits = tl.where(bits == 0, sign, bits)
    tl.store(dest[:, None] + column, bits, mask=(came & healthy)[:, None] & in_row)


@triton.jit
def _reduce(job, epoch, placement_ptr, worker, workers, outputs, hidden, choices, WP: tl.constexpr, tile):
    """Sum the outputs of staging rows, items `worker`, `worker + workers`, ...; an item is ROWS rows and a tile."""
    # After a failure store nothing; an early return instead would make every load wait for this one.
    healthy = tl.load(state_at(job, STATUS)) == 0
    ranks = tl.arange(0, WP)
    tokens = tl.load(report_ptrs(placement_ptr, ranks, REPORT_TOKENS), mask=is_rank(job, ranks), other=0)
    # At most max_tokens even after a dispatch that failed, and wrote no report.
    groups = tl.cdiv(job.num_ranks * tl.minimum(tl.max(tokens), job.max_tokens), tile.ROWS)
    # The first item does not wait for the numbers of tokens: rows that no token has filled have no assignments.
    number = worker
    more = worker < tl.cdiv(job.num_ranks * job.max_tokens, tile.ROWS) * tile.TILES
    while more:
        # The rows of a group lie far apart, so that groups are alike if there are few tokens.
        item = number // tile.TILES + tl.arange(0, tile.ROWS) * groups
        _reduce_item(job, epoch, healthy, item, number % tile.TILES, outputs, hidden, choices, WP, tile)
        number += workers
        more = number < groups * tile.TILES


@triton.jit
def _meet(job, epoch, tag, WP: tl.constexpr):
    """Wait until every rank has reached combine number `epoch`; report ranks whose tag differs."""
    peers = tl.arange(0, WP)
    in_group = is_rank(job, peers)
    first = first_of_half(job, epoch)
    flag_ptrs = own_buffer(job, LL_COMBINE_FLAG, tl.int64) + first + peers
    arrived, seen = wait_values(job, flag_ptrs, in_group, epoch << _CALL_SHIFT, WAIT_LL_PARTIALS, first)
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
def _report_late(job, epoch, late, WP: tl.constexpr):
    """Write the status record for words of the ranks in the mask `late` [WP] that did not arrive."""
    peers = tl.arange(0, WP)
    first = first_of_half(job, epoch)
    expected = epoch << _CALL_SHIFT
    told = tl.load(own_buffer(job, LL_COMBINE_FLAG, tl.int64) + first + peers, mask=late, other=0)
    # A rank that has published its number, but whose words are missing, counts as one call behind.
    told = tl.where(late, tl.minimum(told, expected - 1), expected)
    report_expiry(job, told, expected, first, WAIT_LL_PARTIALS)


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
    _report_late(job, epoch, late, WP)


@triton.jit
def _await_sums(
    job, epoch, sums_ptrs, stride, mask, goes_to, ELEMENT: tl.constexpr, WP: tl.constexpr, PACKED: tl.constexpr
):
    """Float32 sums, in the form of `_elements`, over the ranks in the bits `goes_to`, and whether all came in time.

    sums_ptrs: [ROWS, 1], first words of rank 0; `stride` words from one rank to the next. mask: mask of words.
    """
    # -0 in every element.
    NOTHING: tl.constexpr = -0x7FFF8000 if PACKED else -(1 << (ELEMENT.primitive_bitwidth - 1))
    deadline = deadline_of(job)
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
        given_up = has_given_up(job, polls + 1, deadline)
        late = tl.max(tl.max(tl.where(missing, 1 + given_up, 0), axis=1), axis=0)
        if late == 1:
            pause(polls // POLLS_AWAKE)
        polls += 1
    if late > 1:
        _report_missing(job, epoch, sums_ptrs, stride, mask, goes_to, WP, PACKED)
    return even, odd, late == 0


@triton.jit
def _sum(job, epoch, worker, workers, results, hidden, ROWS: tl.constexpr, choices, WP: tl.constexpr, sum_tile):
    """Sum items `worker`, `worker + workers`, ...; an item is a tile of tokens and a part of their rows."""
    ELEMENT: tl.constexpr = results.out_ptr.dtype.element_ty
    IN_WORD: tl.constexpr = 2 if sum_tile.PACKED else 1
    WORD: tl.constexpr = tl.int16 if IN_WORD == 1 and ELEMENT.primitive_bitwidth == 16 else tl.int32
    row_words = hidden // IN_WORD
    sums_ptr = own_buffer(job, LL_COMBINE, WORD) + (first_of_half(job, epoch) * job.max_tokens).to(tl.int64) * row_words
    stride = job.max_tokens.to(tl.int64) * row_words
    ks = tl.arange(0, choices.KP)[None, :]
    items = tl.cdiv(results.num_tokens, ROWS) * sum_tile.PARTS
    for item in range(worker, items, workers):
        token = item // sum_tile.PARTS * ROWS + tl.arange(0, ROWS)
        alive = token < results.num_tokens
        ids = tl.load(
            results.kept_idx_ptr + token[:, None] * choices.TOPK + ks,
            mask=alive[:, None] & (ks < choices.TOPK),
            other=-1,
        )
        goes_to = rank_bits(owners(job, ids), 1)[:, None]
        part = item % sum_tile.PARTS
        words = tl.arange(0, sum_tile.BLOCK_S // IN_WORD)[None, :]
        mask = alive[:, None] & (part * (sum_tile.BLOCK_S // IN_WORD) + words < row_words)
        row = token.to(tl.int64)[:, None]
        ptrs = sums_ptr + row * row_words + part * (sum_tile.BLOCK_S // IN_WORD)
        even, odd, came = _await_sums(job, epoch, ptrs, stride, mask, goes_to, ELEMENT, WP, sum_tile.PACKED)
        if item + workers >= items:  # this program waits for no rank any more
            let_next_start()
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
    launch: Launch,
    choices: Choices,
    WP: tl.constexpr,
    tile: RowTile,
    sum_tile: SumTile,
):
    await_previous()
    job = in_one_node(job)
    turn_ptr = state_at(job, EPOCH_LL_COMBINE)
    epoch = turn_of(turn_ptr)
    sends, receives = (launch.halves & _SENDS) > 0, (launch.halves & _RECEIVES) > 0
    number = tl.program_id(0)
    worker, last = number - launch.first_waiting, tl.num_programs(0) - launch.first_waiting - 1
    # The last one only meets, unless it is the only one.
    workers = tl.maximum(last, 1)
    works = worker < workers
    if number < launch.first_waiting:
        if number == 0:
            _tell(job, epoch, combine_tag(job, combine), WP)
        elif outputs.WEIGHTS == _TOKEN_WEIGHTS:
            _push_weights(job, epoch, number - 1, outputs, results, choices, launch.SHARE)
    else:
        if sends & works:
            _reduce(job, epoch, combine.placement_ptr, worker, workers, outputs, hidden, choices, WP, tile)
        if receives & (worker == last):
            _meet(job, epoch, combine_tag(job, combine), WP)
        if receives & works:
            _sum(job, epoch, worker, workers, results, hidden, tile.ROWS, choices, WP, sum_tile)
    end_turn(turn_ptr, receives & (worker == last), launch.others)
