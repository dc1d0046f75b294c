"""Repeat a dispatch's expansion: copy arrived rows, one per token and rank, to the rows of their assignments.

Protocol      Each of the first C programs copies one arrived row to the rows of its assignments. After these, SHARES
              programs per segment zero its padding, ROWS rows at a time. Rows from the end of the last segment on are
              not written.
Layout        arrived [C, H], out [R, W] bf16 row-major, with W of the columns of `arrived`; copies [C, K] int32, rows
              of `out`, -1 = none. One entry of `counts` is the number of valid rows of `arrived` and `copies`.
Memory order  Plain loads and stores; the kernels follow each other on one stream. No two programs write one row.
Progress      No program waits.
Replay        Nothing is kept between calls.
"""

from typing import Any, NamedTuple

import triton.language as tl

from ..spec import ep_kernel


class Copied(NamedTuple):
    """Arrived rows and their destinations.

    Attributes:
        arrived_ptr: [C, H] bf16.
        copies_ptr: [C, K] int32.
        counts_ptr: int32; entry `at` is the number of valid rows.
        num_arrivals: C.
        hidden: H.
        first: first column that is copied.
        at: see counts_ptr.
        topk: K.
    """

    arrived_ptr: Any
    copies_ptr: Any
    counts_ptr: Any
    num_arrivals: Any
    hidden: Any
    first: Any
    at: Any
    topk: Any


class Segments(NamedTuple):
    """Rows of each expert.

    Attributes:
        offs_ptr: [E + 1] int32, first row of each segment, then the end of the last.
        filled_ptr: [E] int32, rows of each segment that hold assignments; padding follows them.
    """

    offs_ptr: Any
    filled_ptr: Any


@ep_kernel(
    arrived_ptr="*bf16",
    copies_ptr="*i32",
    counts_ptr="*i32",
    offs_ptr="*i32",
    filled_ptr="*i32",
    out_ptr="*bf16",
    specialised=("hidden", "first", "width"),
)
def expand_arrivals_kernel(
    copied: Copied,
    segments: Segments,
    out_ptr,  # out [R, W] bf16
    width,  # W
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    program = tl.program_id(0)
    offs = tl.arange(0, BLOCK_H)
    if program < copied.num_arrivals:
        if program < tl.load(copied.counts_ptr + copied.at):
            source = copied.arrived_ptr + program.to(tl.int64) * copied.hidden + copied.first
            copies = copied.copies_ptr + program.to(tl.int64) * copied.topk
            for h in range(0, width, BLOCK_H):
                mask = h + offs < width
                row = tl.load(source + h + offs, mask=mask)
                for k in range(copied.topk):
                    copy = tl.load(copies + k)
                    if copy >= 0:
                        tl.store(out_ptr + copy.to(tl.int64) * width + h + offs, row, mask=mask)
    else:
        expert = (program - copied.num_arrivals) // SHARES
        first = tl.load(segments.offs_ptr + expert) + tl.load(segments.filled_ptr + expert)
        end = tl.load(segments.offs_ptr + expert + 1)
        zeros = tl.zeros([ROWS, BLOCK_H], out_ptr.dtype.element_ty)
        share = (program - copied.num_arrivals) % SHARES
        for padding in range(first + share * ROWS, end, SHARES * ROWS):
            row = padding + tl.arange(0, ROWS)
            dest = out_ptr + row.to(tl.int64)[:, None] * width
            for h in range(0, width, BLOCK_H):
                inside = (row < end)[:, None] & (h + offs < width)[None, :]
                tl.store(dest + h + offs[None, :], zeros, mask=inside)
