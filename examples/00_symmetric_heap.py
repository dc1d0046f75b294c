"""Symmetric memory, which all ranks can address: each rank stores words on the next rank and raises its flag.

python examples/00_symmetric_heap.py                         starts its own ranks
torchrun --nproc-per-node 4 examples/00_symmetric_heap.py
mpirun -np 4 python examples/00_symmetric_heap.py
"""

import torch

from triton_ep.distributed import current_heap, finalize_distributed, initialize_distributed, launched_by, run_ranks

# isort: split
import triton  # after triton_ep, which decides whether kernels are interpreted
import triton.language as tl

from triton_ep.kernels.device.spin import now_ns, pause

BLOCK = 64
TIMEOUT_NS = 30 * 10**9


@triton.jit
def pass_on_kernel(words_addrs_ptr, flag_addrs_ptr, rank, num_ranks, timeout_ns, BLOCK: tl.constexpr):
    """Store this rank's words on the next rank, then wait for the words of the previous rank."""
    peer = (rank + 1) % num_ranks
    # Triton knows no alignment for an address loaded from a table; symmetric memory is aligned to 256 bytes or more.
    peer_words_ptr = tl.multiple_of(tl.load(words_addrs_ptr + peer).to(tl.pointer_type(tl.int32)), 16)
    tl.store(peer_words_ptr + tl.arange(0, BLOCK), rank * BLOCK + tl.arange(0, BLOCK))
    peer_flag_ptr = tl.load(flag_addrs_ptr + peer).to(tl.pointer_type(tl.int64))
    tl.debug_barrier()  # all threads of the block have stored, so the release below covers all their stores
    tl.atomic_xchg(peer_flag_ptr, tl.full([], 1, tl.int64), sem="release", scope="sys")

    own_flag_ptr = tl.load(flag_addrs_ptr + rank).to(tl.pointer_type(tl.int64))
    start, polls = now_ns(), 0
    while (tl.load(own_flag_ptr, volatile=True) == 0) & (now_ns() - start < timeout_ns):
        pause(polls)
        polls += 1
    # Pairs with the release. A block of one: LLVM drops a scalar atomic that adds 0 if its result is unused.
    tl.atomic_add(own_flag_ptr + tl.arange(0, 1), tl.zeros([1], tl.int64), sem="acquire", scope="sys")
    tl.debug_barrier()  # from here on all threads may read the words


def main() -> None:
    rank, world_size = initialize_distributed()
    heap = current_heap()
    words = heap.alloc([BLOCK], torch.int32)  # collective; zeros everywhere when it returns
    flag = heap.alloc([1], torch.int64)
    pass_on_kernel[(1,)](words.addrs, flag.addrs, rank, world_size, TIMEOUT_NS, BLOCK=BLOCK)

    before = (rank - 1) % world_size
    assert flag.local.item() == 1, f"rank {before} did not store in time"
    assert words.local.tolist() == list(range(before * BLOCK, (before + 1) * BLOCK)), "wrong words"
    print(f"rank {rank} of {world_size}: got the words of rank {before}\n", end="", flush=True)
    finalize_distributed()  # collective: frees the memory once all ranks are here


if __name__ == "__main__":
    run_ranks(main) if launched_by() == "none" else main()
