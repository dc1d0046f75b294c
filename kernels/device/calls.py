"""Detect ranks in different calls: tags that ranks compare during the exchange, and the report if they differ.

All ranks of a layer must make the same calls in the same order. Otherwise a rank reads rows of another call, or writes
to memory sized for another call. So every call carries a tag of what must agree on all ranks:

dispatch   The tag is the host word of the splits row, or of the low-latency rows: kind, weights, scales, and, if rows
           follow the routing of an earlier dispatch, the number of that dispatch. Ranks compare it before they write
           anything at other ranks; only low-latency rows are sent earlier, each to a place of its own. Ranks that
           rejected their arguments are left out. If the hosts of all ranks read the words before rows are sent,
           nothing is recorded: the hosts raise by themselves.
combine    The tag is the number of the dispatch whose rows come back, weights and kind. It sits in the low bits of the
           flags that ranks wait for anyway (device/waits.py). Every rank waits for the flags of all ranks of its node.
           Between nodes, the flags of partial sums carry the tag; if the ranks of a node disagree, these flags carry
           MIXED_TAG, so that the ranks of all nodes learn of it.

The device counts dispatches and keeps the number in `placement` (device/tables.py). The number is the same on all
ranks, whether a rank launched the dispatch itself or replays a graph.

If tags differ, the rank writes the status record (operation CALLS_*) and, past the state array, the tags that it
knows. From then on it neither waits nor stores anything at other ranks; the host raises CallMismatch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import codes
from .buffers import STATE_WORDS
from .job import state_at
from .tables import number_of
from .waits import raise_alarm, take_record

CALLS_DISPATCH = tl.constexpr(codes.CALLS_DISPATCH)
CALLS_COMBINE = tl.constexpr(codes.CALLS_COMBINE)
CALLS_LL_DISPATCH = tl.constexpr(codes.CALLS_LL_DISPATCH)
CALLS_LL_COMBINE = tl.constexpr(codes.CALLS_LL_COMBINE)
MIXED_TAG = tl.constexpr(codes.MIXED_TAG)

_EPOCHS = tl.constexpr(2**codes.EPOCH_BITS - 1)
_AGAIN = tl.constexpr(codes.HOST_AGAIN)
_SHIFT = tl.constexpr(codes.HOST_SHIFT)
_REJECTED = tl.constexpr(codes.HOST_REJECTED)
_READS = tl.constexpr(codes.HOST_READS)
_COMPARED = tl.constexpr(
    (2**codes.EPOCH_BITS - 1) << codes.HOST_SHIFT
    | codes.HOST_WEIGHTS
    | codes.HOST_SCALED
    | codes.HOST_AGAIN
    | codes.HOST_COMPACT
    | codes.HOST_BACKWARD
    | codes.HOST_READS
)
_COMBINE_SHIFT = tl.constexpr(codes.COMBINE_SHIFT)
_NO_WORD = tl.constexpr(2**31 - 1)


@triton.jit
def store_epoch(job, placement_ptr, epoch):
    """Store the dispatch's number in `placement`; 0 for a single rank, whose outputs depend on its inputs alone."""
    number = (epoch & _EPOCHS).to(tl.int32)
    tl.store(number_of(job, placement_ptr), tl.where(job.num_ranks > 1, number, 0))


@triton.jit
def dispatch_word(job, host_word, routed_ptr):
    """Host word of a dispatch; with HOST_AGAIN, includes the number of the dispatch whose routing it reuses.

    routed_ptr: `placement` of that earlier dispatch.
    """
    again = host_word & _AGAIN > 0
    number = tl.load(number_of(job, routed_ptr), mask=again, other=0)
    return host_word | number << _SHIFT


@triton.jit
def words_differ(words, mask):
    """True if the host words [ranks] are of different calls and not all hosts read them before rows are sent."""
    compared = mask & (words & _REJECTED == 0)
    call = words & _COMPARED
    most, least = tl.max(tl.where(compared, call, -1)), tl.min(tl.where(compared, call, _NO_WORD))
    unread = tl.sum((compared & (words & _READS == 0)).to(tl.int32))
    return (least < most) & (unread > 0)


@triton.jit
def words_unlike(own, words):
    """Which host words [ranks] are of another call than this rank's; none if this rank rejected its arguments."""
    return (words & _REJECTED == 0) & (own & _REJECTED == 0) & ((words ^ own) & _COMPARED != 0)


class Combine(NamedTuple):
    """Identity of a combine, from which ranks build the tag that they compare.

    Attributes:
        placement_ptr: `placement` of the dispatch whose rows come back (tables.py).
        call: COMBINE_* bits (codes.py).
    """

    placement_ptr: Any
    call: Any


@triton.jit
def combine_tag(job, combine):
    """int64 tag of a combine."""
    number = tl.load(number_of(job, combine.placement_ptr))
    return (number << _COMBINE_SHIFT | combine.call).to(tl.int64)


@triton.jit
def report_calls(job, ranks, tags, known, OPERATION: tl.constexpr):
    """Write the status record of calls that differ, unless this rank already has a record.

    ranks, tags: blocks of the same shape; known: which of the tags are valid.
    """
    if take_record(job, OPERATION):
        tl.store(state_at(job, STATE_WORDS) + ranks, tags.to(tl.int64) + 1, mask=known)
        raise_alarm(job, OPERATION)
