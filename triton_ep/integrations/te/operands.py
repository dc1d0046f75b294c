"""Operands of a linear layer's products, the dimension along which each is quantised, and the products.

For y = x w^T with x [M, K] and w [N, K], of one matrix or of one per group of rows:

    y  = x w^T     x rowwise, w rowwise          blocks along K
    dx = dy w      dy rowwise, w columnwise      blocks along N
    dw = dy^T x    dy and x columnwise           blocks along M, starting again in each group

An emulated product runs on the dequantised operands: in bf16 on GPUs, which holds an e4m3 or e5m2 value times a power
of two exactly; in float32 on CPUs. Sums are float32; a bias is added to the sum, and the result is rounded once.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.nn.functional import pad

from triton_ep.errors import InputError
from triton_ep.integrations.te import arithmetic, support
from triton_ep.integrations.te.parts import FP8_DTYPES, flatten
from triton_ep.integrations.te.storage import MXFP8TensorStorage
from triton_ep.mx.swizzle import to_blocked
from triton_ep.mx.tensor import SCALE_DTYPE, MXTensor
from triton_ep.ops.grouped_gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Quantised:
    """A matrix in MXFP8, blocked along rows or columns.

    Attributes:
        data: [M, N] bytes of elements. scale: [M, N / 32] or, columnwise, one row per block.
        elem_dtype: format of elements.
        columnwise: blocks lie along columns.
        offsets: [groups + 1] int32 row offsets; columnwise blocks start again at each; None: no groups.
    """

    data: torch.Tensor
    scale: torch.Tensor
    elem_dtype: torch.dtype
    columnwise: bool = False
    offsets: torch.Tensor | None = None

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantised values [M, N] in `dtype`."""
        if self.offsets is not None:
            return arithmetic.dequantize_groups(self.data, self.scale, self.offsets, self.elem_dtype, dtype)
        dequantize = arithmetic.dequantize_columns if self.columnwise else arithmetic.dequantize_rows
        return dequantize(self.data, self.scale, self.elem_dtype, dtype)


Operand = torch.Tensor | Quantised


Given = torch.Tensor | MXFP8TensorStorage
"""An input of a module: a tensor, in high precision or in MXFP8, or the storage of one in MXFP8."""


def quantised_already(x: Given) -> bool:
    """Whether a tensor is in MXFP8."""
    return isinstance(x, MXTensor | MXFP8TensorStorage)


def values_of(x: Given, dtype: torch.dtype) -> torch.Tensor:
    """Values [M, N] in `dtype` of a tensor that may be in MXFP8."""
    if isinstance(x, MXTensor):
        return flatten(x.dequantize(dtype))
    if isinstance(x, MXFP8TensorStorage):
        return flatten(x.dequantized(dtype))
    return flatten(x).to(dtype)


def rows_of(x: Given, elem_dtype: torch.dtype) -> Quantised:
    """Quantise x [..., N] along rows; an MXFP8 tensor along rows is returned unchanged."""
    if isinstance(x, MXTensor):
        if x.block_dim == -1 and x.block_size == 32 and x.elem_dtype in FP8_DTYPES:
            return Quantised(flatten(x.qdata.view(torch.uint8)), flatten(x.scale.view(torch.uint8)), x.qdata.dtype)
        x = x.dequantize()
    elif isinstance(x, MXFP8TensorStorage):
        if x._rowwise_data is not None:
            return Quantised(*x.compact(False), x._fp8_dtype)
        x = x.dequantized(torch.float32)
    return Quantised(*arithmetic.quantize_rows(flatten(x), elem_dtype), elem_dtype)


def columns_of(x: Given, elem_dtype: torch.dtype, offsets: torch.Tensor | None) -> Quantised:
    """Quantise x [..., N] along columns; blocks start again in each group."""
    if isinstance(x, MXFP8TensorStorage) and x._columnwise_data is not None and offsets is None:
        return Quantised(*x.compact(True), x._fp8_dtype, True)
    values = values_of(x, x.dtype if isinstance(x, torch.Tensor) else torch.float32)
    if offsets is None:
        return Quantised(*arithmetic.quantize_columns(values, elem_dtype), elem_dtype, True)
    return Quantised(*arithmetic.quantize_groups(values, offsets, elem_dtype), elem_dtype, True, offsets)


def weight_rows(weights: Sequence[torch.Tensor], tiles: bool) -> Quantised:
    """Concatenate weights [N, K] along N, quantised along K."""
    return _weights(weights, tiles, False)


