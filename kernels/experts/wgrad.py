"""Gradient of the experts' weights: one product over the rows of every segment, out[e] = x_e^T @ y_e.

Protocol      Every tile of every out[e] takes its segment's rows in steps of BLOCK_R. All steps of all tiles of a
              program are one loop, so that the loads of the next tile overlap the store of this one; program p takes
              tiles p, p + num_programs and so on. The table of segments stays in registers: a load inside the loop
              would keep the compiler from pipelining it.
              A tile of an empty segment takes one step past the last row, where a box holds zeros. ACCUMULATE adds to
              the values of out; empty segments then have no tiles.
Layout        x [R, I], y [R, J] bf16 row-major, out [E, I, J], possibly a view of a larger tensor: bf16, with
              ACCUMULATE float32. All three through descriptors, which clip boxes at I and J. Segments hold multiples of
              BLOCK_R rows, so that no box reaches into the next segment; they may start anywhere. Padding at the end of
              a segment is zero in x or in y, and finite in the other; steps of padding alone are skipped.
Memory order  The copy engine reads and writes boxes; the kernels follow each other on one stream. One program adds to
              an element of out, once, so that sums have a fixed order.
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
def _store_half(out, half, expert, i, j, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store [ROWS, COLUMNS] as one box, or add it as two: float32 takes twice the shared memory."""
    if ACCUMULATE:
        left, right = halves(half, ROWS, COLUMNS)
        out.atomic_add([expert, i, j], left.reshape(1, ROWS, COLUMNS // 2))
        out.atomic_add([expert, i, j + COLUMNS // 2], right.reshape(1, ROWS, COLUMNS // 2))
    else:
        out.store([expert, i, j], half.to(tl.bfloat16).reshape(1, ROWS, COLUMNS))


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
    specialised=("num_i", "num_j"),
    num_warps=None,
)
def weight_gradient_kernel(
    x,  # [R, I] bf16: a descriptor of boxes [BLOCK_R, BLOCK_I]
    y,  # [R, J] bf16: boxes [BLOCK_R, BLOCK_J]
    out,  # [E, I, J]: boxes [1, BLOCK_I, BLOCK_J / 2], with ACCUMULATE [1, BLOCK_I, BLOCK_J / 4]
    segments: Segments,
    num_i,
    num_j,
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
            _store_half(out, left, expert, i, j, ACCUMULATE, tile.BLOCK_I, tile.BLOCK_J // 2)
            _store_half(out, right, expert, i, j + tile.BLOCK_J // 2, ACCUMULATE, tile.BLOCK_I, tile.BLOCK_J // 2)
            acc = tl.zeros((tile.BLOCK_I, tile.BLOCK_J), tl.float32)
