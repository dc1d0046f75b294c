"""MXFP8 with one scale per row (kernels/experts/row_scales.py), the operands of the experts' FP8 products."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from triton_ep.errors import InputError
from triton_ep.ops import library
from triton_ep.ops.tiles import check_offsets
from triton_ep.runtime import launch as runtime
from triton_ep.runtime.launch import INTERPRETING
from triton_ep.runtime.plans import Plan
from triton_ep.runtime.plans.experts import dequantize_beside, offsets_constexprs, quantized_tile, row_tile

_BLOCK = 32
_QUANTISED = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class RowScaled:
    """MXFP8 values moved to one scale per row, so that fp8 tensor cores need no scale inside a sum over the row.

    Attributes:
        qdata: [R, K] rows, or [E, N, K] weights; float8_e4m3fn, contiguous.
        scale: [R] or [E, N] float32; powers of two, or NaN.

    Raises:
        InputError: shapes or dtypes that do not fit each other.
    """

    qdata: torch.Tensor
    scale: torch.Tensor

    def __post_init__(self) -> None:
        """Check both parts."""
        q, s = self.qdata, self.scale
        if q.dtype != torch.float8_e4m3fn or q.dim() not in (2, 3) or not q.is_contiguous():
            raise InputError(
                f"qdata must be contiguous float8_e4m3fn [R, K] or [E, N, K]; it is {q.dtype} {list(q.shape)} with "
                f"strides {list(q.stride())}."
            )
        if s.dtype != torch.float32 or s.shape != q.shape[:-1] or not s.is_contiguous() or s.device != q.device:
            raise InputError(
                f"scale must be contiguous float32 {list(q.shape[:-1])} on {q.device}; it is {s.dtype} "
                f"{list(s.shape)} on {s.device}."
            )

    @classmethod
    def made(cls, qdata: torch.Tensor, scale: torch.Tensor) -> RowScaled:
        """Tensors that a kernel of this package has written. They are not checked, which would take host time."""
        found = object.__new__(cls)
        vars(found).update(qdata=qdata, scale=scale)
        return found

    @property
    def shape(self) -> torch.Size:
        """Shape of the values."""
        return self.qdata.shape

    @property
    def device(self) -> torch.device:
        """Device of both parts."""
        return self.qdata.device

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """All values, in bf16 or fp32; values of rows not in use are undefined."""
        return _values(self.qdata.flatten(0, -2), self.scale.flatten(), None, dtype).view(self.shape)


@functools.cache
def _plan(name: str, has_offsets: bool, **tile: int) -> Plan:
    return Plan(name, {**offsets_constexprs(has_offsets), **tile})


def _launch_rows(plan: Plan, rows: torch.Tensor, offs: torch.Tensor | None, **given: torch.Tensor | int) -> None:
    """Launch a kernel of row_scales.py over rows [R, K], or over those in use. given: further arguments by name."""
    num_rows, k = rows.shape
    if num_rows == 0 or k == 0:
        return
    runtime.launch(
        plan,
        -(-num_rows // plan.constexprs["ROWS"]),
        offs_ptr=rows if offs is None else offs.contiguous(),
        **given,
        num_rows=num_rows,
        k=k,
        num_segments=0 if offs is None else offs.shape[0] - 1,
    )


def _like(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(x.shape[:-1], dtype=torch.float32)


@library.op("(Tensor qdata, Tensor scale, Tensor? offs) -> (Tensor, Tensor)", lambda qdata, *_: _like(qdata))
def _rebase_rows(
    qdata: torch.Tensor, scale: torch.Tensor, offs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return _rebase(qdata, scale, offs)


def _rebase(qdata: torch.Tensor, scale: torch.Tensor, offs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    out, row_scale = _like(qdata)
    k = qdata.shape[-1]
    if qdata.numel():
        rows = qdata.contiguous().view(-1, k)
        tile = quantized_tile(k, INTERPRETING, rebased=True)
        _launch_rows(
            _plan("rebase_rows_kernel", offs is not None, **tile),
            rows,
            offs,
            elements_ptr=rows,
            scale_ptr=scale.contiguous(),
            out_ptr=out,
            row_scale_ptr=row_scale,
        )
    return out, row_scale


@library.op("(Tensor x, Tensor? offs) -> (Tensor, Tensor)", lambda x, _: _like(x))
def _quantize_to_rows(x: torch.Tensor, offs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    out, row_scale = _like(x)
    plan = _plan("quantize_to_rows_kernel", offs is not None, **quantized_tile(x.shape[1], INTERPRETING))
    x = x.contiguous()
    _launch_rows(plan, x, offs, x_ptr=x, out_ptr=out, row_scale_ptr=row_scale)
    return out, row_scale


@library.op(
    "(Tensor qdata, Tensor scale, Tensor? offs, ScalarType dtype) -> Tensor",
    lambda qdata, _, __, dtype: qdata.new_empty(qdata.shape, dtype=dtype),
)
def _dequantize_rows_in_use(
    qdata: torch.Tensor, scale: torch.Tensor, offs: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    out = qdata.new_empty(qdata.shape, dtype=dtype)
    _launch_rows(
        _plan("dequantize_rows_in_use_kernel", offs is not None, **row_tile(qdata.shape[1], INTERPRETING)),
        qdata,
        offs,
        elements_ptr=qdata,
        row_scale_ptr=scale,
        out_ptr=out,
        stride_em=qdata.stride(0),
    )
    return out


def _values(qdata: torch.Tensor, scale: torch.Tensor, offs: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if dtype not in _QUANTISED:
        raise InputError(f"dtype is {dtype}, choose torch.bfloat16 or torch.float32.")
    values: torch.Tensor = _dequantize_rows_in_use(qdata, scale, offs, dtype)
    return values


def rebase_rows(qdata: torch.Tensor, scale: torch.Tensor, offs: torch.Tensor | None = None) -> RowScaled:
    """Move every row of MXFP8 to the largest of its scales.

    qdata: [R, K] or [E, N, K] float8_e4m3fn. scale: the same shape with K / 32, uint8 or float8_e8m0fnu. offs:
    [E + 1] int32, with rows [R, K]: only rows before its last entry are read and written; the host does not read it.

    An element keeps its value unless it becomes subnormal under the larger scale s: then it is rounded to a multiple of
    s * 2^-9, an error of at most s * 2^-10. A scale byte of 255 makes the scale of its row NaN.

    Raises:
        InputError: shapes or dtypes that do not fit each other.
    """
    _check_mx(qdata, scale, offs)
    return RowScaled(*_rebase_rows(qdata, scale.view(torch.uint8), offs))


def rebase_rows_directly(qdata: torch.Tensor, scale: torch.Tensor, offs: torch.Tensor) -> RowScaled:
    """`rebase_rows` of bytes that a kernel of this package has written, where nothing observes ops: less host time."""
    return RowScaled.made(*_rebase(qdata, scale, offs))


def _check_mx(qdata: torch.Tensor, scale: torch.Tensor, offs: torch.Tensor | None) -> None:
    """Raise the errors of `rebase_rows`."""
    blocks = [*qdata.shape[:-1], qdata.shape[-1] // _BLOCK] if qdata.dim() else []
    if qdata.dim() not in (2, 3) or qdata.dtype != torch.float8_e4m3fn or qdata.shape[-1] % _BLOCK:
        raise InputError(
            f"qdata must be float8_e4m3fn [R, K] or [E, N, K] with K a multiple of 32; it is {qdata.dtype} "
            f"{list(qdata.shape)}."
        )
    if scale.element_size() != 1 or list(scale.shape) != blocks or scale.device != qdata.device:
        raise InputError(
            f"scale must be {blocks} bytes on {qdata.device}, one per 32 values; it is {scale.dtype} "
            f"{list(scale.shape)} on {scale.device}."
        )
    _check_rows(offs, qdata)


def quantize_to_rows(x: torch.Tensor, offs: torch.Tensor | None = None) -> RowScaled:
    """MXFP8 (RCEIL, blocks of 32 columns) of [R, K] bf16 or fp32, moved to one scale per row, in one kernel.

    Bit for bit equal to `rebase_rows(*quantize_rows(x))`. offs: as for `rebase_rows`.

    Raises:
        InputError: shape or dtype.
    """
    if x.dim() != 2 or x.dtype not in _QUANTISED or x.shape[1] % _BLOCK:
        raise InputError(f"x must be bf16 or fp32 [R, K] with K a multiple of 32; it is {x.dtype} {list(x.shape)}.")
    _check_rows(offs, x)
    return RowScaled(*_quantize_to_rows(x, offs))


def dequantize_rows_in_use(
    x: RowScaled, offs: torch.Tensor, dtype: torch.dtype = torch.bfloat16, *, columns: slice | None = None
) -> torch.Tensor:
    """[R, K] values of rows, in bf16 or fp32; rows from offs[-1] on are neither read nor written.

    Exact in bf16 within its range: for scales of 2^-124 to 2^119. columns: consecutive columns, instead of all K.

    Raises:
        InputError: weights instead of rows, another dtype, invalid offsets, or columns with a step.
    """
    if x.qdata.dim() != 2:
        raise InputError(f"x must be rows [R, K]; it is {list(x.shape)}.")
    if columns is not None and columns.step not in (None, 1):
        raise InputError(f"columns must be consecutive; {columns} has a step of {columns.step}. Leave the step out.")
    _check_rows(offs, x.qdata)
    return _values(x.qdata if columns is None else x.qdata[:, columns], x.scale, offs, dtype)


def dequantize_rows_beside(
    x: RowScaled, offs: torch.Tensor, columns: slice, stream: torch.cuda.Stream | None
) -> torch.Tensor:
    """`dequantize_rows_in_use` to bf16 on another stream, by programs that fit next to those of gradients of weights.

    The result has memory of the current stream, which must wait for that stream before it uses or frees it.

    stream: None = the current one.
    """
    qdata = x.qdata[:, columns]
    out = qdata.new_empty(qdata.shape, dtype=torch.bfloat16)
    with torch.cuda.stream(stream):
        _launch_rows(
            dequantize_beside(INTERPRETING),
            qdata,
            offs,
            elements_ptr=qdata,
            row_scale_ptr=x.scale,
            out_ptr=out,
            stride_em=qdata.stride(0),
        )
    return out


def _check_rows(offs: torch.Tensor | None, x: torch.Tensor) -> None:
    if offs is None:
        return
    check_offsets(offs, device=x.device)
    if x.dim() != 2:
        raise InputError(f"offs requires rows [R, K], not {list(x.shape)}.")
