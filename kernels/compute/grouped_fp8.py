"""Grouped GEMM on MXFP8 operands with fp8 tensor cores, for few rows per expert, where weight bytes dominate the time.

Protocol      equalize_scales: the four 32-blocks of every 128 values of K get the largest of their scales, and
              the values are rebased to it; an e4m3 value keeps all its bits unless it becomes subnormal.
              grouped_fp8: with HARDWARE, tensor cores take the operands unchanged, with one scale per 32 values
              (sm_100; elsewhere the compiler emulates this). Otherwise scales are equal along 128 of K, so a step of
              128 is one fp8 product, which is scaled in float32 before it is added.
              Weights are the rows of the tile and tokens its columns: 16 tokens fill a tile 16 wide. Tiles and
              groups as in grouped_gemm.py.
Layout        a [R, K] e4m3, b [E, N, K] e4m3, both contiguous. MX scales are bytes 0..255 = 2^(s - 127), 255 = NaN:
              [R, K/32] and [E, N, K/32]. Equal scales are float32, [K/128, R] and [E, K/128, N], K/128 rounded up. A
              step reads adjacent scales, and each has 4 bytes, the smallest size that a copy into shared memory moves,
              so scales are prefetched like the operands.
Memory order  Plain loads and stores; the kernels follow each other on one stream.
Progress      No program waits.
Replay        Nothing is kept between calls.
"""

from typing import Any, NamedTuple

import triton.language as tl

from ..device.groups import GemmTile, Groups, group_rows, in_bands, pick
from ..device.mxfp8 import scale_value
from ..spec import ep_kernel

_E4M3 = tl.constexpr("e4m3")


