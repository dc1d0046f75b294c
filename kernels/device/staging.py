"""Staged rows of a combine: publish and wait for how many steps each rank of the node has staged, and in which combine.

A combine stages its rows in steps, STEPS per call. Each step has some rows of every source; with several nodes, the
first half of the steps has those of other nodes' tokens, the second half those of this node's. The flags count these
steps since the layer was created, with the tag of the combine in the low bits (device/calls.py): after step 2 of the
fourth combine the flag is (3 * 8 + 2) << TAG_BITS | tag.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import codes
from .buffers import DONE_FLAG, EPOCH_COMBINE, STAGED_FLAG, buffer_ptrs, own_buffer
from .calls import CALLS_COMBINE, report_calls
from .job import first_local, has_other_nodes, is_local, local_rank, state_at
from .overruns import report_overruns
from .post import post_flag
from .tables import PARTS, STEPS, parts_staged
from .waits import TAG_BITS, TAGS, WAIT_COMBINE_STAGED, last_to_arrive, release_flags, wait_tagged


class Stagers(NamedTuple):
    """Staged flags [LW, MAX_PROGRAMS], as the programs that stage rows see them.

    Attributes:
        LWP: ranks of a node, rounded up to a power of two.
        MAX_PROGRAMS: most programs of a rank, a power of two.
    """

    LWP: tl.constexpr
    MAX_PROGRAMS: tl.constexpr


class Staged(NamedTuple):
    """Staged flags, as the kernels that wait for rows see them.

    Attributes:
        num_stage_programs: programs of each rank that raise flags.
        LWP, MAX_PROGRAMS: as in `Stagers`.
    """

    num_stage_programs: Any
    LWP: tl.constexpr
    MAX_PROGRAMS: tl.constexpr


@triton.jit
def release_staged(job, before, steps, tag, stagers):
    """Raise staged_flag[my local rank, this program] on every rank of my node: `steps` steps are staged.

    before: `staged_steps`, loaded before the first release. A rank without tokens may have ended the combine, and
    counted it, before its own rows are all staged.
    """
    local = tl.arange(0, stagers.LWP)
    mask = is_local(job, local)
    flag_ptrs = buffer_ptrs(job, STAGED_FLAG, first_local(job) + local, mask, tl.int64)
    flag_ptrs += local_rank(job) * stagers.MAX_PROGRAMS + tl.program_id(0)
    value = (before + steps) << TAG_BITS | tag
    release_flags(flag_ptrs, mask, tl.zeros([stagers.LWP], tl.int64) + value)


@triton.jit
def raise_for_copies(job, tag, stagers):
    """Raise this rank's own staged flags for all steps: copy engines send them to the other ranks after the rows."""
    flag_ptrs = own_buffer(job, STAGED_FLAG, tl.int64) + local_rank(job) * stagers.MAX_PROGRAMS
    value = (staged_steps(job) + STEPS) << TAG_BITS | tag
    tl.store(flag_ptrs + tl.arange(0, stagers.MAX_PROGRAMS), tl.zeros([stagers.MAX_PROGRAMS], tl.int64) + value)


@triton.jit
def wait_staged(job, staged, steps, tag):
    """Wait until every rank of this node has staged `steps` steps of this combine. Returns whether all have, and
    whether a rank is in another combine.

    steps: 0 to STEPS. tag: int64 tag of this combine.
    """
    RANKS: tl.constexpr = _watched(staged.LWP, staged.MAX_PROGRAMS)
    before = staged_steps(job)
    flag, used = _flags_of(job, staged, 0, RANKS)
    flag_ptrs = own_buffer(job, STAGED_FLAG, tl.int64) + flag
    ready, differ, _ = wait_tagged(job, flag_ptrs, used, before + steps, before, tag, WAIT_COMBINE_STAGED)
    for first in tl.static_range(RANKS, staged.LWP, RANKS):
        if ready:
            flag, used = _flags_of(job, staged, first, RANKS)
            flag_ptrs = own_buffer(job, STAGED_FLAG, tl.int64) + flag
            index = first * staged.MAX_PROGRAMS
            ready, differ, _ = wait_tagged(
                job, flag_ptrs, used, before + steps, before, tag, WAIT_COMBINE_STAGED, index
            )
    return ready, differ


@triton.constexpr_function
def _watched(local_ranks, max_programs):
    """Ranks whose flags are watched at a time."""
    return min(local_ranks, max(codes.MOST_WATCHED // max_programs, 1))


@triton.jit
def _flags_of(job, staged, first, RANKS: tl.constexpr):
    """Numbers of the staged flags of RANKS local ranks from `first` on, and whether each is in use."""
    flag = first * staged.MAX_PROGRAMS + tl.arange(0, RANKS * staged.MAX_PROGRAMS)
    of_rank = flag % staged.MAX_PROGRAMS
    return flag, is_local(job, flag // staged.MAX_PROGRAMS) & (of_rank < staged.num_stage_programs)


@triton.jit
def report_staged(job, staged, tag):
    """After a failed `wait_staged`: report the calls if ranks of this node are in different combines.

    Separate from the wait: inside the loop that pulls rows, the report took registers from the rows in flight, and
    combine took a tenth longer (4 x H200, 4096 tokens of 7168 elements).
    """
    flag, used = _flags_of(job, staged, 0, staged.LWP)
    flag_ptrs = own_buffer(job, STAGED_FLAG, tl.int64) + flag
    seen = tl.load(flag_ptrs, mask=used, other=0, volatile=True)
    known = tags_of_rows(seen, used, staged_steps(job), staged.LWP)
    ranks = first_local(job) + tl.arange(0, staged.LWP)
    if tl.max(((known >= 0) & (known != tag)).to(tl.int32)) > 0:
        report_calls(job, ranks, known, known >= 0, CALLS_COMBINE)


@triton.jit
def tags_of_rows(seen, used, before, ROWS: tl.constexpr):
    """[ROWS] the tag in each row of tagged flags; -1 if no flag of the row counts more than `before`."""
    tags = tl.where(used & ((seen >> TAG_BITS) > before), seen & TAGS, -1)
    return tl.max(tl.reshape(tags, [ROWS, seen.numel // ROWS]), axis=1)


@triton.jit
def end_combine(job, network, LWP: tl.constexpr, ENGINES: tl.constexpr):
    """End a combine: every program calls it when it has read its last staged row. The last one counts the combine and
    posts done_flag to every rank. ENGINES: copy engines may have sent the rows, so it also reports overruns.

    With several nodes the kernels that pull and that send partial sums have as many programs, and run in any order.
    """
    kernels = tl.where(has_other_nodes(job), 2, 1)
    if last_to_arrive(job, kernels * tl.num_programs(0)):
        if ENGINES:
            report_overruns(job, LWP)
        epoch = tl.load(state_at(job, EPOCH_COMBINE)) + 1
        tl.debug_barrier()
        tl.store(state_at(job, EPOCH_COMBINE), epoch)
        post_flag(job, epoch, DONE_FLAG, False, network.NETWORK, LWP)


@triton.jit
def staged_steps(job):
    """Steps of all combines before this one, int64."""
    return tl.load(state_at(job, EPOCH_COMBINE)) * STEPS


@triton.jit
def staged_part(job, rows, mine, step):
    """How many of a source's `rows` rows are staged after `step` of STEPS steps; mine: the source is on this node."""
    of_half = tl.where(mine, tl.maximum(2 * step - STEPS, 0), tl.minimum(2 * step, STEPS))
    return rows * parts_staged(tl.where(has_other_nodes(job), of_half, step)) // PARTS
