"""A ping-pong between two ranks: one correct way, and five wrong ways that a CPU hides and a GPU does not.

Kept as fixtures: chaos mode must find every wrong way. Never copy from here; the right way is CORRECT.
"""

import triton
import triton.language as tl

from triton_ep.kernels.device.spin import now_ns, pause

CORRECT = tl.constexpr(0)
RELAXED = tl.constexpr(1)  # the flag orders nothing
FLAG_FIRST = tl.constexpr(2)  # the flag is raised before the data
GPU_SCOPE = tl.constexpr(3)  # released for this GPU only
NO_BARRIER = tl.constexpr(4)  # one thread releases while other warps still store
PLAIN_FLAG = tl.constexpr(5)  # the flag is a plain store: visible late, never, or before the data

WAYS = {
    "correct": CORRECT.value,
    "relaxed": RELAXED.value,
    "flag_first": FLAG_FIRST.value,
    "gpu_scope": GPU_SCOPE.value,
    "no_barrier": NO_BARRIER.value,
    "plain_flag": PLAIN_FLAG.value,
}


@triton.jit
def post(data_ptr, flag_ptr, words, epoch, WAY: tl.constexpr, BLOCK: tl.constexpr):
    """Store words [BLOCK] int32 at the peer and set its flag [int64] to `epoch`."""
    offs = tl.arange(0, BLOCK)
    if WAY == FLAG_FIRST:
        tl.debug_barrier()
        tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")
    tl.store(data_ptr + offs, words)
    if WAY != NO_BARRIER:
        tl.debug_barrier()
    if WAY == RELAXED:
        tl.atomic_xchg(flag_ptr, epoch, sem="relaxed", scope="sys")
    elif WAY == GPU_SCOPE:
        tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="gpu")
    elif WAY == PLAIN_FLAG:
        tl.store(flag_ptr, epoch)
    elif WAY != FLAG_FIRST:
        tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")


@triton.jit
def ping_pong_kernel(
    own_ptr,  # [BLOCK] int32, the peer writes
    own_flag_ptr,  # [1] int64, the peer writes
    peer_addr,  # int64, own_ptr of the peer as this rank maps it
    peer_flag_addr,  # int64, own_flag_ptr of the peer
    bad_ptr,  # [1] int64: number of wrong words; -1: the peer's flag did not arrive in time
    rank,  # 0 serves, 1 answers
    rounds,
    timeout_ns,
    WAY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """In each round 0 posts, 1 checks and posts, 0 checks. Every word encodes its round, sender and place."""
    offs = tl.arange(0, BLOCK)
    peer_ptr = peer_addr.to(tl.pointer_type(tl.int32))
    peer_flag_ptr = peer_flag_addr.to(tl.pointer_type(tl.int64))
    bad = tl.zeros([], tl.int64)
    for epoch in range(1, rounds + 1):
        words = (epoch * 2 + rank) * BLOCK + offs
        if (rank == 0) & (bad >= 0):
            post(peer_ptr, peer_flag_ptr, words, epoch, WAY, BLOCK)
        start = now_ns()
        polls = 0
        seen = tl.load(own_flag_ptr, volatile=True)
        while (seen < epoch) & (bad >= 0) & (now_ns() - start < timeout_ns):
            pause(polls)
            polls += 1
            seen = tl.load(own_flag_ptr, volatile=True)
        tl.atomic_add(own_flag_ptr, 0, sem="acquire", scope="sys")
        if (seen < epoch) | (bad < 0):
            bad = tl.zeros([], tl.int64) - 1
        else:
            got = tl.load(own_ptr + offs, volatile=True)
            expected = (epoch * 2 + 1 - rank) * BLOCK + offs
            bad += tl.sum((got != expected).to(tl.int64), 0)
        if (rank == 1) & (bad >= 0):
            post(peer_ptr, peer_flag_ptr, words, epoch, WAY, BLOCK)
    tl.store(bad_ptr, bad)


@triton.jit
def visibility_kernel(
    heap_ptr,  # [BLOCK] int32
    flag_ptr,  # [2] int32, in the heap or not
    MAKE_BARRIER: tl.constexpr,
    SEM: tl.constexpr,
    SCOPE: tl.constexpr,
    LAST_ARRIVER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every program stores its part of a heap and releases it in the given way; then all pause.

    LAST_ARRIVER: programs release to a counter at SCOPE, and the last one releases at system scope for all.
    """
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(heap_ptr + offs, offs + 1)
    if MAKE_BARRIER:
        tl.debug_barrier()
    arrived = tl.atomic_add(flag_ptr, 1, sem=SEM, scope=SCOPE)
    if LAST_ARRIVER and arrived == tl.num_programs(0) - 1:
        tl.atomic_add(flag_ptr + 1, 1, sem="release", scope="sys")
    pause(0)


@triton.jit
def one_program_releases_kernel(heap_ptr, flag_ptr, BLOCK: tl.constexpr):
    """All programs store, but only program 0 releases: wrong for the other programs' stores."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(heap_ptr + offs, offs + 1)
    tl.debug_barrier()
    if tl.program_id(0) == 0:
        tl.atomic_add(flag_ptr, 1, sem="release", scope="sys")
    pause(0)
