"""What a host reads of an exact dispatch, and whether rows wait until it has.

Such a dispatch needs numbers on the host, which sizes the output by them, raises what ranks report of each other's
arguments, and lets buffers grow. The program that knows them (internode/splits.py) writes them to memory of the host,
which polls it: nothing is copied, and the host asks the driver for nothing. Kernels that send are launched before, and
go on at once where the host will find nothing to do. Otherwise the dispatch is *held*: they return without having
written anything, here or elsewhere; the host raises, or lets buffers grow and launches them again.

Every rank decides by the same reports and has the same room, so all of them hold a dispatch, or none.

Told words    int64, a word of `placement` each, from its beginning up to `overflow` (tables.py); one more says whether
              this rank has a status record (waits.py). The upper half of each is the number of the read. Read 7 of a
              rank with 2 reports of 3 output rows tells 0x7_00000003 first.
Order         None is needed: a word is one store of eight bytes, and whoever finds the number of this read in all words
              has all of them, on hosts that reorder loads, too.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import codes
from .buffers import STATUS
from .job import is_rank, state_at
from .tables import (
    REPORT_ARRIVALS,
    REPORT_BAD_ENTRY,
    REPORT_HOST_WORD,
    REPORT_ROWS,
    held_of,
    overflow_of,
    report_ptrs,
)

_READS = tl.constexpr(codes.HOST_READS)
_REFUSED = tl.constexpr(codes.HOST_REJECTED | codes.HOST_SCATTER)
_WORD = tl.constexpr(2**32 - 1)


class HostRead(NamedTuple):
    """What the host wants to know, and has room for.

    Attributes:
        told_ptr: told words, in memory of the host.
        read_number: of this read, from 1; 0 = the host reads nothing.
        arrival_room: arrival rows for which there is room at every rank.
        output_room: the same of output rows.
    """

    told_ptr: Any
    read_number: Any
    arrival_room: Any
    output_room: Any


@triton.jit
def must_hold(job, placement_ptr, read, WP: tl.constexpr):
    """Whether hosts that read will raise, or let buffers grow: what `raise_for_ranks` (triton_ep/exchange/checks.py)
    and `grow` (triton_ep/context/context.py) make of the same reports."""
    rank = tl.arange(0, WP)
    mask = is_rank(job, rank)
    words = tl.load(report_ptrs(placement_ptr, rank, REPORT_HOST_WORD), mask=mask, other=0)
    bad = tl.load(report_ptrs(placement_ptr, rank, REPORT_BAD_ENTRY), mask=mask, other=0)
    arrivals = tl.load(report_ptrs(placement_ptr, rank, REPORT_ARRIVALS), mask=mask, other=0)
    rows = tl.load(report_ptrs(placement_ptr, rank, REPORT_ROWS), mask=mask, other=0)
    own = tl.sum(tl.where(rank == job.rank, words, 0))
    unlike = tl.sum((mask & ((words != own) | (bad != 0))).to(tl.int32)) > 0
    too_many = (tl.max(arrivals) > read.arrival_room) | (tl.max(rows) > read.output_room)
    return (own & _READS != 0) & (unlike | (own & _REFUSED != 0) | too_many)


@triton.jit
def tell_host(job, placement_ptr, read, BLOCK: tl.constexpr):
    """Write the told words. All of `placement` up to there has been stored, and the block has met a barrier since."""
    if read.read_number != 0:
        number = tl.cast(read.read_number, tl.int64) << 32
        count = overflow_of(job, tl.zeros([], tl.int32))
        for start in range(0, count, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            words = tl.load(placement_ptr + offs, mask=offs < count, other=0)
            # Written through: the host waits for nothing else.
            told = number | (words.to(tl.int64) & _WORD)
            tl.store(read.told_ptr + offs, told, mask=offs < count, cache_modifier=".wt")
        failed = tl.load(state_at(job, STATUS), volatile=True) != 0
        tl.store(read.told_ptr + count, number | failed.to(tl.int64), cache_modifier=".wt")


@triton.jit
def is_held(job, placement_ptr):
    """Whether a kernel that sends rows has nothing to do, because the dispatch is held."""
    return tl.load(held_of(job, placement_ptr)) != 0
