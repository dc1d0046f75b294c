"""Launchers of the grouped GEMM in bf16 (kernels/compute/grouped_gemm.py): rows in groups, one matrix per group.

The entry point is `ops.grouped_gemm`, which also takes MX operands.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from triton_ep.errors import InputError
from triton_ep.ops.strides import dense
from triton_ep.ops.tuning import multiprocessors
from triton_ep.runtime.launch import INTERPRETING, Boxes, launch
from triton_ep.runtime.plans import Plan
from triton_ep.runtime.plans.compute import (
    LARGE,
    PLAIN,
    SMALL,
    WGRAD,
    WGRAD_ADDED,
    Tile,
    gemm_constexprs,
    wgrad_constexprs,
)

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


INTERPRETED = Tile(32, 64, 64, 1)
WGRAD_INTERPRETED = Tile(64, 64, 32, 1)


def tile_for(num_rows: int, num_experts: int, tma: bool) -> Tile:
    """Tile by the mean rows of a group, of which the host knows only the upper bound `num_rows / num_experts`.

    Up to 64 rows per group, any tile reads the weights once per group; narrower tiles then fill the GPU more evenly
    and keep more bytes in flight.
    """
    if INTERPRETING:
        return INTERPRETED
    if not tma:
        return PLAIN
    return SMALL if num_rows <= 64 * num_experts else LARGE


def group_ends(offs: torch.Tensor, num_experts: int, num_rows: int | None = None) -> torch.Tensor:
    """[E] int32, the end of each group (one past its last row), from [E] ends or [E + 1] starts with the total last.

    Raises:
        InputError: another shape or dtype. Given `num_rows`, on the CPU also starts that do not begin with 0, or ends
            that decrease or lie past these rows; to see that on a GPU, the host would have to wait for it.
    """
    if not isinstance(offs, torch.Tensor):
        raise InputError(f"offs is a {type(offs).__name__}; it must be a tensor [E] int32 on the device of the rows.")
    if offs.dtype not in (torch.int32, torch.int64) or offs.ndim != 1:
        raise InputError(f"offs must be 1-D int32 or int64, it is {offs.dtype} {list(offs.shape)}.")
    if offs.shape[0] not in (num_experts, num_experts + 1):
        raise InputError(
            f"offs has {offs.shape[0]} entries; {num_experts} experts need {num_experts} ends or "
            f"{num_experts + 1} starts with the number of rows last."
        )
    # A compiler's tensors, and fake ones, have no values.
    known = num_rows is not None and type(offs) is torch.Tensor and offs.device.type == "cpu"
    if known and not torch.compiler.is_compiling():
        bounds = offs.tolist()
        starts = bounds if len(bounds) > num_experts else [0, *bounds]
        if starts[0] != 0 or starts[-1] > num_rows or any(first > second for first, second in pairwise(starts)):
            raise InputError(
                f"offs is {bounds} for {num_rows} rows; groups must begin at row 0, follow one another, and end at "
                f"{num_rows} or before."
            )
    return offs[offs.shape[0] - num_experts :].to(torch.int32).contiguous()


def _row_major(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else dense(x.contiguous())


def _k_major(b_t: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The weights with one consecutive dimension, and whether that is K; copies them only if neither is consecutive."""
    if b_t.stride(1) == 1 and b_t.stride(2) >= b_t.shape[1]:
        return b_t, True
    if b_t.stride(2) == 1 and b_t.stride(1) >= b_t.shape[2]:
        return b_t, False
    return dense(b_t.contiguous()), False


def boxes(matrix: torch.Tensor, rows: int, width: int, stride: int, box: list[int]) -> Boxes:
    """Boxes over a row-major matrix [rows, width] that starts at the address of `matrix`."""
    return Boxes(matrix, [rows, width], [stride, 1], box)


def fits_tma(*operands: tuple[torch.Tensor, int]) -> bool:
    """True if starts and rows are 16-byte aligned, as TMA requires. operands: tensor, row stride in elements."""
    # Hot path: a loop, because a generator takes longer.
    odd = 0
    for tensor, stride in operands:
        odd |= tensor.data_ptr() | stride * tensor.element_size()
    return odd % 16 == 0


def programs(device: torch.device) -> int:
    """Programs of a persistent kernel: one per multiprocessor; two in the interpreter."""
    return 2 if INTERPRETING else multiprocessors(device)


def _check(name: str, x: torch.Tensor, ndim: int, like: torch.Tensor) -> None:
    if x.ndim != ndim or x.dtype != torch.bfloat16:
        raise InputError(f"{name} must be {ndim}-D bfloat16, it is {x.dtype} {list(x.shape)}.")
    if x.device != like.device:
        raise InputError(f"{name} is on {x.device}, the rows are on {like.device}: move one of them.")


