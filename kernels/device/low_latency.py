"""What the low-latency kernels share: one release for a whole grid, owners of experts."""

import triton
import triton.language as tl

from .buffers import LL_ARRIVALS, LL_ARRIVALS_BEFORE, buffer_ptrs
from .waits import release_flags


@triton.jit
def release_last(
    tables_ptr,
    state_ptr,
    healthy,  # False: arrive only
    before,  # value of the counter before this launch
    epoch,
    flag_index,
    value,
    num_ranks,
    FLAG: tl.constexpr,
    EPOCH: tl.constexpr,
    WP: tl.constexpr,
):
    """Arrive; the last program of the grid sets flag `flag_index` of every rank and advances the epoch."""
    # Loaded here: behind the add they would come from L2 again.
    peers = tl.arange(0, WP)
    flag_ptrs = buffer_ptrs(tables_ptr, FLAG, num_ranks, peers, peers < num_ranks, tl.int64) + flag_index
    # The add is one thread's: the barrier puts the stores of all warps under it.
    tl.debug_barrier()
    arrived = tl.atomic_add(state_ptr + LL_ARRIVALS, 1, sem="acq_rel", scope="gpu") + 1
    if healthy & (arrived - before == tl.num_programs(0)):
        release_flags(flag_ptrs, peers < num_ranks, tl.zeros([WP], tl.int64) + value)
        tl.store(state_ptr + LL_ARRIVALS_BEFORE, arrived)
        tl.store(state_ptr + EPOCH, epoch)


@triton.jit
def quotient(value, divisor):
    """value // divisor for 0 <= value < 2**20; three instructions, not twenty."""
    # Half a unit keeps the product away from whole numbers, by more than its rounding errors.
    return ((value.to(tl.float32) + 0.5) * (1.0 / divisor)).to(tl.int32)


@triton.jit
def owners(ids, experts_per_rank):
    """Ranks that own kept ids; -1 of those that are dropped."""
    return tl.where(ids >= 0, quotient(ids, experts_per_rank), -1)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def rank_bits(owner, AXIS: tl.constexpr):
    """Along an axis of owners: one int32 with a bit for each rank that is among them."""
    return tl.reduce(tl.where(owner >= 0, 1 << tl.maximum(owner, 0), 0), AXIS, _or)
