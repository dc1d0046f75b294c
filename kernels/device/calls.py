"""Which call each rank is in: tags that ranks compare within the exchange, and what they do where these differ.

All ranks of a layer make the same calls in the same order. A rank that does not would read rows of another call, or
write where another one has room. So every call carries a tag of what must be the same on all ranks:

dispatch   the host word of the splits row, or of the low-latency rows: kind, weights, scales; where rows go by the
           routing of an earlier dispatch, its number. Compared before anything is written at other ranks; low-latency
           rows fly first, each to a place of its own. Ranks that rejected their arguments are left out. Where the
           hosts of all ranks read the words before rows are sent, nothing is recorded: they raise by themselves.
combine    the number of the dispatch whose rows come back, weights, kind: in the low bits of the flags that ranks wait
           for anyway (device/waits.py). Every rank waits for those of all ranks of its node. Between nodes the flags of
           partial sums carry the tag; where the ranks of a node differ, they carry MIXED_TAG, so that the ranks of all
           nodes hear of it.

The number of a dispatch is that which the device counted, kept in `placement` (device/tables.py): it is the same on all
ranks, whether a rank made the dispatch itself or replays a graph.

Where tags differ, the rank writes the status record (operation CALLS_*) and, behind the state array, the tags that it
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
    """Note in `placement` of which dispatch it is; 0 of a single rank, whose outputs depend on its inputs alone."""
    number = (epoch & _EPOCHS).to(tl.int32)
    tl.store(number_of(job, placement_ptr), tl.where(job.num_ranks > 1, number, 0))


@triton.jit
def dispatch_word(job, host_word, routed_ptr):
    """The host word of a dispatch, with the number of the one by whose routing it goes, if there is one.

    routed_ptr: `placement` of that dispatch.
    """
    again = host_word & _AGAIN > 0
    number = tl.load(number_of(job, routed_ptr), mask=again, other=0)
    return host_word | number << _SHIFT


@triton.jit
def words_differ(words, mask):
    """True if ranks have sent host words [ranks] of different calls, and not all of their hosts will see it in time."""
    compared = mask & (words & _REJECTED == 0)
    call = words & _COMPARED
    most, least = tl.max(tl.where(compared, call, -1)), tl.min(tl.where(compared, call, _NO_WORD))
    unread = tl.sum((compared & (words & _READS == 0)).to(tl.int32))
    return (least < most) & (unread > 0)


@triton.jit
def words_unlike(own, words):
    """Which host words [ranks] are of another call than this rank's; none, where this one rejected its arguments."""
    return (words & _REJECTED == 0) & (own & _REJECTED == 0) & ((words ^ own) & _COMPARED != 0)


class Combine(NamedTuple):
    """Which combine it is; ranks compare it.

    Attributes:
        placement_ptr: of the dispatch whose rows come back (tables.py).
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
    """Write the status record, unless there is one: calls differ.

    ranks, tags: blocks of the same shape; known: where there is a tag.
    """
    if take_record(job, OPERATION):
        tl.store(state_at(job, STATE_WORDS) + ranks, tags.to(tl.int64) + 1, mask=known)
        raise_alarm(job, OPERATION)
