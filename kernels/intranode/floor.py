"""The simplest exchange, a yardstick for the others: every rank stores rows to all its peers.

Protocol      1 store row r of the source to row r of peer (rank + 1 + r mod (W - 1)) mod W
              Nothing is published: the benchmark synchronises the ranks before and after.
Layout        source and destination [num_rows, row_words]; each row of a destination has one writer, because the
              peers of a row differ between ranks.
Memory order  None beyond the end of the kernel.
Progress      No program waits.
Replay        The same rows land in the same places.
"""

import triton.language as tl

from ..spec import Variant, ep_kernel


@ep_kernel(
    source_ptr="*{WORD}",
    addrs_ptr="*i64",
    specialised=("row_words",),
    num_warps=32,
    variants=(Variant({"BLOCK": 2048}, {"WORD": "i64"}, aligned=("row_words",)),),
)
def floor_push_kernel(
    source_ptr,  # [num_rows, row_words] words of this rank
    addrs_ptr,  # [W] int64 -> destination of each rank, 16-byte aligned
    num_rows,
    row_words,
    rank,
    num_ranks,
    BLOCK: tl.constexpr,
):
    offs = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        # Neighbouring programs store to different peers, so that no link is idle.
        peer = (rank + 1 + row % (num_ranks - 1)) % num_ranks
        addr = tl.load(addrs_ptr + peer)
        # The compiler knows no alignment of an address read from a table: without the hint, stores are 2 bytes each.
        dest_ptr = tl.multiple_of(addr.to(source_ptr.dtype), 16)
        first = tl.cast(row, tl.int64) * row_words
        for begin in range(0, row_words, BLOCK):
            mask = begin + offs < row_words
            words = tl.load(source_ptr + first + begin + offs, mask=mask, other=0)
            tl.store(dest_ptr + first + begin + offs, words, mask=mask)
