"""Tile shapes, constexprs and kernel requests of the experts' backward pass (kernels/experts)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from triton_ep.kernels.device.codes import TILE_ROWS
from triton_ep.runtime.plans.compute import WGRAD as MASKED_WGRAD
from triton_ep.runtime.plans.compute import WGRAD_ADDED as MASKED_WGRAD_ADDED
from triton_ep.runtime.plans.compute import Tile, wgrad_constexprs
from triton_ep.runtime.plans.experts import ProductTile, activation_constexprs
from triton_ep.runtime.plans.request import KernelRequest
from triton_ep.runtime.plans.shape import Plan, next_power_of_2

WGRAD = Tile(128, 128, 64, 3, 4)
"""Rows and columns of a weight, and rows of its segment per step; segments hold multiples of the latter. Two programs
share a multiprocessor: one stores a tile, or waits for a product, while the other multiplies. Next to both there is
room for a program of `exchange.BESIDE_PRODUCTS`."""
WGRAD_ADDED = Tile(128, 128, 32, 5, 4)
"""Tile for adding to float32: more loads on their way. Two programs take all registers."""
WGRAD_ADDED_BESIDE = Tile(128, 128, 64, 5, 4)
"""The same for one program per multiprocessor, which leaves room. It takes 1.2 times as long (one H200, 64 experts)."""
WGRAD_BAND = 32
WGRAD_INTERPRETED = Tile(64, 64, 64, 1)
WEIGHTED_ROWS, WEIGHTED_COLUMNS = 2, 1024
BIAS_ROWS, BIAS_COLUMNS = 32, 128
ROW_WEIGHTS, ROW_WEIGHTS_COLUMNS = 16, 256
ARRIVAL_COLUMNS, PADDING_SHARES = 1024, 16

DOWN_BF16 = ProductTile(128, 256, 64, 4)
DOWN_FP8 = ProductTile(128, 128, 128, 3, 4, per_sm=2, promote=True, split=True)
DOWN_FAST = ProductTile(128, 256, 128, 4)
DOWN_INTERPRETED = ProductTile(128, 32, 128, 1, promote=True)
DOWN_INTERPRETED_FP8 = ProductTile(128, 32, 128, 1, promote=True, split=True)
DOWN_COLUMNS, DOWN_COLUMNS_WEIGHTED = 32, 16
"""Columns of a tile that pass through the activation at once, and of a whole tile if rows have weights. With more,
registers spill in the loop over the sum. With fewer, tiles of two halves take 7 % longer."""


@functools.cache
def weight_gradient(num_experts: int, accumulate: bool, beside: bool, interpreted: bool) -> tuple[Plan, Tile, int]:
    """Plan of the gradient of weights for segments of whole steps, its tile, and its programs per multiprocessor.

    beside: leave room on every multiprocessor for a program of `exchange.BESIDE_PRODUCTS`.
    """
    tile, programs = WGRAD, 2
    if interpreted:
        tile, programs = WGRAD_INTERPRETED, 1
    elif accumulate:
        tile, programs = (WGRAD_ADDED_BESIDE, 1) if beside else (WGRAD_ADDED, 2)
    constexprs = {
        "ACCUMULATE": accumulate,
        "EP": next_power_of_2(num_experts),
        "BLOCK_I": tile.m,
        "BLOCK_J": tile.n,
        "BLOCK_R": tile.k,
        "BAND": WGRAD_BAND,
        "STAGES": tile.stages,
    }
    return Plan("weight_gradient_kernel", constexprs, tile.warps), tile, programs


def down_tile(fp8: bool, fast: bool, interpreted: bool) -> ProductTile:
    """Tile of `down_dgrad` for operands of this kind."""
    if interpreted:
        return DOWN_INTERPRETED_FP8 if fp8 else DOWN_INTERPRETED
    return (DOWN_FAST if fast else DOWN_FP8) if fp8 else DOWN_BF16


@functools.cache
def down_dgrad(tile: ProductTile, fp8: bool, k_major: bool, has_weights: bool, activation: tuple[Any, ...]) -> Plan:
    """Gradient of the rows of the second product and of the activation; activation: arguments of
    `activation_constexprs`."""
    columns = DOWN_COLUMNS_WEIGHTED if has_weights and not tile.split else DOWN_COLUMNS
    constexprs = {
        "FP8": fp8,
        "PROMOTE": tile.promote,
        "K_MAJOR": k_major,
        "HAS_WEIGHTS": has_weights,
        **activation_constexprs(*activation),
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "LEVELS": (tile.n // columns).bit_length() - 1,
        "SPLIT": tile.split,
        "STAGES": tile.stages,
        "FLATTEN": tile.flatten,
    }
    return Plan("down_dgrad_kernel", constexprs, tile.warps)


@functools.cache
def row_weight_gradient(hidden: int, has_bias: bool, fp8: bool, interpreted: bool) -> Plan:
    """Gradient of the rows' weights, from the shares of tiles and the contribution of a bias."""
    rows, block = ROW_WEIGHTS, ROW_WEIGHTS_COLUMNS
    if interpreted:
        rows, block = TILE_ROWS, min(next_power_of_2(hidden), 256)
    constexprs = {"HAS_BIAS": has_bias, "FP8": fp8 and has_bias, "ROWS": rows, "BLOCK_H": block}
    return Plan("row_weight_gradient_kernel", constexprs)


