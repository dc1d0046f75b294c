"""Arrivals: publish to the ranks of this node how far a dispatch has pushed its rows, and wait for rows.

Shared by the intra-node and the inter-node kernels. Staging buffers of a rank: `stage_x` [capacity, row] holds one
staging row per (token, rank); `stage_meta` [W * max_tokens, 2 * KP] int32 holds, for each staging row, the output rows
of its assignments (-1 = none), then their weights as float32 bits. KP is top-k rounded up to a power of two.

A rank pushes its tokens in up to STEPS steps. After each step, each of its programs raises its arrival flags on every
rank of the node, so a receiver can work on the first rows while the last are in flight. The rank forwards the tokens
of its counterpart on each other node in the same way. The high 32 bits of the flag count steps since the layer was
created, STEPS per call. The low 32 bits say how far the steps reach in the receiver's staging rows of that source: the
number of rows (own tokens), or the row past the last one (other nodes' tokens). In the second dispatch, after step 3
of 8 and 40 rows, the flag is (8 + 3) << 32 | 40; after the last step it is (8 + 8) << 32 | ALL_ROWS.

If copy engines send the rows (`ENGINES`), they send all rows of a rank as they are: `stage_x` holds the row of token t
of rank r as number r * max_tokens + t, and `stage_source` [W * max_tokens] int32 says for each staging row which
number that is. There is one step and one pair of flags, which this rank raises for itself before the copies start, and
copy engines send to the others after the rows.

Many programs may send rows, and each that waits for them would read all their flags. So flags are watched in groups:
at a time a program reads one group of a rank, and `arrived` [N, LW, groups], one word for each group: the least flag of
the group that any program of this rank has seen. A program that sees more raises the word for all others. With each
look programs go on to the next group, so all groups are watched, however few programs wait. Example: with 3 groups the
looks of program 7 are at groups 1, 2, 0, 1, ...
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .buffers import (
    ARRIVE_FLAG,
    ARRIVED,
    EPOCH_DISPATCH,
    STAGE_META,
    STAGE_SOURCE,
    STAGE_X,
    STATUS,
    buffer_ptrs,
    own_buffer,
    table_ptrs,
)
from .groups import pick
from .job import first_local, is_local, local_of, local_rank, my_node, num_nodes, rank_of, state_at
from .spin import pause
from .tables import REPORT_ARRIVALS_HERE, STEPS, first_arrivals_of, report_ptrs
from .waits import (
    WAIT_ARRIVALS,
    deadline_of,
    has_given_up,
    read_flags,
    release_flags,
    report_expiry,
    wait_values,
)

ALL_ROWS = tl.constexpr(2**31 - 1)
_FEW_RANKS = tl.constexpr(4)
"""Most ranks of a node for which each thread holds where their rows begin and end."""
_NO_TILES = tl.constexpr(2**30)
"""More tiles than there are, so that a loop that begins there has no iteration; programs can be added to it."""


@triton.constexpr_function
def _more(a, b):
    """The larger number."""
    return max(a, b)


class Sources(NamedTuple):
    """Ranks of one node, as sources of the rows that this rank receives.

    Attributes:
        node: number of the node.
        starts: [SOURCES] first staging row of each rank.
        counts: [SOURCES] number of staging rows of each rank.
    """

    node: Any
    starts: Any
    counts: Any


class OwnRows(NamedTuple):
    """Rows that this rank sends to itself.

    Attributes:
        x_ptr: the rows in wire form, as the caller gave them or as they were packed.
        tokens_ptr: int64, the token of each of them, in the order of their staging rows (compute/routing.py).
        in_place: 1: they are neither pushed nor staged, but read from x_ptr. 0: they are staged like all others.
    """

    x_ptr: Any
    tokens_ptr: Any
    in_place: Any


class ArrivedRows(NamedTuple):
    """Staging rows of some ranks of a node that arrived between two waits, in tiles of rows: item i is tile
    i // ranks of the rank that comes i % ranks after the first, if that tile arrived.

    Attributes:
        first, end: range of items; `end` is excluded.
        first_rank, ranks: these ranks, by their numbers within the node, modulo the ranks per node.
        starts: first staging row of each rank of the node, as `_each` holds them.
        befores, ends: staging rows of each rank before the first that arrived, and past the last one, likewise.
    """

    first: Any
    end: Any
    first_rank: Any
    ranks: Any
    starts: Any
    befores: Any
    ends: Any


class Senders(NamedTuple):
    """Arrival flags [N, LW, SENDERS], as the programs that send rows see them.

    Attributes:
        num_flags: flags in use, an even number, the same on all ranks and at least the programs; with fewer programs
            some raise several.
        LWP: ranks of a node, rounded up to a power of two.
        SENDERS: most flags of a rank, a power of two, at least 2.
    """

    num_flags: Any
    LWP: tl.constexpr
    SENDERS: tl.constexpr


class Arrivals(NamedTuple):
    """Arrival flags, as the kernels that wait for rows see them.

    At least twice as many flags as threads are read at a time, so one thread reads each pair of them. Two threads might
    read different values of a flag that changes, and their warps would disagree on which rows have been copied.

    Attributes:
        num_senders: flags of each rank that its push raises, an even number.
        num_forwarders: flags of each rank that it raises for rows of other nodes, likewise.
        SOURCES: a power of two, at least LW.
        SENDERS: a power of two, at least both numbers.
        WATCHED: flags of a group, a power of two, at most SENDERS; 0: all SOURCES * SENDERS flags are read at a time.
        LWP: ranks of a node, rounded up to a power of two.
        ENGINES: copy engines send the rows; `stage_source` says where each staging row lies.
    """

    num_senders: Any
    num_forwarders: Any
    SOURCES: tl.constexpr
    SENDERS: tl.constexpr
    WATCHED: tl.constexpr
    LWP: tl.constexpr
    ENGINES: tl.constexpr


@triton.jit
def meta_addresses(job, owner, here):
    """Addresses of stage_meta at the owners of entries, for `push_meta`; 0 unless `here`."""
    return tl.load(table_ptrs(job, STAGE_META, owner), mask=here, other=0)


@triton.jit
def push_meta(
    addrs,  # [KP, n] from `meta_addresses`
    weights,  # [KP, n] float32; not read unless HAS_WEIGHTS
    owner,  # [KP, n] ranks, -1 = dropped
    dst_row,  # [KP, n] output rows, -1 = dropped
    arrival,  # [KP, n] staging rows
    here,  # [KP, n] true at a token's first entry for each rank of this node
    HAS_WEIGHTS: tl.constexpr,
    KP: tl.constexpr,
):
    """For each entry where `here`, store stage_meta at its owner: the output rows of the token there, their weights."""
    mine = owner[:, None, :] == owner[None, :, :]  # [place, entry, n]
    at = (arrival.to(tl.int64) * (2 * KP))[None, :, :] + tl.arange(0, KP)[:, None, None]
    to_all = tl.broadcast_to(here[None, :, :], mine.shape)
    dest = tl.multiple_of(addrs.to(tl.pointer_type(tl.int32)), [16, 16])
    tl.store(dest[None, :, :] + at, tl.where(mine, dst_row[:, None, :], -1), mask=to_all)
    if HAS_WEIGHTS:
        dest = tl.multiple_of(addrs.to(tl.pointer_type(tl.float32)), [16, 16])
        tl.store(dest[None, :, :] + at + KP, tl.where(mine, weights[:, None, :], 0.0), mask=to_all)


class Flags(NamedTuple):
    """What a kernel that waits for rows watches.

    Attributes:
        flags_ptr: arrive_flag of this rank.
        words_ptr: arrived of this rank.
    """

    flags_ptr: Any
    words_ptr: Any


@triton.jit
def own_flags(job):
    """The flags of this rank, and the words of their groups."""
    return Flags(own_buffer(job, ARRIVE_FLAG, tl.int64), own_buffer(job, ARRIVED, tl.int64))


@triton.jit
def release_arrivals(
    job,
    step,  # 1 to STEPS; STEPS is the last
    rows,  # [LWP] how far the steps so far reach at each rank of the node; ALL_ROWS with the last step
    node,  # node of the tokens
    senders,
):
    """Raise arrive_flag[node, my local rank, f] on every rank of my node, for this program's flags f."""
    local = tl.arange(0, senders.LWP)
    peers = first_local(job) + local
    mask = is_local(job, local)
    flag_ptrs = buffer_ptrs(job, ARRIVE_FLAG, peers, mask, tl.int64)
    flag_ptrs += (rank_of(job, node, local_rank(job))) * senders.SENDERS
    done = arrival_steps(job) + step
    value = (done << 32) | rows.to(tl.int64)
    release_flags(flag_ptrs + tl.program_id(0), mask, value)
    # Who waits acquires the first flag, too, so a release of the others would order nothing more.
    for flag in range(tl.program_id(0) + tl.num_programs(0), senders.num_flags, tl.num_programs(0)):
        tl.atomic_xchg(flag_ptrs + flag, value, mask=mask, sem="relaxed", scope="sys")


