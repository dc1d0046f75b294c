"""Requests for the kernels that belong to no layer: grouped GEMM and MXFP8 quantisation, for the sizes in use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triton_ep.kernels.device.codes import MODE_CEIL, MODE_EVEN, MODE_FLOOR, MODE_RCEIL, MODE_RCEIL_SATFINITE
from triton_ep.runtime.plans.compute import (
    EQUALIZE_ROWS,
    FP8_TILES,
    HARDWARE_TILE,
    LARGE,
    PLAIN,
    SMALL,
    WGRAD,
    gemm_constexprs,
    gemm_fp8_constexprs,
    mx_blocks,
    mx_columns,
    wgrad_constexprs,
)
from triton_ep.runtime.plans.experts import products_with_row_scales, rebased_rows, segments_power
from triton_ep.runtime.plans.request import KernelRequest
from triton_ep.runtime.plans.shape import next_power_of_2

_MODES = {
    "rceil": MODE_RCEIL,
    "floor": MODE_FLOOR,
    "ceil": MODE_CEIL,
    "even": MODE_EVEN,
    "rceil_satfinite": MODE_RCEIL_SATFINITE,
}
_BF16_SIZES = ("k", "n", "stride_am", "stride_be", "stride_bw", "stride_om")


def grouped_gemm(
    experts_per_rank: int,
    out: tuple[str, ...] = ("bf16",),
    tma: tuple[bool, ...] = (True,),
    k_major: tuple[bool, ...] = (True, False),
    few_rows: tuple[bool, ...] = (False, True),
    gradients: bool = True,
    fp8: bool = False,
    hardware: bool = False,
) -> list[KernelRequest]:
    """Products of rows in groups with one matrix per group, for sizes that are multiples of 64.

    Arguments:
        out: dtypes of the result: "bf16", "fp16", "fp32".
        tma: read operands in boxes (True), or by addresses if they fit no box (False).
        k_major: weights [E, N, K] (True) or [E, K, N] (False): forward and backward pass need one each.
        few_rows: 64 rows per expert or fewer (True), more (False).
        gradients: also of weights.
        fp8: also MXFP8 operands with equal scales, or one per row; hardware: also for tensor cores that apply scales
            (sm_100).
    """
    found = []
    for dtype in out:
        for by_box in tma:
            for tile in sorted({(SMALL if few else LARGE) if by_box else PLAIN for few in few_rows}):
                for major in k_major:
                    constexprs = gemm_constexprs(experts_per_rank, tile, by_box, major)
                    box = f"[{tile.n},{tile.k}]" if major else f"[{tile.k},{tile.n}]"
                    operands = {"a": f"tensordesc<bf16[{tile.m},{tile.k}]>", "b": f"tensordesc<bf16{box}>"}
                    types = (operands if by_box else {"a": "*bf16", "b": "*bf16"}) | {"out_ptr": f"*{dtype}"}
                    found.append(KernelRequest("grouped_gemm_kernel", constexprs, types, _BF16_SIZES))
            if gradients:
                found.append(_wgrad(experts_per_rank, by_box, dtype))
            if fp8:
                found += _fp8(experts_per_rank, by_box, dtype, hardware)
                found += products_with_row_scales(experts_per_rank, dtype, by_box)
    if fp8:
        found += rebased_rows(has_offsets=False)
        found.append(KernelRequest("tile_table_kernel", {"SP": segments_power(experts_per_rank)}))
        found.append(KernelRequest("equalize_scales_kernel", {"ROWS": EQUALIZE_ROWS}, aligned=("k",)))
    return found


def _wgrad(experts: int, tma: bool, out: str) -> KernelRequest:
    boxes = {"x_desc": f"tensordesc<bf16[{WGRAD.k},{WGRAD.m}]>", "y_desc": f"tensordesc<bf16[{WGRAD.k},{WGRAD.n}]>"}
    types = (boxes if tma else {"x_desc": "*bf16", "y_desc": "*bf16"}) | {"out_ptr": f"*{out}"}
    sizes = ("num_i", "num_j", "stride_xm", "stride_ym")
    return KernelRequest("grouped_wgrad_kernel", wgrad_constexprs(experts, WGRAD, tma), types, sizes)


def _fp8(experts: int, tma: bool, out: str, hardware: bool) -> Iterator[KernelRequest]:
    for scaling, tile in [*((False, tile) for tile in FP8_TILES), *([(True, HARDWARE_TILE)] if hardware else [])]:
        scale = "*u8" if scaling else "*fp32"
        types = {"a": "*fp8e4nv", "b": "*fp8e4nv"}
        if tma:
            types = {"a": f"tensordesc<fp8e4nv[{tile.m},128]>", "b": f"tensordesc<fp8e4nv[{tile.n},128]>"}
        types |= {"a_scale_ptr": scale, "b_scale_ptr": scale, "out_ptr": f"*{out}"}
        constexprs = gemm_fp8_constexprs(experts, tile, tma, scaling)
        yield KernelRequest("grouped_fp8_kernel", constexprs, types, ("k", "n"), num_warps=tile.warps)


def mxfp8(
    experts_per_rank: int,
    values: tuple[str, ...] = ("bf16",),
    modes: tuple[str, ...] = ("rceil",),
    e5m2: tuple[bool, ...] = (False,),
    offsets: tuple[bool, ...] = (True,),
) -> list[KernelRequest]:
    """Quantisation to MXFP8 along rows, columns and both, and back, for hidden sizes that are multiples of 16.

    Arguments:
        values: dtypes of the values that are quantised: "bf16", "fp16", "fp32".
        modes: how scales are chosen; `integrations.te` uses "rceil_satfinite".
        e5m2: elements are e5m2 (True), e4m3 (False).
        offsets: columns are quantised inside groups of rows (True), or over all rows (False).
    """
    found = []
    blocks, tile = {"BLOCKS": mx_blocks(1, interpreted=False)}, mx_columns(128, interpreted=False)
    for value in values:
        for wide in e5m2:
            element = "*fp8e5" if wide else "*fp8e4nv"
            found.append(
                KernelRequest("dequantize_rows_kernel", blocks, {"elements_ptr": element, "out_ptr": f"*{value}"})
            )
            for grouped in offsets:
                groups: dict[str, Any] = {"HAS_OFFSETS": grouped, "GP": next_power_of_2(experts_per_rank + 1)}
                if not grouped:
                    groups["GP"] = 1
                # Without offsets, a pointer to the rows stands in for them.
                stand_in = {} if grouped else {"offsets_ptr": f"*{value}"}
                back = {} if grouped else {"offsets_ptr": element}
                by_columns = {"elements_ptr": element, "out_ptr": f"*{value}"} | back
                found.append(KernelRequest("dequantize_columns_kernel", groups | tile, by_columns, ("hidden",)))
                for mode in modes:
                    how = {"MODE": _MODES[mode], "E5M2": wide}
                    types = {"x_ptr": f"*{value}", "elements_ptr": element}
                    found.append(KernelRequest("quantize_rows_kernel", how | blocks, types))
                    columns = KernelRequest(
                        "quantize_columns_kernel", how | groups | tile, types | stand_in, ("hidden",)
                    )
                    both = {"x_ptr": f"*{value}", "row_elements_ptr": element, "column_elements_ptr": element}
                    found += [
                        columns,
                        KernelRequest("quantize_both_kernel", how | groups | tile, both | stand_in, ("hidden",)),
                    ]
    return found