@functools.cache
def bias_gradient(n: int, has_weights: bool, interpreted: bool) -> Plan:
    """Gradient of a bias: sums of the rows of segments."""
    rows, block = (64, min(next_power_of_2(n), 256)) if interpreted else (BIAS_ROWS, BIAS_COLUMNS)
    return Plan("bias_gradient_kernel", {"HAS_WEIGHTS": has_weights, "BLOCK_R": rows, "BLOCK_N": block})


@functools.cache
def weighted_rows(hidden: int, mx: bool, offs: bool, interpreted: bool) -> Plan:
    """Gradients of a weighted sum of rows."""
    rows, block = WEIGHTED_ROWS, WEIGHTED_COLUMNS
    if interpreted:
        rows, block = 32, min(max(next_power_of_2(hidden), 32), 1024)
    constexprs = {"IS_MX": mx, "HAS_OFFS": offs, "ROWS": rows, "BLOCK_H": block}
    return Plan("weighted_rows_backward_kernel", constexprs)


@functools.cache
def expand_arrivals(hidden: int, interpreted: bool) -> Plan:
    """Copy arrived rows to the rows of their assignments; also next to products (`BESIDE_PRODUCTS` in exchange.py)."""
    shares, rows, block = (1, 128, next_power_of_2(hidden)) if interpreted else (PADDING_SHARES, 1, ARRIVAL_COLUMNS)
    constexprs = {"SHARES": shares, "ROWS": rows, "BLOCK_H": block}
    return Plan("expand_arrivals_kernel", constexprs, side_by_side=True)


# --- requests for an ahead-of-time library ----------------------------------------------------------------------


def experts_backward(
    experts_per_rank: int,
    arithmetic: tuple[str, ...] = ("bf16", "fp8"),
    weights: tuple[bool, ...] = (True,),
    aligned: tuple[bool, ...] = (True,),
    main_grad: tuple[bool, ...] = (False, True),
    bias: str | None = None,
    kind: str = "silu",
    gated: bool = True,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
) -> list[KernelRequest]:
    """Gradients of the experts of a MoE layer and of a weighted combine, for sizes that are multiples of 64.

    Arguments:
        arithmetic: "bf16"; "fp8" and "fast": MXFP8 with row scales, summed in float32 or in tensor cores.
        weights: rows have weights. aligned: segments are multiples of 128 rows.
        main_grad: add gradients of weights to existing float32 ones (True), or create new ones (False).
        bias: dtype of biases, "bf16" or "fp32"; None: no biases.
        kind, gated, limit, alpha, up_offset: the activation.
    """
    activation = (kind, gated, limit, alpha, up_offset)
    found = []
    for how in arithmetic:
        for weighted in weights:
            found.append(_down(how, weighted, activation))
            if weighted:
                found.append(_row_weights(how != "bf16", bias))
    for whole in aligned:
        for added in main_grad:
            if whole:
                found += [_weights(experts_per_rank, added, beside) for beside in (False, True)]
            else:
                found.append(_masked_weights(experts_per_rank, added))
    if bias is not None:
        for weighted in sorted({False, *weights}):
            types = {"weights_ptr": "*fp32" if weighted else "*bf16"}
            found.append(_request(bias_gradient(1024, weighted, interpreted=False), types, ("n",)))
    if "bf16" in arithmetic:
        sizes = dict.fromkeys(("hidden", "first", "width"), 16)
        found.append(KernelRequest.of(expand_arrivals(1024, interpreted=False), {}, sizes))
    for mx in (False, True):
        for offs in (False, True):
            types = {"dy_ptr": "*fp8e4nv" if mx else "*bf16", "dy_scale_ptr": "*u8" if mx else "*bf16"}
            types |= {"y_ptr": "*bf16", "grad_ptr": "*bf16", "offs_ptr": "*i32" if offs else "*fp32"}
            found.append(_request(weighted_rows(1024, mx, offs, interpreted=False), types, ("hidden",)))
    return list({request.signature(): request for request in found}.values())