@triton.jit
def raise_for_copies(job, SENDERS: tl.constexpr):
    """Raise the own two flags for all rows: copy engines send them to the other ranks after the rows."""
    flags_ptr = own_buffer(job, ARRIVE_FLAG, tl.int64) + rank_of(job, my_node(job), local_rank(job)) * SENDERS
    raised = (arrival_steps(job) + STEPS) << 32 | ALL_ROWS
    tl.store(flags_ptr + tl.arange(0, 2), tl.zeros([2], tl.int64) + raised)


@triton.jit
def sources_of(job, placement_ptr, index, SOURCES: tl.constexpr):
    """Staging rows of one node's tokens. Index 0 is the own node; the others follow in the order in which they send."""
    nodes = num_nodes(job)
    node = (my_node(job) - index + nodes) % nodes
    source = tl.arange(0, SOURCES)
    first_ptrs = first_arrivals_of(job, placement_ptr) + rank_of(job, node, source)
    starts = tl.load(first_ptrs, mask=is_local(job, source), other=0)
    count_ptrs = report_ptrs(placement_ptr, rank_of(job, node, source), REPORT_ARRIVALS_HERE)
    counts = tl.load(count_ptrs, mask=is_local(job, source), other=0)
    return Sources(node, starts, counts)


@triton.jit
def bytes_of_rows(job, own):
    """Pointer to the bytes of row 0: of `own`, in wire form, or with None of the staging rows."""
    if own is None:
        return own_buffer(job, STAGE_X, tl.uint8)
    else:
        return tl.multiple_of(own.x_ptr, 16).to(tl.pointer_type(tl.uint8))


