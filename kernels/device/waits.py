"""Flags between ranks: the only places where device code waits, and where it releases.

A flag is an int64 in symmetric memory that only grows: its value is the epoch (number of the call) that
its writer has reached (arrival flags: see device/arrivals.py), so nothing is ever cleared and a captured graph
may replay. Every wait is bounded: on expiry one program writes a status record and all later waits of this
rank return at once; the host raises from the record (triton_ep/context/status.py).

The status record (STATUS_*, codes.py) is four words of the state array from STATUS on. The alarm word in host memory
then says that the record exists. The operation codes are `WAIT_*` below; triton_ep/context/status.py names them.

The flags of a combine carry the tag of the call in the bits below their count (device/calls.py).
"""

import triton
import triton.language as tl

from . import codes
from .buffers import ALARM, PROGRAMS_DONE, STATUS, STATUS_EXPECTED, STATUS_INDEX, STATUS_SEEN, TIMEOUT_US
from .job import state_at
from .spin import LOOKS, acquire_loads, acquire_pairs, now_ns, pause

WAIT_SPLITS = tl.constexpr(codes.WAIT_SPLITS)
WAIT_ARRIVALS = tl.constexpr(codes.WAIT_ARRIVALS)
WAIT_NETWORK_ROWS = tl.constexpr(codes.WAIT_NETWORK_ROWS)
WAIT_COMBINE_FREE = tl.constexpr(codes.WAIT_COMBINE_FREE)
WAIT_COMBINE_ENTERED = tl.constexpr(codes.WAIT_COMBINE_ENTERED)
WAIT_COMBINE_STAGED = tl.constexpr(codes.WAIT_COMBINE_STAGED)
WAIT_NETWORK_PARTIALS = tl.constexpr(codes.WAIT_NETWORK_PARTIALS)
WAIT_BARRIER = tl.constexpr(codes.WAIT_BARRIER)
WAIT_NODE_BARRIER = tl.constexpr(codes.WAIT_NODE_BARRIER)
WAIT_LL_ROWS = tl.constexpr(codes.WAIT_LL_ROWS)
WAIT_LL_PARTIALS = tl.constexpr(codes.WAIT_LL_PARTIALS)
WAIT_SIGNALS = tl.constexpr(codes.WAIT_SIGNALS)

TAG_BITS = tl.constexpr(codes.TAG_BITS)
TAGS = tl.constexpr(2**codes.TAG_BITS - 1)


@triton.jit
def wait_flags(job, flag_ptrs, mask, expected, OPERATION: tl.constexpr, first_index=0):
    """Wait until every masked flag is at least `expected` [scalar int64]; returns False if the wait expired.

    Flags may wrap: a flag less than 2**63 ahead counts as reached. Flags of low-latency calls hold the call's number in
    the upper half of a word, which overflows after some hours of decoding.
    flag_ptrs: block of pointers to this rank's own flags. In the status record, flag i of the block is flag
    `first_index` + i of its buffer; first_index: a number, or one for each i. Pairs with `release_flags` on the
    writer's side.
    """
    arrived, _ = wait_values(job, flag_ptrs, mask, expected, OPERATION, first_index)
    return arrived


@triton.jit
def wait_values(job, flag_ptrs, mask, expected, OPERATION: tl.constexpr, first_index=0, PAIRS: tl.constexpr = False):
    """Like `wait_flags`, but also returns the acquired values of the flags; `expected` where masked off.

    PAIRS: each pointer, a multiple of 16 bytes, is to two flags, of which the lower counts. They must not wrap.
    """
    deadline = deadline_of(job)
    polls = 0
    # After a first failure the rank's data are no longer valid: another wait would only add another time-out.
    failed = (tl.load(state_at(job, STATUS), volatile=True) != 0).to(tl.int32)
    seen = read_flags(job, flag_ptrs, mask, expected, PAIRS)
    late = tl.max(tl.where(seen - expected < 0, 1 + failed, 0))
    while late == 1:
        pause(polls)
        polls += 1
        given_up = has_given_up(job, polls, deadline)
        seen = read_flags(job, flag_ptrs, mask, expected, PAIRS)
        late = tl.max(tl.where(seen - expected < 0, 1 + given_up, 0))
    if (late > 1) & (failed == 0):
        report_expiry(job, seen, expected, first_index, OPERATION)
    # The acquire pairs with the release of the flag's writer; the barrier extends the order to the other threads.
    tl.debug_barrier()
    return (late == 0) & (failed == 0), seen


@triton.jit
def deadline_of(job):
    """When a wait that begins now expires, in nanoseconds of `now_ns`."""
    return now_ns() + tl.load(state_at(job, TIMEOUT_US)) * 1000


@triton.jit
def has_given_up(job, polls, deadline):
    """1 if a wait has expired, or the rank has failed, else 0. Looks only once in LOOKS polls. Threads may find
    different values, so the caller decides by what one reduction makes of them."""
    given_up = 0
    if polls % LOOKS == 0:
        failed = tl.load(state_at(job, STATUS), volatile=True) != 0
        given_up = (failed | (now_ns() >= deadline)).to(tl.int32)
    return given_up