def _request(
    plan: Plan, types: Mapping[str, str], aligned: tuple[str, ...], unaligned: tuple[str, ...] = ()
) -> KernelRequest:
    return KernelRequest(plan.kernel, plan.constexprs, types, aligned, unaligned=unaligned, num_warps=plan.num_warps)


def _down(how: str, weighted: bool, activation: tuple[Any, ...]) -> KernelRequest:
    fp8 = how != "bf16"
    tile = down_tile(fp8, how == "fast", interpreted=False)
    element, scale = ("fp8e4nv", "*fp32") if fp8 else ("bf16", "*i32")
    types = {
        "dy": f"tensordesc<{element}[{tile.box_rows},{tile.k}]>",
        "w": f"tensordesc<{element}[1,{f'{tile.n},{tile.k}' if fp8 else f'{tile.k},{tile.n}'}]>",
        "dy_scale_ptr": scale,
        "w_scale_ptr": scale,
    }
    if not weighted:
        types |= {"weights_ptr": "*i32", "shares_ptr": "*i32"}
    return _request(down_dgrad(tile, fp8, fp8, weighted, activation), types, ("ffn", "hidden"))


def _row_weights(fp8: bool, bias: str | None) -> KernelRequest:
    plan = row_weight_gradient(1024, bias is not None, fp8, interpreted=False)
    types = {
        "dy_ptr": "*i32" if bias is None else "*fp8e4nv" if fp8 else "*bf16",
        "dy_scale_ptr": "*fp32" if fp8 and bias is not None else "*i32",
        "bias_ptr": "*i32" if bias is None else f"*{bias}",
    }
    return _request(plan, types, ("hidden",))


def _weights(experts: int, added: bool, beside: bool) -> KernelRequest:
    plan, tile, _ = weight_gradient(experts, added, beside, interpreted=False)
    types = {
        "x": f"tensordesc<bf16[{tile.k},{tile.m}]>",
        "y": f"tensordesc<bf16[{tile.k},{tile.n}]>",
        "out": "*fp32" if added else f"tensordesc<bf16[1,{tile.m},{tile.n // 2}]>",
    }
    return _request(plan, types, ("num_i", "num_j", "stride_e", "stride_i"))


def _masked_weights(experts: int, added: bool) -> KernelRequest:
    """Gradient of weights for segments of any length. `ends_ptr` is offs[1:], hence unaligned."""
    tile = MASKED_WGRAD_ADDED if added else MASKED_WGRAD
    types = {
        "x_desc": f"tensordesc<bf16[{tile.k},{tile.m}]>",
        "y_desc": f"tensordesc<bf16[{tile.k},{tile.n}]>",
        "out_ptr": "*fp32" if added else "*bf16",
    }
    plan = Plan("grouped_wgrad_kernel", wgrad_constexprs(experts, tile, True, added))
    return _request(plan, types, ("num_i", "num_j", "stride_xm", "stride_ym"), ("ends_ptr",))
