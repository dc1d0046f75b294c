"""Copy rows between the two layouts that grouped GEMMs take: expert-major without gaps, and one slab per expert.

Protocol      1 pack: copy row i of expert e from row offsets[e] + i to row e * slab_rows + i; unpack: copy back
Layout        offsets [e + 1] int32, first expert-major row of each expert; counts [e] int32, rows of each expert. Rows
              of a slab past counts[e], and expert-major rows past the last expert, are not touched.
Memory order  Plain loads and stores.
Progress      No program waits.
Replay        Nothing is kept between calls.
"""

import triton.language as tl

from ..spec import ep_kernel


@ep_kernel(source_ptr="*{WORD}", dest_ptr="*{WORD}", offsets_ptr="*i32", counts_ptr="*i32", specialised=("row_words",))
def slab_rows_kernel(
    source_ptr,  # words
    dest_ptr,  # out, words
    offsets_ptr,  # [e + 1] int32
    counts_ptr,  # [e] int32
    num_experts,
    slab_rows,
    row_words,
    PACK: tl.constexpr,  # from expert-major rows to slabs; otherwise from slabs to rows
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    offs = tl.arange(0, BLOCK_H)
    shares = tl.maximum(tl.num_programs(0) // num_experts, 1)
    for item in range(tl.program_id(0), num_experts * shares, tl.num_programs(0)):
        expert, share = item % num_experts, item // num_experts
        first = tl.load(offsets_ptr + expert)
        count = tl.minimum(tl.load(counts_ptr + expert), slab_rows)
        for begin in range(share * ROWS, count, shares * ROWS):
            row = begin + tl.arange(0, ROWS)
            flat = (first + row).to(tl.int64) * row_words
            slab = (tl.cast(expert, tl.int64) * slab_rows + row) * row_words
            source = flat if PACK else slab
            dest = slab if PACK else flat
            for h in range(0, row_words, BLOCK_H):
                mask = (row < count)[:, None] & (h + offs < row_words)[None, :]
                words = tl.load(source_ptr + source[:, None] + h + offs[None, :], mask=mask, other=0)
                tl.store(dest_ptr + dest[:, None] + h + offs[None, :], words, mask=mask)
