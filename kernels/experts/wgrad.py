"""Gradient of the experts' weights: one product over the rows of every segment, out[e] = x_e^T @ y_e.

Protocol      Every tile of every out[e] takes its segment's rows in steps of BLOCK_R. All steps of all tiles of a
              program are one loop, so that the loads of the next tile overlap the store of this one; program p takes
              tiles p, p + num_programs and so on. The table of segments stays in registers: a load inside the loop
              would keep the compiler from pipelining it.
              A tile of an empty segment takes one step past the last row, where a box holds zeros. ACCUMULATE reads the
              values of out, adds and stores them; empty segments then have no tiles. The copy engine, which can add in
              L2, takes a fifth longer.
Layout        x [R, I], y [R, J] bf16 row-major, out [E, I, J], possibly a view of a larger tensor: bf16, with
              ACCUMULATE float32. All but float32 through descriptors, which clip boxes at I and J. Segments hold
              multiples of BLOCK_R rows, so that no box reaches into the next segment; they may start anywhere. Padding
              at the end of a segment is zero in x or in y, and finite in the other; steps of padding alone are skipped.
Memory order  The copy engine reads and writes boxes, the program itself float32 values; the kernels follow each other
              on one stream. One program adds to an element of out, once, so that sums have a fixed order.
Progress      No program waits.
Replay        Nothing is kept between calls.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.groups import WgradTile, in_bands, pick
from ..spec import ep_kernel
from .products import halves


@triton.jit
def _store_part(out, part, expert, i, j):
    """Store a part of a tile, [ROWS, COLUMNS], as one box."""
    out.store([expert, i, j], part.to(tl.bfloat16).reshape(1, part.shape[0], part.shape[1]))


@triton.jit
def _add_part(out, part, expert, i, j, num_i, num_j, stride_e, stride_i):
    """Add a part of a tile, [ROWS, COLUMNS], to float32 values. All of them are loaded before one is stored."""
    rows = i + tl.arange(0, part.shape[0])
    columns = j + tl.arange(0, part.shape[1])
    at = out + expert.to(tl.int64) * stride_e + rows.to(tl.int64)[:, None] * stride_i + columns[None, :]
    inside = (rows < num_i)[:, None] & (columns < num_j)[None, :]
    before = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    tl.store(at, before + part, mask=inside, cache_modifier=".cs")


class Segments(NamedTuple):
    """Segments of rows, one per expert.

    Attributes:
        offs_ptr: [E + 1] int32.
        filled_ptr: [E] int32, rows of each segment before its padding.
        num_rows: R.
        num_experts: E.
        EP: a power of two, at least E.
    """

    offs_ptr: Any
    filled_ptr: Any
    num_rows: Any
    num_experts: Any
    EP: tl.constexpr


@ep_kernel(
    x="{X}",
    y="{Y}",
    out="{OUT}",
    offs_ptr="*i32",
    filled_ptr="*i32",
    specialised=("num_i", "num_j", "stride_e", "stride_i"),
    num_warps=None,
)
def weight_gradient_kernel(
    x,  # [R, I] bf16: a descriptor of boxes [BLOCK_R, BLOCK_I]
    y,  # [R, J] bf16: boxes [BLOCK_R, BLOCK_J]
    out,  # [E, I, J] bf16: boxes [1, BLOCK_I, BLOCK_J / 2]; with ACCUMULATE a pointer to float32
    segments: Segments,
    num_i,
    num_j,
    stride_e,  # of out, in elements, like the next; read with ACCUMULATE
    stride_i,
    ACCUMULATE: tl.constexpr,
    tile: WgradTile,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles_i = tl.cdiv(num_i, tile.BLOCK_I)
    tiles_j = tl.cdiv(num_j, tile.BLOCK_J)
    tiles = tiles_i * tiles_j

    segment = tl.arange(0, segments.EP)
    first = tl.load(segments.offs_ptr + segment, mask=segment < segments.num_experts, other=0)
    rows = tl.load(segments.offs_ptr + segment + 1, mask=segment < segments.num_experts, other=0) - first
    rows = tl.minimum(rows, tl.load(segments.filled_ptr + segment, mask=segment < segments.num_experts, other=0))
    counted = segment < segments.num_experts
    if ACCUMULATE:
        counted = rows > 0
    first = tl.where(rows > 0, first, segments.num_rows)
    end = first + tl.maximum(rows, 1)
    upto = tl.cumsum(counted.to(tl.int32), 0)  # segments with tiles, including this one
    before = upto - counted.to(tl.int32)
    # Count this program's tiles of each segment: those congruent to `program` modulo `programs`.
    mine = tl.cdiv(tl.maximum(upto * tiles - program, 0), programs)
    mine -= tl.cdiv(tl.maximum(before * tiles - program, 0), programs)
    steps = tl.sum(mine * tl.cdiv(end - first, tile.BLOCK_R))

    number = program - programs
    r = 0
    last = 0
    expert = 0
    i = 0
    j = 0
    acc = tl.zeros((tile.BLOCK_I, tile.BLOCK_J), tl.float32)
    for _ in tl.range(0, steps, num_stages=tile.STAGES):
        r += tile.BLOCK_R
        if r >= last:
            number += programs
            expert = number // tiles
            if ACCUMULATE:
                expert = tl.sum((upto <= number // tiles).to(tl.int32))
            tile_i, tile_j = in_bands(number % tiles, tiles_i, tiles_j, tile.BAND)
            i = tile_i * tile.BLOCK_I
            j = tile_j * tile.BLOCK_J
            r = pick(first, expert)
            last = pick(end, expert)
        x_box = x.load([r, i])
        y_box = y.load([r, j])
        acc = tl.dot(x_box.T, y_box, acc)
        if r + tile.BLOCK_R >= last:
            left, right = halves(acc, tile.BLOCK_I, tile.BLOCK_J)
            middle = j + tile.BLOCK_J // 2
            if ACCUMULATE:
                _add_part(out, left, expert, i, j, num_i, num_j, stride_e, stride_i)
                _add_part(out, right, expert, i, middle, num_i, num_j, stride_e, stride_i)
            else:
                _store_part(out, left, expert, i, j)
                _store_part(out, right, expert, i, middle)
            acc = tl.zeros((tile.BLOCK_I, tile.BLOCK_J), tl.float32)
