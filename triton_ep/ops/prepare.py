"""Weights of experts for FP8 products (kernels/experts/prepare.py): forward, and transposed for gradients."""

from __future__ import annotations

import torch

from triton_ep.errors import InputError
from triton_ep.ops import library
from triton_ep.ops.element_formats import MXOperand
from triton_ep.ops.row_scales import RowScaled, rebase_rows
from triton_ep.runtime import launch as runtime
from triton_ep.runtime.launch import INTERPRETING
from triton_ep.runtime.plans import Plan
from triton_ep.runtime.plans.experts import maxima_tile, mend_weights_plan, prepare_weights_plan

USES = ("fprop", "dgrad", "both")

Prepared = tuple[RowScaled | None, RowScaled | None]


def _empty(w: torch.Tensor, transposed: bool) -> RowScaled:
    experts, n, k = w.shape
    rows, columns = (k, n) if transposed else (n, k)
    qdata = w.new_empty((experts, rows, columns), dtype=torch.float8_e4m3fn)
    return RowScaled(qdata, w.new_empty((experts, rows), dtype=torch.float32))


@library.op(
    "(Tensor w, Tensor(a!)? out, Tensor(b!)? scale, Tensor(c!)? transposed, Tensor(d!)? transposed_scale, bool again) "
    "-> ()",
    lambda *_: None,
)
def _prepare(
    w: torch.Tensor,
    out: torch.Tensor | None,
    scale: torch.Tensor | None,
    transposed: torch.Tensor | None,
    transposed_scale: torch.Tensor | None,
    again: bool,
) -> None:
    """Write the requested forms. again: the outputs hold scales of an earlier weight; those still right are reused."""
    experts, n, k = w.shape
    # A form that is not requested gets the pointers of the other form; the kernel does not use them.
    first, second = (out, scale), (transposed, transposed_scale)
    forms = (first if out is not None else second, second if transposed is not None else first)
    rows, columns = n if out is not None else 0, k if transposed is not None else 0
    uses = {"FPROP": rows > 0, "DGRAD": columns > 0}
    sizes = {"n": n, "k": k}
    # One fill clears both.
    row_max, column_max = w.new_zeros(experts * (rows + columns), dtype=torch.int32).split(
        [experts * rows, experts * columns]
    )
    maxima = {"row_max_ptr": row_max, "column_max_ptr": column_max}
    if not again:
        tile = maxima_tile(INTERPRETING)
        plan = Plan("weight_maxima_kernel", {"ROWS": uses["FPROP"], "COLUMNS": uses["DGRAD"], **tile})
        runtime.launch(plan, experts * -(-n // tile["BLOCK_N"]), w_ptr=w, **maxima, **sizes)
    copies = {
        "out_ptr": forms[0][0],
        "scale_ptr": forms[0][1],
        "transposed_ptr": forms[1][0],
        "transposed_scale_ptr": forms[1][1],
    }
    plan, block = prepare_weights_plan(uses, again, INTERPRETING, w.dtype == torch.float32)
    runtime.launch(plan, experts * -(-n // block[0]) * -(-k // block[1]), w_ptr=w, **maxima, **copies, **sizes)
    if again:
        plan = mend_weights_plan(uses, INTERPRETING)
        strips = sum(-(-lines // plan.constexprs["LINES"]) for lines in (rows, columns))
        runtime.launch(plan, experts * strips, w_ptr=w, **maxima, **copies, **sizes)


@library.without_grad
def prepare_weights(w: torch.Tensor, uses: str, *, out: Prepared = (None, None)) -> Prepared:
    """Quantise weights for the products that use them, each along the sum of its product, with one scale per row.

    The scale is the largest MXFP8 (RCEIL) scale in the row. Elements are rounded once, under that scale: they equal
    MXFP8 elements moved to rows, but are nearer to the weight where they are subnormal.

    Arguments:
        w: [E, N, K] bf16 or fp32, contiguous; or MXTensor of e4m3 quantised along K.
        uses: "fprop", for x w^T; "dgrad", for dy w; or "both".
        out: results of an earlier call for a weight of this shape, to be overwritten. Where their scales still hold,
            the weights are read once instead of twice. The result does not depend on them. None: new memory.

    Returns (along K [E, N, K], along N transposed [E, K, N]); None for a form that was not requested. For an MXTensor
    the first holds its own elements and scales, moved to rows; the second is quantised from its values in bf16.

    Raises:
        InputError: another shape, dtype or use; a summed dimension (N or K) that is not a multiple of 32.
    """
    if uses not in USES:
        raise InputError(f"uses is {uses!r}, choose from {', '.join(USES)}.")
    fprop, dgrad = uses != "dgrad", uses != "fprop"
    if isinstance(w, MXOperand):
        return _of_mx(w, fprop, dgrad, out)
    if w.dim() != 3 or w.dtype not in (torch.bfloat16, torch.float32) or not w.is_contiguous():
        raise InputError(f"w must be contiguous bf16 or fp32 [E, N, K]; it is {w.dtype} {list(w.shape)} {w.stride()}.")
    _check_blocks(w, fprop, dgrad)
    made = [
        (_empty(w, transposed) if given is None else _fitting(given, w, transposed)) if wanted else None
        for transposed, wanted, given in zip((False, True), (fprop, dgrad), out, strict=True)
    ]
    if w.numel() == 0:
        return made[0], made[1]
    parts = [(None, None) if each is None else (each.qdata, each.scale) for each in made]
    again = all(given is not None for given, wanted in zip(out, (fprop, dgrad), strict=True) if wanted)
    _prepare(w, *parts[0], *parts[1], again)
    return made[0], made[1]


def _check_blocks(w: torch.Tensor, fprop: bool, dgrad: bool) -> None:
    for dim, wanted in ((2, fprop), (1, dgrad)):
        size = w.shape[dim]
        if wanted and size % 32:
            raise InputError(
                f"w is {list(w.shape)}; dimension {dim} is summed in blocks of 32; the nearest above is "
                f"{-(-size // 32) * 32}."
            )


def _fitting(given: RowScaled, w: torch.Tensor, transposed: bool) -> RowScaled:
    shape = w.transpose(1, 2).shape if transposed else w.shape
    if given.shape != shape or given.device != w.device:
        raise InputError(f"out must be {list(shape)} on {w.device}; it is {list(given.shape)} on {given.device}.")
    return given


def _of_mx(w: MXOperand, fprop: bool, dgrad: bool, out: Prepared) -> Prepared:
    if w.dim() != 3 or w.block_dim != -1 or w.block_size != 32 or w.elem_dtype != torch.float8_e4m3fn:
        raise InputError(f"w must be float8_e4m3fn [E, N, K] in blocks of 32 along K; it is {w!r}.")
    first, second = None, None
    if fprop:
        first = rebase_rows(w.qdata, w.scale)
        if out[0] is not None:
            given = _fitting(out[0], w, False)
            given.qdata.copy_(first.qdata)
            given.scale.copy_(first.scale)
            first = given
    if dgrad:
        second = prepare_weights(w.dequantize(torch.bfloat16), "dgrad", out=(None, out[1]))[1]
    return first, second
