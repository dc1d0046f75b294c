"""Gradient of a bias that is added to every row of a segment: the sum of the segment's rows.

Protocol      A program sums BLOCK_N columns of one segment's rows, BLOCK_R rows at a time, in order, in float32; with
              HAS_WEIGHTS it multiplies every row by its weight first. An empty segment gives zeros.
Layout        x [R, N] row-major, out [E, N] float32.
Memory order  Plain loads and stores; the kernels follow each other on one stream.
Progress      No program waits.
Replay        Nothing is kept between calls.
"""

import triton.language as tl

from ..spec import ep_kernel


@ep_kernel(x_ptr="*bf16", offs_ptr="*i32", weights_ptr="*{WEIGHTS}", out_ptr="*fp32", specialised=("n",))
def bias_gradient_kernel(
    x_ptr,  # [R, N] bf16
    offs_ptr,  # [E + 1] int32
    weights_ptr,  # with HAS_WEIGHTS [R] float32, else unused
    out_ptr,  # out [E, N] float32
    n,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    blocks = tl.cdiv(n, BLOCK_N)
    expert = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(offs_ptr + expert + 1)
    total = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for first in range(tl.load(offs_ptr + expert), end, BLOCK_R):
        rows = first + tl.arange(0, BLOCK_R)
        at = rows.to(tl.int64)[:, None] * n + cols[None, :]
        x = tl.load(x_ptr + at, mask=(rows < end)[:, None] & (cols < n)[None, :], other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            x *= tl.load(weights_ptr + rows, mask=rows < end, other=0.0)[:, None]
        total += x
    tl.store(out_ptr + expert.to(tl.int64) * n + cols, tl.sum(total, axis=0), mask=cols < n)