@triton.jit
def stage_sources(job):
    """Pointer to stage_source, for `rows_from_there`; loaded before a loop, and not at all unless ENGINES."""
    return own_buffer(job, STAGE_SOURCE, tl.int32)


@triton.jit
def push_sources(
    job,
    owner,  # [KP, n] ranks
    arrival,  # [KP, n] staging rows
    token,  # [1, n] tokens of this rank
    here,  # [KP, n] true at a token's first entry for each rank of this node
):
    """For each entry where `here`, store stage_source at its owner: where copy engines put the row of the token."""
    addrs = tl.load(table_ptrs(job, STAGE_SOURCE, owner), mask=here, other=0)
    dest = tl.multiple_of(addrs.to(tl.pointer_type(tl.int32)), [16, 16])
    tl.store(dest + arrival, tl.broadcast_to(job.rank * job.max_tokens + token, arrival.shape), mask=here)


@triton.jit
def rows_from_there(arrivals, own, stage_source_ptr, row, item, here):
    """Numbers [ROWS] of rows, as `bytes_of_rows` counts them. stage_source_ptr: from `stage_sources`. row: staging rows
    of an item; here: rows wanted."""
    if own is None:
        return _staged_at(arrivals, stage_source_ptr, row, here)
    else:
        ROWS: tl.constexpr = row.shape[0]
        return tl.load(own.tokens_ptr + item * ROWS + tl.arange(0, ROWS), mask=here, other=0)


@triton.jit
def row_from_there(arrivals, own, stage_source_ptr, row, item, here):
    """`rows_from_there` of an item of one row."""
    if own is None:
        return _staged_at(arrivals, stage_source_ptr, row, here)
    else:
        return tl.load(own.tokens_ptr + item, mask=here, other=0)


@triton.jit
def _staged_at(arrivals, stage_source_ptr, row, here):
    """Where staging rows lie in stage_x."""
    if arrivals.ENGINES:
        return tl.load(stage_source_ptr + row, mask=here, other=0)
    else:
        return row


@triton.jit
def own_rows(job, placement_ptr, ROWS: tl.constexpr, LWP: tl.constexpr):
    """All rows of this rank, as the only `ArrivedRows`."""
    start = tl.load(first_arrivals_of(job, placement_ptr) + job.rank)
    count = tl.load(report_ptrs(placement_ptr, job.rank, REPORT_ARRIVALS_HERE))
    starts = _each(tl.full([LWP], 0, tl.int32) + start, LWP)
    ends = _each(tl.full([LWP], 0, tl.int32) + start + count, LWP)
    return ArrivedRows(tl.zeros([], tl.int32), tl.cdiv(count, ROWS), local_rank(job), 1, starts, starts, ends)


