"""Staged rows of a combine: how far each rank of the node is, and which combine it is in.

Rows of a combine are staged in steps, STEPS per call: each some rows of every source, or with several nodes first all
rows of other nodes' tokens. The flags count those steps since the layer was made, and carry the tag of the combine
below (device/calls.py): after step 2 of the fourth combine the flag is (3 * 8 + 2) << TAG_BITS | tag.
"""

import triton
import triton.language as tl

from .buffers import EPOCH_COMBINE, STAGED_FLAG, buffer_ptrs, own_buffer
from .calls import CALLS_COMBINE, report_calls
from .job import first_local, local_rank
from .tables import PARTS, STEPS
from .waits import TAG_BITS, TAGS, WAIT_COMBINE_STAGED, release_flags, wait_tagged


@triton.jit
def release_staged(job, steps, tag, LWP: tl.constexpr, MAX_PROGRAMS: tl.constexpr):
    """Raise staged_flag[my local rank, this program] on every rank of my node: rows are staged up to a step."""
    local = tl.arange(0, LWP)
    mask = local < job.ranks_per_node
    flag_ptrs = buffer_ptrs(job, STAGED_FLAG, first_local(job) + local, mask, tl.int64)
    flag_ptrs += local_rank(job) * MAX_PROGRAMS + tl.program_id(0)
    value = (staged_steps(job) + steps) << TAG_BITS | tag
    release_flags(flag_ptrs, mask, tl.zeros([LWP], tl.int64) + value)


@triton.jit
def wait_staged(
    job,
    num_stage_programs,
    steps,  # of STEPS
    tag,  # int64, of this combine
    LWP: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
):
    """Wait until every rank of this node has staged its rows of this combine up to a step: whether all have, and
    whether one of them is in another combine."""
    flag = tl.arange(0, LWP * MAX_PROGRAMS)
    used = (flag // MAX_PROGRAMS < job.ranks_per_node) & (flag % MAX_PROGRAMS < num_stage_programs)
    flag_ptrs = own_buffer(job, STAGED_FLAG, tl.int64) + flag
    before = staged_steps(job)
    ready, differ, _ = wait_tagged(job, flag_ptrs, used, before + steps, before, tag, WAIT_COMBINE_STAGED)
    return ready, differ


@triton.jit
def report_staged(job, num_stage_programs, tag, LWP: tl.constexpr, MAX_PROGRAMS: tl.constexpr):
    """After a `wait_staged` that failed: report the calls, if ranks of this node are in different combines.

    Apart from the wait: inside the loop that pulls rows, it took registers from the rows in flight, and combine took a
    tenth longer (4 x H200, 4096 tokens of 7168 elements).
    """
    flag = tl.arange(0, LWP * MAX_PROGRAMS)
    used = (flag // MAX_PROGRAMS < job.ranks_per_node) & (flag % MAX_PROGRAMS < num_stage_programs)
    flag_ptrs = own_buffer(job, STAGED_FLAG, tl.int64) + flag
    seen = tl.load(flag_ptrs, mask=used, other=0, volatile=True)
    known = tags_of_rows(seen, used, staged_steps(job), LWP)
    ranks = first_local(job) + tl.arange(0, LWP)
    if tl.max(((known >= 0) & (known != tag)).to(tl.int32)) > 0:
        report_calls(job, ranks, known, known >= 0, CALLS_COMBINE)


@triton.jit
def tags_of_rows(seen, used, before, ROWS: tl.constexpr):
    """[ROWS] the tag in each row of tagged flags; -1 where none counts more than `before`."""
    tags = tl.where(used & ((seen >> TAG_BITS) > before), seen & TAGS, -1)
    return tl.max(tl.reshape(tags, [ROWS, seen.numel // ROWS]), axis=1)


@triton.jit
def staged_steps(job):
    """Steps of all combines before this one, int64."""
    return tl.load(job.state_ptr + EPOCH_COMBINE) * STEPS


@triton.jit
def staged_part(rows, step):
    """How many of `rows` rows of a source are staged after some of STEPS steps; the first ones are short."""
    return rows * (step * step) // PARTS