@triton.jit
def wait_tagged(job, flag_ptrs, mask, expected, before, tag, OPERATION: tl.constexpr, first_index=0):
    """Wait until all masked flags count at least `expected`, or one that counts more than `before` has another tag.

    A tagged flag is (count << TAG_BITS | tag). Flags of this call count more than `before`; their writers reach the
    next call only after this rank has finished this one.
    Returns whether all flags came in time with this tag, whether a tag differs, and the flags.
    """
    deadline = deadline_of(job)
    polls = 0
    failed = (tl.load(state_at(job, STATUS), volatile=True) != 0).to(tl.int32)
    wanted = expected << TAG_BITS
    seen = read_flags(job, flag_ptrs, mask, wanted)
    verdict = _verdict(seen, mask, wanted, before, tag, failed)
    while verdict == 1:
        pause(polls)
        polls += 1
        given_up = has_given_up(job, polls, deadline)
        seen = read_flags(job, flag_ptrs, mask, wanted)
        verdict = _verdict(seen, mask, wanted, before, tag, given_up)
    if (verdict == 2) & (failed == 0):
        report_expiry(job, seen, wanted, first_index, OPERATION)
    # As in `wait_values`.
    tl.debug_barrier()
    return (verdict == 0) & (failed == 0), verdict == 3, seen


@triton.jit
def _verdict(seen, mask, wanted, before, tag, given_up):
    """0: all flags came; 1: one is late; 2: one is, and has been given up; 3: one is of another call. A single
    reduction, because every poll pays it."""
    other = mask & ((seen >> TAG_BITS) > before) & ((seen & TAGS) != tag)
    return tl.max(tl.where(other, 3, tl.where(seen < wanted, 1 + given_up, 0)))


@triton.jit
def read_flags(job, flag_ptrs, mask, expected, PAIRS: tl.constexpr = False):
    """Acquire the current flags of this rank; `expected` where masked off. PAIRS: as in `wait_values`.

    Uses loads, because atomics of many waiting programs queue up; for signals of 32 bits atomics, because only one
    program waits for them.
    """
    if flag_ptrs.dtype.element_ty == tl.int32:
        return tl.where(mask, tl.atomic_add(flag_ptrs, 0, mask=mask, sem="acquire", scope="sys").to(tl.int64), expected)
    # The load takes no mask: masked-off lanes read a word of `state` instead, and ignore it.
    addresses = tl.where(mask, flag_ptrs.to(tl.int64), job.state_ptr.to(tl.int64))
    if PAIRS:
        seen = acquire_pairs(addresses)
    else:
        seen = acquire_loads(addresses)
    return tl.where(mask, seen, expected)


@triton.jit
def report_expiry(job, seen, expected, first_index, OPERATION: tl.constexpr):
    """Write the status record, unless another program of this rank was first."""
    index = tl.arange(0, seen.numel)
    first = tl.min(tl.where(seen - expected < 0, index, seen.numel))
    value = tl.max(tl.where(index == first, seen, 0))
    if take_record(job, OPERATION):
        place = tl.max(tl.where(index == first, first_index + index, 0))
        tl.store(state_at(job, STATUS) + STATUS_INDEX, tl.cast(place, tl.int64))
        tl.store(state_at(job, STATUS) + STATUS_EXPECTED, expected)
        tl.store(state_at(job, STATUS) + STATUS_SEEN, value)
        raise_alarm(job, OPERATION)


@triton.jit
def take_record(job, OPERATION: tl.constexpr):
    """True in the first program of this rank that reports a failure; from then on all waits return at once."""
    return tl.atomic_cas(state_at(job, STATUS), tl.cast(0, tl.int64), tl.cast(OPERATION, tl.int64)) == 0


@triton.jit
def raise_alarm(job, OPERATION: tl.constexpr):
    """Set the alarm word in host memory: the record exists."""
    alarm_ptr = tl.load(state_at(job, ALARM)).to(tl.pointer_type(tl.int64))
    tl.store(alarm_ptr, tl.cast(OPERATION, tl.int64))


@triton.jit
def release_flags(flag_ptrs, mask, value):
    """Set flags [block of pointers, own or peers'] to `value`, after all earlier stores of this program.

    One thread of the block sets each flag, so the barrier must come first: only then does the
    system-scope release cover the stores of all warps. Pairs with the acquire in `wait_flags`.
    """
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptrs, value, mask=mask, sem="release", scope="sys")


@triton.jit
def wait_programs(job, counter_ptr, expected, OPERATION: tl.constexpr):
    """Wait until `expected` lower programs of this grid have added themselves to a counter; False if the wait expired.

    These programs wait for nobody, so they arrive even after a failure, and a failure does not end this wait. Their
    adds are releases. The record of an expiry names this rank.
    """
    deadline = deadline_of(job)
    polls = 0
    one = tl.arange(0, 1)
    wanted = tl.cast(expected, tl.int64)
    seen = read_flags(job, counter_ptr + one, one == 0, wanted)
    late = tl.max(tl.where(seen < wanted, 1, 0))
    while late == 1:
        pause(polls)
        polls += 1
        given_up = 0
        if polls % LOOKS == 0:
            given_up = (now_ns() >= deadline).to(tl.int32)
        seen = read_flags(job, counter_ptr + one, one == 0, wanted)
        late = tl.max(tl.where(seen < wanted, 1 + given_up, 0))
    if late > 1:
        report_expiry(job, seen, wanted, job.rank, OPERATION)
    # The acquire pairs with the releases of the programs; the barrier extends the order to the other threads.
    tl.debug_barrier()
    return late == 0


@triton.jit
def last_to_arrive(job, num_programs):
    """True in the last of `num_programs` programs of a grid to arrive; it then sees the earlier stores of the others.

    The last program resets the count for the next kernel on the stream.
    """
    tl.debug_barrier()
    before = tl.atomic_add(state_at(job, PROGRAMS_DONE), 1, sem="acq_rel", scope="gpu")
    last = before == num_programs - 1
    if last:
        tl.store(state_at(job, PROGRAMS_DONE), 0)
    tl.debug_barrier()
    return last
