"""What the low-latency kernels share: a release that counts, owners of experts."""

import triton
import triton.language as tl


@triton.jit
def release_counts(flag_ptrs, mask, counts):
    """Add to flags [block of pointers to one flag per rank], after all stores this program made before.

    Each program adds for itself: a counter on this GPU, whose last arriver tells the others, costs its round trip and
    a second fence. The adds to a flag are one release sequence: who acquires their total has them all before it.
    One thread sets each flag, so the barrier must come first, as in `release_flags` (waits.py).
    """
    tl.debug_barrier()
    tl.atomic_add(flag_ptrs, counts, mask=mask, sem="release", scope="sys")


@triton.jit
def quotient(value, divisor):
    """value // divisor for 0 <= value < 2**20; three instructions, not twenty."""
    # Half a unit keeps the product away from whole numbers, by more than its rounding errors.
    return ((value.to(tl.float32) + 0.5) * (1.0 / divisor)).to(tl.int32)


@triton.jit
def first_of_half(job, epoch):
    """First entry, of one per rank, of the half that a call uses: calls take turns."""
    return (epoch & 1).to(tl.int32) * job.num_ranks


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
