"""Grouped GEMM in bf16: one product per group of rows (forward, gradient of the rows), and per group one
product over its rows (gradient of the weights).

Protocol      grouped_gemm: out[r, :] = a[r, :] @ b[group of r]. Programs are persistent; each takes every
              num_programs-th tile. The device derives the position of a tile from the groups' ends, so the
              host waits for nothing and a captured graph accepts new groups. A tile holds rows of one group.
              Rows past the last group are a group without steps over K: they become zeros.
              grouped_wgrad: out[e] = x_e^T @ y_e over the rows of group e; one program per tile. ACCUMULATE adds to
              the values in out, and does not touch out[e] of an empty group.
              Both accumulate in float32 and round once to the output's type.
Layout        a, x, y: row-major. b [E, K, N]: K_MAJOR = consecutive along K, else along N. Groups start
              anywhere and may be empty. TMA: operands are loaded through descriptors, whose boxes may reach into
              the next group or expert; the results computed there are never stored. For that, K must be a
              multiple of BLOCK_K: a box that crosses K would load the next expert's rows.
Memory order  Plain loads and stores; the kernels follow each other on one stream.
Progress      No program waits.
Replay        Nothing is kept between calls.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.groups import GemmTile, Groups, WgradTile, group_rows, in_bands, pick
from ..spec import ep_kernel


class Strides(NamedTuple):
    """Elements from one row, or matrix, to the next.

    Attributes:
        stride_am, stride_om: rows of a and of the result.
        stride_be: matrices of b.
        stride_bw: of b along the dimension that is not consecutive.
    """

    stride_am: Any
    stride_be: Any
    stride_bw: Any
    stride_om: Any


@ep_kernel(
    a="{A}",
    b="{B}",
    out_ptr="*{OUT}",
    ends_ptr="*i32",
    specialised=("n", "k", "stride_am", "stride_be", "stride_bw", "stride_om"),
    num_warps=8,
)
def grouped_gemm_kernel(
    a,  # [R, K] bf16: pointer, or with TMA a descriptor of boxes [BLOCK_M, BLOCK_K]
    b,  # [E, K, N] bf16: pointer, or a descriptor: [E*N, K], boxes [BLOCK_N, BLOCK_K], or [E*K, N], [BLOCK_K, BLOCK_N]
    out_ptr,  # [R, N]
    groups: Groups,
    n,
    k,
    strides: Strides,
    TMA: tl.constexpr,
    K_MAJOR: tl.constexpr,
    tile: GemmTile,
):
    starts, rows = group_rows(groups)
    tiles_n = tl.cdiv(n, tile.BLOCK_N)
    tiles = tl.cdiv(rows, tile.BLOCK_M) * tiles_n
    after = tl.cumsum(tiles, 0)
    offs_m = tl.arange(0, tile.BLOCK_M)
    offs_n = tl.arange(0, tile.BLOCK_N)
    offs_k = tl.arange(0, tile.BLOCK_K)
    for number in range(tl.program_id(0), tl.sum(tiles), tl.num_programs(0)):
        group = tl.sum((after <= number).to(tl.int32))
        group_size = pick(rows, group)
        group_start = pick(starts, group)
        inside = number - pick(after - tiles, group)
        tile_m, tile_n = in_bands(inside, tl.cdiv(group_size, tile.BLOCK_M), tiles_n, tile.BAND)
        row = group_start + tile_m * tile.BLOCK_M
        col = tile_n * tile.BLOCK_N
        expert = tl.minimum(group, groups.num_experts - 1)  # rows past the last group have no expert and no steps
        acc = tl.zeros((tile.BLOCK_M, tile.BLOCK_N), dtype=tl.float32)
        if TMA:
            for k0 in tl.range(0, tl.where(group < groups.num_experts, k, 0), tile.BLOCK_K, num_stages=tile.STAGES):
                a_tile = a.load([row, k0])
                if K_MAJOR:
                    acc = tl.dot(a_tile, b.load([expert * n + col, k0]).T, acc)
                else:
                    acc = tl.dot(a_tile, b.load([expert * k + k0, col]), acc)
        else:
            a_ptrs = a + (row + offs_m).to(tl.int64)[:, None] * strides.stride_am + offs_k[None, :]
            b_ptr = b + expert.to(tl.int64) * strides.stride_be
            in_m = (row + offs_m < groups.num_rows)[:, None]
            for k0 in tl.range(0, tl.where(group < groups.num_experts, k, 0), tile.BLOCK_K, num_stages=tile.STAGES):
                in_k = k0 + offs_k < k
                a_tile = tl.load(a_ptrs + k0, mask=in_m & in_k[None, :], other=0.0)
                if K_MAJOR:
                    b_ptrs = b_ptr + (col + offs_n).to(tl.int64)[:, None] * strides.stride_bw + (k0 + offs_k)[None, :]
                    in_b = (col + offs_n < n)[:, None] & in_k[None, :]
                    acc = tl.dot(a_tile, tl.load(b_ptrs, mask=in_b, other=0.0).T, acc)
                else:
                    b_ptrs = b_ptr + (k0 + offs_k).to(tl.int64)[:, None] * strides.stride_bw + (col + offs_n)[None, :]
                    in_b = in_k[:, None] & (col + offs_n < n)[None, :]
                    acc = tl.dot(a_tile, tl.load(b_ptrs, mask=in_b, other=0.0), acc)
        # Never store through a descriptor: its box would overwrite the first rows of the next group.
        out_rows = row + offs_m
        out_ptrs = out_ptr + out_rows.to(tl.int64)[:, None] * strides.stride_om + (col + offs_n)[None, :]
        in_out = (out_rows < group_start + group_size)[:, None] & (col + offs_n < n)[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_out)


@triton.jit
def _load_rows(ptr, rows, end, stride, cols, num_cols):
    """Tile of a row-major matrix; zeros from row `end` and column `num_cols` on."""
    ptrs = ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    return tl.load(ptrs, mask=(rows < end)[:, None] & (cols < num_cols)[None, :], other=0.0)


class Operands(NamedTuple):
    """Operands x [R, I] and y [R, J], bf16.

    Attributes:
        x_ptr, y_ptr: x and y.
        num_i, num_j: I and J.
        stride_xm, stride_ym: elements from one row to the next.
    """

    x_ptr: Any
    y_ptr: Any
    num_i: Any
    num_j: Any
    stride_xm: Any
    stride_ym: Any


@ep_kernel(
    x_ptr="*bf16",
    y_ptr="*bf16",
    x_desc="{X}",
    y_desc="{Y}",
    out_ptr="*{OUT}",
    ends_ptr="*i32",
    specialised=("num_i", "num_j", "stride_xm", "stride_ym"),
    num_warps=8,
)
def grouped_wgrad_kernel(
    operands: Operands,
    x_desc,  # with TMA a descriptor of boxes [BLOCK_R, BLOCK_I] of x, else unused
    y_desc,  # with TMA a descriptor of boxes [BLOCK_R, BLOCK_J] of y, else unused
    out_ptr,  # [E, I, J] contiguous; in and out with ACCUMULATE
    groups: Groups,
    TMA: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    tile: WgradTile,
):
    starts, rows = group_rows(groups)
    tiles_i = tl.cdiv(operands.num_i, tile.BLOCK_I)
    tiles_j = tl.cdiv(operands.num_j, tile.BLOCK_J)
    expert = tl.program_id(0) // (tiles_i * tiles_j)
    tile_i, tile_j = in_bands(tl.program_id(0) % (tiles_i * tiles_j), tiles_i, tiles_j, tile.BAND)
    start = pick(starts, expert)
    end = start + pick(rows, expert)
    offs_r = tl.arange(0, tile.BLOCK_R)
    cols_i = tile_i * tile.BLOCK_I + tl.arange(0, tile.BLOCK_I)
    cols_j = tile_j * tile.BLOCK_J + tl.arange(0, tile.BLOCK_J)
    acc = tl.zeros((tile.BLOCK_I, tile.BLOCK_J), dtype=tl.float32)
    if TMA:
        whole = start + (end - start) // tile.BLOCK_R * tile.BLOCK_R
        for r in tl.range(start, whole, tile.BLOCK_R, num_stages=tile.STAGES):
            acc = tl.dot(x_desc.load([r, tile_i * tile.BLOCK_I]).T, y_desc.load([r, tile_j * tile.BLOCK_J]), acc)
        # Load the last rows through pointers: a box would add rows of the next group.
        if whole < end:
            x_tile = _load_rows(operands.x_ptr, whole + offs_r, end, operands.stride_xm, cols_i, operands.num_i)
            y_tile = _load_rows(operands.y_ptr, whole + offs_r, end, operands.stride_ym, cols_j, operands.num_j)
            acc = tl.dot(x_tile.T, y_tile, acc)
    else:
        for r in tl.range(start, end, tile.BLOCK_R, num_stages=tile.STAGES):
            x_tile = _load_rows(operands.x_ptr, r + offs_r, end, operands.stride_xm, cols_i, operands.num_i)
            y_tile = _load_rows(operands.y_ptr, r + offs_r, end, operands.stride_ym, cols_j, operands.num_j)
            acc = tl.dot(x_tile.T, y_tile, acc)
    row = expert.to(tl.int64) * operands.num_i + cols_i
    out_ptrs = out_ptr + row[:, None] * operands.num_j + cols_j[None, :]
    in_out = (cols_i < operands.num_i)[:, None] & (cols_j < operands.num_j)[None, :]
    if ACCUMULATE:
        in_out = in_out & (start < end)
        acc += tl.load(out_ptrs, mask=in_out, other=0.0).to(tl.float32)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_out)