def weight_columns(weights: Sequence[torch.Tensor], tiles: bool) -> Quantised:
    """Concatenate weights [N, K] along N, quantised along N."""
    return _weights(weights, tiles, True)


def _weights(weights: Sequence[torch.Tensor], tiles: bool, columnwise: bool) -> Quantised:
    if all(isinstance(w, MXFP8TensorStorage) for w in weights):
        parts = [columns_of(w, E4M3, None) if columnwise else rows_of(w, E4M3) for w in weights]
        if len(parts) == 1:
            return parts[0]
        return Quantised(
            torch.cat([part.data for part in parts]),
            torch.cat([part.scale for part in parts]),
            parts[0].elem_dtype,
            columnwise,
        )
    stacked = one_below_the_other(weights)
    if tiles:
        data, scale = arithmetic.quantize_tiles(stacked, E4M3)
        return Quantised(data, scale.repeat_interleave(32, 1 if columnwise else 0), E4M3, columnwise)
    quantize = arithmetic.quantize_columns if columnwise else arithmetic.quantize_rows
    return Quantised(*quantize(stacked, E4M3), E4M3, columnwise)


def one_below_the_other(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate E matrices [N, K] to [E * N, K], without a copy if they are adjacent in one storage."""
    first = weights[0]
    if len(weights) == 1:
        return first
    step = first.numel() * first.element_size()
    start = first.data_ptr()
    together = all(
        w.is_contiguous()
        and w.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and w.data_ptr() == start + index * step
        for index, w in enumerate(weights)
    )
    if together:
        return first.as_strided((len(weights) * first.shape[0], first.shape[1]), (first.shape[1], 1))
    return torch.cat(list(weights))


# --- products -------------------------------------------------------------------------------------------


def product(a: Operand, b: Operand, a_across: bool, b_across: bool) -> torch.Tensor:
    """float32 [I, J]: a times b^T. `a_across` (`b_across`): a (b) is given transposed, as [K, I] ([K, J]).

    In MXFP8, blocks must lie along K.
    """
    if isinstance(a, Quantised) and isinstance(b, Quantised) and _native(a, b):
        return _scaled_mm(a, b)
    dtype = _compute_dtype(a, b)
    left = a.values(dtype) if isinstance(a, Quantised) else a.to(dtype)
    right = b.values(dtype) if isinstance(b, Quantised) else b.to(dtype)
    left = left.t() if a_across else left
    right = right if b_across else right.t()
    if left.is_cuda and dtype != torch.float32 and left.numel() and right.numel():
        # float32 results, because torch may add partial sums of a bf16 product in bf16.
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left.float(), right.float())


def _compute_dtype(a: Operand, b: Operand) -> torch.dtype:
    given = [x.dtype for x in (a, b) if isinstance(x, torch.Tensor)]
    of = a.data if isinstance(a, Quantised) else a
    if not of.is_cuda or torch.float32 in given or torch.float16 in given:
        return torch.float32  # fp16 could not hold the other operand's range
    return torch.bfloat16


def _native(a: Quantised, b: Quantised) -> bool:
    if not a.data.is_cuda or support.mxfp8_mode(a.data.device) != "native":
        return False
    both_e5m2 = a.elem_dtype == b.elem_dtype == torch.float8_e5m2
    return not both_e5m2 and all(size % 32 == 0 and size for x in (a, b) for size in x.data.shape)


def _scaled_mm(a: Quantised, b: Quantised) -> torch.Tensor:
    """The product on tensor cores with MX scales (sm_100)."""
    operands = []
    for x in (a, b):
        data, scale = (x.data.t(), x.scale.t()) if x.columnwise else (x.data, x.scale)
        operands.append((data.contiguous().view(x.elem_dtype), to_blocked(scale).view(SCALE_DTYPE)))
    (left, left_scale), (right, right_scale) = operands
    return torch._scaled_mm(left, right.t(), scale_a=left_scale, scale_b=right_scale, out_dtype=torch.float32)


def grouped_forward(x: Operand, w: Operand, ends: torch.Tensor, experts: int, out_dtype: torch.dtype) -> torch.Tensor:
    """[R, N] `out_dtype`: rows of group e times w[e]^T; w [E * N, K]. Zeros past the last group."""
    left, right = _group_values(x), _group_values(w).unflatten(0, (experts, -1))
    if left.dtype == right.dtype == torch.bfloat16:
        return grouped_gemm(left, right.transpose(-2, -1), ends, out_dtype=out_dtype)
    out = left.new_zeros(left.shape[0], right.shape[1], dtype=out_dtype)
    for expert, (first, end) in enumerate(_bounds(ends, left.shape[0])):
        out[first:end] = product(left[first:end], right[expert], False, False).to(out_dtype)
    return out


def grouped_dgrad(dy: Operand, w: Operand, ends: torch.Tensor, experts: int, out_dtype: torch.dtype) -> torch.Tensor:
    """[R, K] `out_dtype`: rows of group e of dy times w[e]. Zeros past the last group."""
    left, right = _group_values(dy), _group_values(w).unflatten(0, (experts, -1))
    if left.dtype == right.dtype == torch.bfloat16:
        return grouped_gemm_dgrad(left, right.transpose(-2, -1), ends, out_dtype=out_dtype)
    out = left.new_zeros(left.shape[0], right.shape[2], dtype=out_dtype)
    for expert, (first, end) in enumerate(_bounds(ends, left.shape[0])):
        out[first:end] = product(left[first:end], right[expert], False, True).to(out_dtype)
    return out


def grouped_wgrad(dy: Operand, x: Operand, ends: torch.Tensor, experts: int, out_dtype: torch.dtype) -> torch.Tensor:
    """[E, N, K] `out_dtype`: dy^T times x over the rows of each group; zeros for an empty group."""
    left, right = _group_values(dy), _group_values(x)
    if left.dtype == right.dtype == torch.bfloat16:
        return grouped_gemm_wgrad(left, right, ends, experts, out_dtype=out_dtype)
    out = left.new_zeros(experts, left.shape[1], right.shape[1], dtype=out_dtype)
    for expert, (first, end) in enumerate(_bounds(ends, left.shape[0])):
        out[expert] = product(left[first:end], right[first:end], True, True).to(out_dtype)
    return out


def grouped_bias_grad(dy: torch.Tensor, ends: torch.Tensor, experts: int) -> torch.Tensor:
    """[E, N] float32: sums over the rows of each group, in the same order in every run."""
    if dy.dtype == torch.bfloat16:
        ones = dy.new_ones(dy.shape[0], 16)
        return grouped_gemm_wgrad(dy, ones, ends, experts, out_dtype=torch.float32)[..., 0]
    bounds = _bounds(ends, dy.shape[0])
    return torch.stack([dy[first:end].float().sum(0) for first, end in bounds])


def ends_of(m_splits: Sequence[int] | torch.Tensor, groups: int, inp: torch.Tensor) -> torch.Tensor:
    """[groups] int32 on the device of inp [..., K]: the row after the last row of each group.

    Raises:
        InputError: m_splits has another number of groups or rows.
    """
    if not isinstance(inp, torch.Tensor | MXFP8TensorStorage):
        raise InputError(f"inp must be a tensor, got {type(inp).__name__}.")
    if inp.dim() < 2:
        raise InputError(f"inp is {list(inp.shape)}; it must be [..., in_features] with rows.")
    if isinstance(m_splits, torch.Tensor):
        if m_splits.shape != (groups,) or m_splits.dtype not in (torch.int32, torch.int64):
            raise InputError(
                f"m_splits is {list(m_splits.shape)} {m_splits.dtype}; it must be [{groups}] int32 or int64."
            )
        return m_splits.to(inp.device).cumsum(0, dtype=torch.int32)
    try:
        splits, rows = [operator.index(size) for size in m_splits], prod(inp.shape[:-1])
    except (TypeError, RuntimeError) as error:
        raise InputError(f"m_splits is {m_splits!r:.80}; it must be {groups} integers, or a tensor of them.") from error
    if len(splits) != groups or sum(splits) != rows or min(splits) < 0:
        raise InputError(
            f"m_splits has {len(splits)} entries that sum to {sum(splits)}; there must be {groups} of at least 0 that "
            f"sum to the {rows} rows of inp."
        )
    return torch.tensor(splits, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(inp.device)


def rows_of_groups(per_group: torch.Tensor, ends: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[R, N]: row e of [E, N] for each row of group e; zeros past the last group."""
    row = torch.arange(num_rows, device=ends.device, dtype=ends.dtype)
    return pad(per_group, (0, 0, 0, 1))[(row.unsqueeze(1) >= ends).sum(1)]


def _group_values(x: Operand) -> torch.Tensor:
    return x.values(torch.bfloat16) if isinstance(x, Quantised) else x


def _bounds(ends: torch.Tensor, num_rows: int) -> list[tuple[int, int]]:
    """First row and end of each group, on the host."""
    each = [min(end, num_rows) for end in ends.tolist()]
    return list(zip([0, *each[:-1]], each, strict=True))
