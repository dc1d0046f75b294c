"""Helpers of the low-latency kernels: turns, owners of experts, words that show that they have arrived."""

import triton
import triton.language as tl

from . import codes
from .job import is_rank
from .spin import INTERPRET, pause
from .waits import deadline_of, has_given_up

_TURN = tl.constexpr(20)
_ONE_TURN = tl.constexpr(1 << 20)
_CALL_SHIFT = tl.constexpr(codes.LL_CALL_SHIFT)
POLLS_AWAKE = tl.constexpr(8)
"""Polls that `pause` counts as one, so that a program sleeps later."""


@triton.constexpr_function
def _copies(words, threads):
    """How often a block of this many words is loaded, so that each thread has a word that no other has."""
    return max(threads // words, 1)


@triton.jit
def turn_of(turn_ptr):
    """Number of the call that this program belongs to, from a word of `state` that `end_turn` advances.

    The word holds (calls that have ended << 20 | programs of this call that have ended). All programs of a call
    together add 1 << 20, each when it ends, so that all of them read the same number when they start.
    """
    return (tl.load(turn_ptr) >> _TURN) + 1


@triton.jit
def end_turn(turn_ptr, is_one, others):
    """End this program's part of the call. is_one: true in one program of the call; others: number of the others."""
    # After the barrier all threads have read the number.
    tl.debug_barrier()
    ended = tl.where(is_one, _ONE_TURN - others, 1).to(tl.int64)
    tl.atomic_add(turn_ptr, ended, sem="relaxed", scope="gpu")


@triton.jit
def quotient(value, divisor):
    """value // divisor for 0 <= value < 2**20; three instructions, not twenty."""
    # Adding 0.5 keeps the product further from whole numbers than its rounding error.
    return ((value.to(tl.float32) + 0.5) * (1.0 / divisor)).to(tl.int32)


@triton.jit
def first_of_half(job, epoch):
    """First entry of the half that a call uses, with one entry per rank. Calls alternate between the halves."""
    return (epoch & 1).to(tl.int32) * job.num_ranks


@triton.jit
def owners(job, ids):
    """Ranks that own the experts `ids`; -1 for dropped entries."""
    return tl.where(ids >= 0, quotient(ids, job.experts_per_rank), -1)


@triton.jit
def on_owner(job, ids, owner):
    """Numbers of the experts `ids` among those of their owners."""
    return ids - owner * job.experts_per_rank


@triton.jit
def rank_after(job, rank):
    """The rank with this number, counted on from 0 after the last; less than twice the number of ranks."""
    return tl.where(is_rank(job, rank), rank, rank - job.num_ranks)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def rank_bits(owner, AXIS: tl.constexpr):
    """Along an axis of owners: one int32 with the bit of each rank that occurs."""
    return tl.reduce(tl.where(owner >= 0, 1 << tl.maximum(owner, 0), 0), AXIS, _or)


@triton.jit
def lacking(words, wanted, epoch):
    """Mask of the wanted words (number of a call << LL_CALL_SHIFT | 32 bits) that are not of call `epoch`."""
    return wanted & ((words >> _CALL_SHIFT).to(tl.int32) != epoch.to(tl.int32))


@triton.jit
def load_words(first_ptr, offs, wanted):
    """Words of a block [m, n] of offsets, as often as gives each thread one of its own: [copies * m * n]."""
    return tl.load(first_ptr + _copied(offs), mask=_copied(wanted), other=0, volatile=True)


@triton.jit
def await_words(job, first_ptr, offs, wanted, words, epoch):
    """Wait until no word of a block [m, n] of offsets is `lacking`. Returns the words, and whether all came in time.

    Each thread checks words that no other holds. If two held the same one, one of them might load it before it came,
    the other after: with the verdict of one, which all threads get, the other would use what it had loaded too early.

    words: what `load_words` has loaded before. The caller reports an expired wait.
    """
    deadline = deadline_of(job)
    polls = 0
    needed = _copied(wanted)
    late = tl.max(lacking(words, needed, epoch).to(tl.int32))
    while late == 1:
        pause(polls // POLLS_AWAKE)
        polls += 1
        given_up = has_given_up(job, polls, deadline)
        words = load_words(first_ptr, offs, wanted)
        late = tl.max(tl.where(lacking(words, needed, epoch), 1 + given_up, 0))
    words = tl.reshape(words, [words.numel // offs.numel, offs.shape[0], offs.shape[1]])
    # The least of copies that differ, because the wait expired, is one that is lacking.
    return tl.min(words, axis=0), late == 0


@triton.jit
def _copied(block):
    """Copies of a block [m, n], in one dimension, at least as long as the program has threads."""
    if INTERPRET:  # one thread
        return tl.reshape(block, [block.numel])
    else:
        COPIES: tl.constexpr = _copies(block.numel, tl.extra.cuda.num_threads())
        copies = tl.broadcast_to(block[None, :, :], [COPIES, block.shape[0], block.shape[1]])
        return tl.reshape(copies, [COPIES * block.numel])
