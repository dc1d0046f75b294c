"""Backward of a weighted sum of rows: the gradients of the rows and of their weights, in one pass.

Protocol      For every row r: grad[r] = dy[r] * weight[r], and grad_weight[r] = <dy[r], y[r]>, summed in float32 in
              a fixed order. Gradients of rows from the end of the last segment on are zero; their inputs are not read.
Layout        dy, y, grad [R, H] row-major. IS_MX: dy is MXFP8, e4m3 [R, H] with scale bytes [R, H/32].
Memory order  Plain loads and stores; the kernels follow each other on one stream.
Progress      No program waits.
Replay        Nothing is kept between calls.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.mxfp8 import BLOCK, dequantize_tile
from ..device.payload import Tile
from ..spec import ep_kernel


@triton.jit
def _mx_tile(elements_ptr, scale_ptr, rows, in_use, first, hidden, ROWS: tl.constexpr, BLOCK_H: tl.constexpr):
    """Values [ROWS, BLOCK_H] float32 from column `first` on; zeros for rows not in use."""
    blocks = first // BLOCK + tl.arange(0, BLOCK_H // BLOCK)
    num_blocks = hidden // BLOCK
    at = rows.to(tl.int64)[:, None] * num_blocks + blocks[None, :]
    mask = in_use[:, None] & (blocks < num_blocks)[None, :]
    scale = tl.load(scale_ptr + at, mask=mask, other=0)
    inside = tl.arange(0, BLOCK)[None, None, :]
    elements = tl.load(elements_ptr + at[:, :, None] * BLOCK + inside, mask=mask[:, :, None], other=0.0)
    return tl.reshape(dequantize_tile(elements, scale), (ROWS, BLOCK_H))


class Gradient(NamedTuple):
    """The gradient of weighted rows.

    Attributes:
        dy_ptr: [R, H].
        dy_scale_ptr: with IS_MX [R, H/32] uint8, else unused.
        IS_MX: dy is MXFP8.
    """

    dy_ptr: Any
    dy_scale_ptr: Any
    IS_MX: tl.constexpr


class RowsInUse(NamedTuple):
    """Rows that are read.

    Attributes:
        offs_ptr: with HAS_OFFS int32; entry `last` is the end of these rows. Else unused.
        num_rows: R, including rows not in use.
        last: index of that entry.
        HAS_OFFS: else all rows are in use.
    """

    offs_ptr: Any
    num_rows: Any
    last: Any
    HAS_OFFS: tl.constexpr


@ep_kernel(
    dy_ptr="*{ROWS}",
    dy_scale_ptr="*{SCALE}",
    y_ptr="*{TOKEN}",
    weights_ptr="*fp32",
    offs_ptr="*{OFFS}",
    grad_ptr="*{TOKEN}",
    grad_weights_ptr="*fp32",
    specialised=("hidden",),
)
def weighted_rows_backward_kernel(
    gradient: Gradient,
    y_ptr,  # [R, H]
    weights_ptr,  # [R] float32
    given: RowsInUse,
    grad_ptr,  # [R, H]
    grad_weights_ptr,  # [R] float32
    hidden,
    tile: Tile,
):
    rows = tl.program_id(0) * tile.ROWS + tl.arange(0, tile.ROWS)
    end = given.num_rows
    if given.HAS_OFFS:
        end = tl.minimum(tl.load(given.offs_ptr + given.last), given.num_rows)
    in_use = rows < end
    weights = tl.load(weights_ptr + rows, mask=in_use, other=0.0)[:, None]
    row_starts = rows.to(tl.int64)[:, None] * hidden
    products = tl.zeros((tile.ROWS, tile.BLOCK_H), tl.float32)
    for first in range(0, hidden, tile.BLOCK_H):
        cols = (first + tl.arange(0, tile.BLOCK_H))[None, :]
        in_h = cols < hidden
        mask = in_use[:, None] & in_h
        if gradient.IS_MX:
            dy = _mx_tile(gradient.dy_ptr, gradient.dy_scale_ptr, rows, in_use, first, hidden, tile.ROWS, tile.BLOCK_H)
        else:
            dy = tl.load(gradient.dy_ptr + row_starts + cols, mask=mask, other=0.0).to(tl.float32)
        products += dy * tl.load(y_ptr + row_starts + cols, mask=mask, other=0.0).to(tl.float32)
        grad = (dy * weights).to(grad_ptr.dtype.element_ty)
        tl.store(grad_ptr + row_starts + cols, grad, mask=(rows < given.num_rows)[:, None] & in_h)
    tl.store(grad_weights_ptr + rows, tl.sum(products, axis=1), mask=rows < given.num_rows)
