"""What the host reads of an exact dispatch, and whether rows wait until the host has read it.

In an exact dispatch the host needs numbers from the device: it sizes the output by them, raises the errors that ranks
report about arguments, and grows buffers. The program that computes them (internode/splits.py) writes them to host
memory, which the host polls: no copy, no call of the driver. The kernels that send, forward and receive rows are
launched before that, the last with room for as many rows as lately. If the host will have nothing to do, they go on at
once. Otherwise the dispatch is *held*: they return without having written anything, here or elsewhere; the host raises,
or grows buffers and launches them again. Receiving kernels are also launched again if the room was too small.

Every rank decides from the same reports and has the same room, so all ranks hold a dispatch, or none does.

Words         `told_ptr`, int64: one per word of `placement`, from its beginning up to `overflow` (tables.py), and one
              more that says whether this rank has a status record (waits.py). The upper half of each is the number of
              the read. In read 7, a rank with 2 reports of 3 output rows publishes 0x7_00000003 first.
Order         None is needed: each word is one store of eight bytes. A host that finds the number of this read in all
              words has all of them, even if it reorders loads.
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
    REPORT_SUMS,
    held_of,
    overflow_of,
    report_ptrs,
)

_READS = tl.constexpr(codes.HOST_READS)
_REFUSED = tl.constexpr(codes.HOST_REJECTED | codes.HOST_SCATTER)
_WORD = tl.constexpr(2**32 - 1)


class HostRead(NamedTuple):
    """Where the host reads, and the rows for which it has room.

    Attributes:
        told_ptr: published words, in host memory.
        read_number: number of this read, from 1; 0 = the host reads nothing.
        arrival_room: staging rows for which every rank has room.
        output_room: output rows for which every rank has room.
        sum_room: rows of sums for which every rank has room.
    """

    told_ptr: Any
    read_number: Any
    arrival_room: Any
    output_room: Any
    sum_room: Any


@triton.jit
def must_hold(job, placement_ptr, read, WP: tl.constexpr):
    """Whether hosts that read will raise or grow buffers, as `raise_for_ranks` (triton_ep/exchange/checks.py) and
    `grow` (triton_ep/context/context.py) decide from the same reports."""
    rank = tl.arange(0, WP)
    mask = is_rank(job, rank)
    words = tl.load(report_ptrs(placement_ptr, rank, REPORT_HOST_WORD), mask=mask, other=0)
    bad = tl.load(report_ptrs(placement_ptr, rank, REPORT_BAD_ENTRY), mask=mask, other=0)
    arrivals = tl.load(report_ptrs(placement_ptr, rank, REPORT_ARRIVALS), mask=mask, other=0)
    rows = tl.load(report_ptrs(placement_ptr, rank, REPORT_ROWS), mask=mask, other=0)
    sums = tl.load(report_ptrs(placement_ptr, rank, REPORT_SUMS), mask=mask, other=0)
    own = tl.sum(tl.where(rank == job.rank, words, 0))
    too_many = (arrivals > read.arrival_room) | (rows > read.output_room) | (sums > read.sum_room)
    wrong = mask & ((words != own) | (bad != 0) | too_many)
    return (own & _READS != 0) & ((tl.sum(wrong.to(tl.int32)) > 0) | (own & _REFUSED != 0))


@triton.jit
def tell_host(job, placement_ptr, read, BLOCK: tl.constexpr):
    """Publish the words to the host. The block has stored `placement` up to `overflow` and passed a barrier since."""
    if read.read_number != 0:
        number = tl.cast(read.read_number, tl.int64) << 32
        count = overflow_of(job, tl.zeros([], tl.int32))
        for start in range(0, count, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            words = tl.load(placement_ptr + offs, mask=offs < count, other=0)
            # Write through: the host waits for exactly these words.
            told = number | (words.to(tl.int64) & _WORD)
            tl.store(read.told_ptr + offs, told, mask=offs < count, cache_modifier=".wt")
        failed = tl.load(state_at(job, STATUS), volatile=True) != 0
        tl.store(read.told_ptr + count, number | failed.to(tl.int64), cache_modifier=".wt")


@triton.jit
def is_held(job, placement_ptr):
    """Whether the dispatch is held; a kernel that sends, forwards or receives rows then does nothing."""
    return tl.load(held_of(job, placement_ptr)) != 0
