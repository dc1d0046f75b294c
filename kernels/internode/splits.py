"""Splits exchange: every rank learns how many tokens every rank sends to every expert, rank and node.

Protocol      1 advance this rank's dispatch epoch
              2 post my splits row, then my flag = epoch, to every rank (device/post.py)
              3 wait until the flag of every rank is at least the epoch
Layout        splits [2, W, S] int32, half chosen by the parity of the epoch; flags [W] int64, one per source.
Memory order  The flag is released after the row; step 3 acquires it.
Progress      One program; it posts before it waits.
Replay        The epoch lives on the device and only grows. A rank that is through step 3 knows that every
              rank has finished its previous call (its kernels precede the post on its stream): this is what
              allows the pushes of this call to overwrite the arrival buffers without a barrier. A fast
              peer may post the next epoch while I still read this one: hence the two halves.
"""

import triton
import triton.language as tl

from ..device.buffers import EPOCH_DISPATCH, SPLITS, SPLITS_FLAG, buffer_ptr
from ..device.post import post_to_all
from ..device.waits import WAIT_SPLITS, wait_flags


@triton.jit(do_not_specialize=["rank", "num_ranks", "ranks_per_node", "row_length"])
def splits_exchange_kernel(
    row_ptr,  # [S] int32, my splits row
    state_ptr,
    tables_ptr,
    rank,
    num_ranks,
    ranks_per_node,
    row_length,
    NETWORK: tl.constexpr,
    WP: tl.constexpr,
    LWP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    epoch = tl.load(state_ptr + EPOCH_DISPATCH) + 1
    my_row = ((epoch & 1) * num_ranks + rank) * row_length
    splits_ptr = buffer_ptr(tables_ptr, SPLITS, num_ranks, rank, tl.int32)
    for start in range(0, row_length, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        words = tl.load(row_ptr + offs, mask=offs < row_length, other=0)
        tl.store(splits_ptr + my_row + offs, words, mask=offs < row_length)
    # The row just stored is the source of the posts, which other threads read; and all threads have read the epoch.
    tl.debug_barrier()
    tl.store(state_ptr + EPOCH_DISPATCH, epoch)
    post_to_all(
        tables_ptr,
        my_row * 4,
        tl.cast(row_length, tl.int64) * 4,
        epoch,
        rank,
        num_ranks,
        ranks_per_node,
        SPLITS,
        SPLITS_FLAG,
        True,
        False,
        NETWORK,
        LWP,
        BLOCK,
    )
    sources = tl.arange(0, WP)
    flag_ptrs = buffer_ptr(tables_ptr, SPLITS_FLAG, num_ranks, rank, tl.int64) + sources
    wait_flags(flag_ptrs, sources < num_ranks, epoch, state_ptr, WAIT_SPLITS)