def bf16_gemm(
    a: torch.Tensor,
    b_t: torch.Tensor,
    offs: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
    tma: bool | None = None,
) -> torch.Tensor:
    """[R, N] `out_dtype`: rows of group e times b_t[e]; zeros in the rows past the last group.

    a: [R, K] bf16. b_t: [E, K, N] bf16; consecutive K or N saves a copy. offs: on the device, see `group_ends`.
    tile: None = by size. tma: None = if sizes and addresses allow.

    Raises:
        InputError: shapes, dtypes or devices that do not fit each other.
    """
    _check("a", a, 2, a)
    _check("b_t", b_t, 3, a)
    num_rows, k = a.shape
    num_experts, _, n = b_t.shape
    if b_t.shape[1] != k:
        raise InputError(f"a has K = {k}, b_t has K = {b_t.shape[1]}.")
    if out_dtype not in OUT_DTYPES:
        raise InputError(f"out_dtype is {out_dtype}, choose from {OUT_DTYPES}.")
    ends = group_ends(offs, num_experts, num_rows)
    if ends.device != a.device:
        raise InputError(f"offs is on {ends.device}, the rows are on {a.device}: move one of them.")
    out = a.new_empty(num_rows, n, dtype=out_dtype)
    if out.numel() == 0:
        return out
    if k == 0 or num_experts == 0:
        return out.zero_()
    a = _row_major(a)
    b_t, k_major = _k_major(b_t)
    wide = b_t.stride(2 if k_major else 1)
    rows_of_b = n if k_major else k
    dense = b_t.stride(0) == rows_of_b * wide or num_experts == 1
    # A box that crosses K would read the next expert's rows. All tiles have the same k.
    able = dense and k % LARGE.k == 0 and fits_tma((a, a.stride(0)), (b_t, wide))
    tma = able and not INTERPRETING if tma is None else tma
    if tma and not able:
        raise InputError(f"these operands do not fit TMA: K = {k}, strides {a.stride()} and {b_t.stride()}.")
    tile = tile or tile_for(num_rows, num_experts, tma)
    operands: tuple[Any, Any] = (a, b_t)
    if tma:
        box = [tile.n, tile.k] if k_major else [tile.k, tile.n]
        operands = (
            boxes(a, num_rows, k, a.stride(0), [tile.m, tile.k]),
            boxes(b_t, num_experts * rows_of_b, k if k_major else n, wide, box),
        )
    constexprs = gemm_constexprs(num_experts, tile, tma, k_major)
    launch(
        Plan("grouped_gemm_kernel", constexprs),
        programs(a.device),
        a=operands[0],
        b=operands[1],
        out_ptr=out,
        ends_ptr=ends,
        num_rows=num_rows,
        n=n,
        k=k,
        num_experts=num_experts,
        stride_am=a.stride(0),
        stride_be=b_t.stride(0),
        stride_bw=wide,
        stride_om=out.stride(0),
    )
    return out


def bf16_wgrad(
    x: torch.Tensor,
    y: torch.Tensor,
    offs: torch.Tensor,
    num_experts: int,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    tile: Tile | None = None,
    tma: bool | None = None,
) -> torch.Tensor:
    """[E, I, J] `out_dtype`: x_e^T @ y_e over the rows of each group; zeros for an empty group.

    x: [R, I] bf16, y: [R, J] bf16. x = dY and y = A give the gradient of W [E, N, K]; x = A and y = dY give the
    gradient of its transpose. out: [E, I, J] contiguous; its dtype overrides `out_dtype`; `accumulate` adds the
    products to its values. tile, tma: as in `bf16_gemm`.

    Raises:
        InputError: shapes, dtypes or devices that do not fit each other.
    """
    _check("x", x, 2, x)
    _check("y", y, 2, x)
    if y.shape[0] != x.shape[0]:
        raise InputError(f"x has {x.shape[0]} rows, y has {y.shape[0]}.")
    out_dtype = out_dtype if out is None else out.dtype
    if out_dtype not in OUT_DTYPES:
        raise InputError(f"out_dtype is {out_dtype}, choose from {OUT_DTYPES}.")
    ends = group_ends(offs, num_experts, x.shape[0])
    if ends.device != x.device:
        raise InputError(f"offs is on {ends.device}, the rows are on {x.device}: move one of them.")
    (num_rows, num_i), num_j = x.shape, y.shape[1]
    if accumulate and out is None:
        raise InputError("accumulate=True adds to out, which is missing.")
    if out is None:
        out = x.new_empty(num_experts, num_i, num_j, dtype=out_dtype)
    elif out.shape != (num_experts, num_i, num_j) or not out.is_contiguous():
        raise InputError(f"out is {list(out.shape)}; it must be contiguous [{num_experts}, {num_i}, {num_j}].")
    if out.numel() == 0 or num_rows == 0:
        return out if accumulate else out.zero_()
    x, y = _row_major(x), _row_major(y)
    tile = tile or (WGRAD_INTERPRETED if INTERPRETING else WGRAD_ADDED if accumulate else WGRAD)
    able = fits_tma((x, x.stride(0)), (y, y.stride(0)))
    tma = able and not INTERPRETING if tma is None else tma
    if tma and not able:
        raise InputError(f"these operands do not fit TMA: strides {x.stride()} and {y.stride()}.")
    descriptors: tuple[Any, Any] = (x, y)
    if tma:
        descriptors = (
            boxes(x, num_rows, num_i, x.stride(0), [tile.k, tile.m]),
            boxes(y, num_rows, num_j, y.stride(0), [tile.k, tile.n]),
        )
    constexprs = wgrad_constexprs(num_experts, tile, tma, accumulate)
    launch(
        Plan("grouped_wgrad_kernel", constexprs),
        num_experts * -(-num_i // tile.m) * -(-num_j // tile.n),
        x_ptr=x,
        y_ptr=y,
        x_desc=descriptors[0],
        y_desc=descriptors[1],
        out_ptr=out,
        ends_ptr=ends,
        num_rows=num_rows,
        num_i=num_i,
        num_j=num_j,
        num_experts=num_experts,
        stride_xm=x.stride(0),
        stride_ym=y.stride(0),
    )
    return out