@triton.jit
def arrived_rows(job, sources, done, ready, own_done, ROWS: tl.constexpr, LWP: tl.constexpr):
    """The `ArrivedRows` of a node. done, ready: [SOURCES] tiles of each rank's rows that arrived before, and by now;
    own_done: those of this rank are left out, because they have been laid out (`own_rows`)."""
    source = tl.arange(0, done.shape[0])
    taken = is_local(job, source) & ((source != local_rank(job)) | (own_done == 0))
    ranks = tl.maximum(job.ranks_per_node - own_done, 1)
    end = tl.max(tl.where(taken, ready, 0))
    # No minimum of this and `end`: Triton 3.7 would then move rows 8 bytes at a time.
    first = tl.min(tl.where(taken, done, _NO_TILES)) * ranks
    befores = sources.starts + done * ROWS
    ends = sources.starts + tl.minimum(ready * ROWS, sources.counts)
    each = _each(sources.starts, LWP), _each(befores, LWP), _each(ends, LWP)
    return ArrivedRows(first, end * ranks, local_rank(job) + own_done, ranks, each[0], each[1], each[2])


@triton.jit
def described_rows(job, sources, index, done, ready, own_done, ROWS: tl.constexpr, LWP: tl.constexpr):
    """The `ArrivedRows` whose stage_meta has come, if that of none came before (`is_described`). index: as of
    `sources_of`; the others as of `arrived_rows`.

    This node's ranks store it before they push any row, so it has all come with the first step; a forwarded row brings
    its own.
    """
    ready = tl.where(index > 0, ready, tl.cdiv(sources.counts, ROWS))
    return arrived_rows(job, sources, done, ready, own_done, ROWS, LWP)


@triton.jit
def is_described(index, steps):
    """Whether the next step brings stage_meta, after `steps` steps. index: as of `sources_of`."""
    return (index > 0) | (steps == 0)


@triton.jit
def place_of(job, arrived, item, ROWS: tl.constexpr, LWP: tl.constexpr):
    """First staging row of an item, or of a block [n] of items, and the end of the rows that arrived; 0 if these had
    arrived before."""
    rank = (arrived.first_rank + item % arrived.ranks) % job.ranks_per_node
    row = _one(arrived.starts, rank, LWP) + item // arrived.ranks * ROWS
    return row, tl.where(row >= _one(arrived.befores, rank, LWP), _one(arrived.ends, rank, LWP), 0)


@triton.jit
def _each(values, LWP: tl.constexpr):
    """The elements of a vector, for `_one`: few as scalars, which each thread has; many would spill registers."""
    if LWP > _FEW_RANKS:
        return values
    else:
        each = ()
        for i in tl.static_range(LWP):
            each += (pick(values, i),)
        return each


@triton.jit
def _one(each, i, LWP: tl.constexpr):
    """Element i, or a block [n] of them."""
    if LWP > _FEW_RANKS:
        at = tl.arange(0, each.shape[0])
        if len(i.shape) == 0:
            return tl.sum(tl.where(at == i, each, 0))
        else:
            return tl.sum(tl.where(at[None, :] == i[:, None], each[None, :], 0), axis=1)
    else:
        one = each[0]
        for other in tl.static_range(1, LWP):
            one = tl.where(i == other, each[other], one)
        return one