@ep_kernel(qdata_ptr="*fp8e4nv", scale_ptr="*u8", out_ptr="*fp8e4nv", out_scale_ptr="*fp32", specialised=("k",))
def equalize_scales_kernel(
    qdata_ptr,  # [R, K] e4m3
    scale_ptr,  # [R, K/32] uint8
    out_ptr,  # [R, K] e4m3
    out_scale_ptr,  # [R / rows_per_matrix, K/128, rows_per_matrix] float32
    num_rows,
    k,
    rows_per_matrix,
    ROWS: tl.constexpr,
):
    steps = tl.cdiv(k, 128)
    step = tl.program_id(0) % steps
    row = tl.program_id(0) // steps * ROWS + tl.arange(0, ROWS)
    in_rows = row < num_rows
    offs_block = tl.arange(0, 4)
    offs_k = offs_block[:, None] * 32 + tl.arange(0, 32)[None, :]
    matrix = (row // rows_per_matrix).to(tl.int64)
    out_scale_row = out_scale_ptr + matrix * steps * rows_per_matrix + row % rows_per_matrix
    block = step * 4 + offs_block
    in_blocks = in_rows[:, None] & (block * 32 < k)[None, :]
    scale = tl.load(scale_ptr + row.to(tl.int64)[:, None] * (k // 32) + block[None, :], mask=in_blocks, other=0)
    scale = scale.to(tl.int32)
    largest = tl.max(scale, axis=1)
    where_k = (step * 128 + offs_k)[None, :, :]
    at = row.to(tl.int64)[:, None, None] * k + where_k
    values = tl.load(qdata_ptr + at, mask=in_rows[:, None, None] & (where_k < k), other=0.0).to(tl.float32)
    # A block whose scale is more than 2^126 times smaller than the largest would round to zero in any case.
    exponent = tl.maximum(127 + scale - largest[:, None], 0)
    moved = values * (exponent << 23).to(tl.float32, bitcast=True)[:, :, None]
    tl.store(out_ptr + at, moved.to(out_ptr.dtype.element_ty), mask=in_rows[:, None, None] & (where_k < k))
    tl.store(out_scale_row + step * rows_per_matrix, scale_value(largest), mask=in_rows)


class Scales(NamedTuple):
    """Scales of both operands.

    Attributes:
        a_scale_ptr, b_scale_ptr: with HARDWARE [rows, K / 32] uint8; else one float32 per row and 128 elements,
            [K/128, R] for a, [E, K/128, N] for b.
        HARDWARE: the tensor cores apply the scales.
    """

    a_scale_ptr: Any
    b_scale_ptr: Any
    HARDWARE: tl.constexpr


@ep_kernel(
    a="{A}",
    b="{B}",
    a_scale_ptr="*{SCALE}",
    b_scale_ptr="*{SCALE}",
    out_ptr="*{OUT}",
    ends_ptr="*i32",
    specialised=("n", "k"),
    num_warps=None,
)
def grouped_fp8_kernel(
    a,  # [R, K] e4m3: pointer, or with TMA a descriptor of boxes [BLOCK_M, BLOCK_K]
    b,  # [E, N, K] e4m3: pointer, or with TMA a descriptor of [E*N, K], boxes [BLOCK_N, BLOCK_K]
    scales: Scales,
    out_ptr,  # [R, N]
    groups: Groups,
    n,
    k,
    TMA: tl.constexpr,
    tile: GemmTile,
):
    starts, rows = group_rows(groups)
    tiles_n = tl.cdiv(n, tile.BLOCK_N)
    tiles = tl.cdiv(rows, tile.BLOCK_M) * tiles_n
    after = tl.cumsum(tiles, 0)
    offs_m = tl.arange(0, tile.BLOCK_M)
    offs_n = tl.arange(0, tile.BLOCK_N)
    offs_k = tl.arange(0, tile.BLOCK_K)
    offs_s = tl.arange(0, tile.BLOCK_K // 32)
    blocks = k // 32
    steps = tl.cdiv(k, tile.BLOCK_K)
    for number in range(tl.program_id(0), tl.sum(tiles), tl.num_programs(0)):
        group = tl.sum((after <= number).to(tl.int32))
        group_size = pick(rows, group)
        inside = number - pick(after - tiles, group)
        tile_m, tile_n = in_bands(inside, tl.cdiv(group_size, tile.BLOCK_M), tiles_n, tile.BAND)
        end = pick(starts, group) + group_size
        row = end - group_size + tile_m * tile.BLOCK_M
        col = tile_n * tile.BLOCK_N
        expert = tl.minimum(group, groups.num_experts - 1)
        out_rows = row + offs_m
        cols = col + offs_n
        in_m = out_rows < end
        in_n = cols < n
        weights = expert.to(tl.int64) * n + cols
        acc = tl.zeros((tile.BLOCK_N, tile.BLOCK_M), dtype=tl.float32)
        for step in tl.range(0, tl.where(group < groups.num_experts, steps, 0), num_stages=tile.STAGES):
            k0 = step * tile.BLOCK_K
            if TMA:
                a_tile = a.load([row, k0])
                b_tile = b.load([expert * n + col, k0])
            else:
                in_k = (k0 + offs_k < k)[None, :]
                a_ptrs = a + out_rows.to(tl.int64)[:, None] * k + (k0 + offs_k)[None, :]
                a_tile = tl.load(a_ptrs, mask=in_m[:, None] & in_k, other=0.0)
                b_tile = tl.load(
                    b + weights[:, None] * k + (k0 + offs_k)[None, :], mask=in_n[:, None] & in_k, other=0.0
                )
            if scales.HARDWARE:
                at_s = (step * (tile.BLOCK_K // 32) + offs_s)[None, :]
                a_scales = scales.a_scale_ptr + out_rows.to(tl.int64)[:, None] * blocks + at_s
                b_scales = scales.b_scale_ptr + weights[:, None] * blocks + at_s
                a_scale = tl.load(a_scales, mask=in_m[:, None] & (at_s < blocks), other=127)
                b_scale = tl.load(b_scales, mask=in_n[:, None] & (at_s < blocks), other=127)
                acc = tl.dot_scaled(b_tile, b_scale, _E4M3, a_tile.T, a_scale, _E4M3, acc)
            else:
                a_scale = tl.load(scales.a_scale_ptr + step * groups.num_rows + out_rows, mask=in_m, other=0.0)
                b_scale = tl.load(
                    scales.b_scale_ptr + expert.to(tl.int64) * steps * n + step * n + cols, mask=in_n, other=0.0
                )
                # Apply one factor after the other: the product of both may leave float32's range, unlike the result.
                part = tl.dot(b_tile, a_tile.T) * b_scale[:, None]
                acc += part * a_scale[None, :]
        out_ptrs = out_ptr + out_rows.to(tl.int64)[:, None] * n + cols[None, :]
        tl.store(out_ptrs, acc.T.to(out_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])