@triton.jit
def _wait_all(job, flags, sources, before, steps, arrivals):
    """Wait for the next step, reading all flags at a time. Returns whether it came, and each rank's least flag
    [SOURCES]. before: steps of earlier calls."""
    SENDERS: tl.constexpr = arrivals.SENDERS
    pair = tl.arange(0, arrivals.SOURCES * SENDERS // 2)
    flag = 2 * pair
    programs = tl.where(sources.node == my_node(job), arrivals.num_senders, arrivals.num_forwarders)
    used = is_local(job, flag // SENDERS) & (flag % SENDERS < programs)
    first_flag = sources.node * job.ranks_per_node * SENDERS
    expected = (before + steps + 1) << 32
    flag_ptrs = flags.flags_ptr + first_flag + flag
    arrived, seen = wait_values(job, flag_ptrs, used, expected, WAIT_ARRIVALS, first_flag + pair, PAIRS=True)
    # A source is as far as its slowest program; unused flags count as finished.
    seen = tl.where(used, seen, _finished(before))
    return arrived, tl.min(tl.reshape(seen, [arrivals.SOURCES, SENDERS // 2]), axis=1)


@triton.jit
def _finished(before):
    """Flag of a program after the last step."""
    return (before + STEPS) << 32 | ALL_ROWS


@triton.jit
def _look(job, flags, sources, before, look, arrivals):
    """Read the flags of group `look`, modulo the groups in use, and raise its word. Returns the words of all groups
    [n], n at least the threads; those that are not in use count as finished."""
    WATCHED: tl.constexpr = arrivals.WATCHED
    PER_RANK: tl.constexpr = arrivals.SENDERS // WATCHED
    words = flags.words_ptr + rank_of(job, sources.node, 0) * PER_RANK
    programs = tl.where(sources.node == my_node(job), arrivals.num_senders, arrivals.num_forwarders)
    in_use = tl.cdiv(programs, WATCHED)
    source, part = local_of(job, look // in_use), look % in_use
    mine = source * PER_RANK + part
    flag = part * WATCHED + 2 * tl.arange(0, WATCHED // 2)
    flag_ptrs = flags.flags_ptr + rank_of(job, sources.node, source) * arrivals.SENDERS + flag
    least = tl.min(read_flags(job, flag_ptrs, flag < programs, _finished(before), PAIRS=True))
    group = tl.arange(0, _more(WATCHED // 2, arrivals.SOURCES * PER_RANK))
    used = is_local(job, group // PER_RANK) & (group % PER_RANK < in_use)
    seen = read_flags(job, words + group, used, _finished(before))
    if least > tl.min(tl.where(group == mine, seen, _finished(before))):
        # Others acquire the word, and with it what all threads here have acquired.
        tl.debug_barrier()
        tl.atomic_max(words + mine, least, sem="release", scope="gpu")
    return tl.where(group == mine, tl.maximum(seen, least), seen)


@triton.jit
def _wait_groups(job, flags, sources, before, steps, arrivals):
    """As `_wait_all`, but flags are watched in groups."""
    PER_RANK: tl.constexpr = arrivals.SENDERS // arrivals.WATCHED
    deadline = deadline_of(job)
    polls = 0
    failed = (tl.load(state_at(job, STATUS), volatile=True) != 0).to(tl.int32)
    expected = (before + steps + 1) << 32
    seen = _look(job, flags, sources, before, tl.program_id(0), arrivals)
    late = tl.max(tl.where(seen < expected, 1 + failed, 0))
    while late == 1:
        pause(polls)
        polls += 1
        given_up = has_given_up(job, polls, deadline)
        seen = _look(job, flags, sources, before, tl.program_id(0) + polls, arrivals)
        late = tl.max(tl.where(seen < expected, 1 + given_up, 0))
    group = tl.arange(0, seen.shape[0])
    if (late > 1) & (failed == 0):
        flag = rank_of(job, sources.node, group // PER_RANK) * arrivals.SENDERS + group % PER_RANK * arrivals.WATCHED
        report_expiry(job, seen, expected, flag - group, WAIT_ARRIVALS)
    tl.debug_barrier()
    of_source = tl.arange(0, arrivals.SOURCES)[:, None] == (group // PER_RANK)[None, :]
    return (late == 0) & (failed == 0), tl.min(tl.where(of_source, seen[None, :], _finished(before)), axis=1)


@triton.jit
def wait_arrivals(
    job,
    flags,  # Flags
    sources,
    steps,  # steps seen so far, int64
    done,  # [SOURCES] tiles of each rank's rows seen so far
    arrivals,
    ROWS: tl.constexpr,
):
    """Wait for the next step of a node's tokens. Returns whether it came, tiles [SOURCES] and steps seen by now."""
    before = arrival_steps(job)
    if arrivals.WATCHED > 0:
        arrived, of_source = _wait_groups(job, flags, sources, before, steps, arrivals)
    else:
        arrived, of_source = _wait_all(job, flags, sources, before, steps, arrivals)
    ready = (of_source & ALL_ROWS).to(tl.int32) - tl.where(sources.node == my_node(job), 0, sources.starts)
    ready = tl.where(ready < sources.counts, ready // ROWS, tl.cdiv(sources.counts, ROWS))
    # A forwarder that sent us nothing reports no progress, so keep the maximum (internode/dispatch.py).
    return arrived, tl.maximum(ready, done), (tl.min(of_source) >> 32) - before


@triton.jit
def arrival_steps(job):
    """Steps of all calls before this one, int64."""
    return (tl.load(state_at(job, EPOCH_DISPATCH)) - 1) * STEPS
