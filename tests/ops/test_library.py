"""Launchers as ops for torch.compile: fakes match the real outputs, no output is a view, no hidden writes."""

from __future__ import annotations

from typing import Any

import torch

from tests.ops.grouped import Case, operands
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops import (
    arrivals,  # noqa: F401  registers its op
    experts,  # noqa: F401  registers its ops
    mxfp8,
)
from triton_ep.ops import experts_backward as backward
from triton_ep.ops import grouped_gemm as gemm
from triton_ep.ops.prepare import prepare_weights
from triton_ep.ops.tiles import tile_table
from triton_ep.runtime.launch import INTERPRETING

OPS = torch.ops.triton_ep


def _check(op: Any, args: tuple[Any, ...]) -> None:
    """Run torch.library.opcheck; its check for changed inputs cannot compare float8."""
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if all(each.itemsize > 1 or each.dtype == torch.uint8 for each in args if isinstance(each, torch.Tensor)):
        tests.append("test_schema")
    torch.library.opcheck(op, args, test_utils=tests)


def _quantised() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, _, ends = operands(Case((3, 0, 34), n=32, k=64, spare=2))
    return a, torch.nn.functional.pad(ends, (1, 0)), ends


def test_quantisation() -> None:
    """All five quantisation ops, with and without groups; those that quantise take rows with strides, too."""
    x, offsets, _ = _quantised()
    e4m3 = torch.float8_e4m3fn
    _check(OPS.quantize_rows.default, (x, e4m3, "rceil"))
    _check(OPS.dequantize_rows.default, (*mxfp8.quantize_rows(x), torch.float32))
    for groups in (offsets, None):
        _check(OPS.quantize_columns.default, (x, groups, torch.float8_e5m2, "floor"))
        _check(OPS.quantize_both.default, (x, groups, e4m3, "even"))
        columns = mxfp8.quantize_columns(x, groups)
        _check(OPS.dequantize_columns.default, (*columns, groups, torch.bfloat16))
    strided = torch.stack([x, x], -1)[..., 0]
    _check(OPS.quantize_rows.default, (strided, e4m3, "rceil"))
    _check(OPS.quantize_columns.default, (strided, offsets, torch.float8_e5m2, "floor"))
    _check(OPS.quantize_both.default, (strided, offsets, e4m3, "even"))


def test_products() -> None:
    """Every path of the grouped GEMM and its gradients; empty groups, rows past the last group, both layouts."""
    a, b_t, ends = operands(Case((3, 0, 34), n=96, k=64, spare=2))
    for weights in (b_t, b_t.contiguous()):
        _check(OPS.grouped_bf16.default, (a, weights, ends, torch.float32))
    _check(OPS.grouped_wgrad_bf16.default, (a, a[:, :32], ends, 3, torch.bfloat16))
    rows, weights = MXTensor.to_mx(a), MXTensor.to_mx(b_t.transpose(1, 2).contiguous())
    left, right = ((mx.qdata, mx.scale.view(torch.uint8)) for mx in (rows, weights))
    _check(OPS.equalize_scales.default, right)
    equal = [tensor for parts in (left, right) for tensor in OPS.equalize_scales(*parts)]
    _check(OPS.grouped_fp8.default, (*equal, ends, torch.bfloat16))
    if INTERPRETING or torch.cuda.get_device_capability() >= (10, 0):
        _check(OPS.grouped_mx.default, (*left, *right, ends, torch.bfloat16))


def test_row_scales_and_prepared_weights() -> None:
    """Row scales: quantise, rebase and dequantise all rows or the rows in use; prepare weights, also in place."""
    x, b_t, ends = operands(Case((3, 0, 34), n=96, k=64))
    w, offs = b_t.transpose(1, 2).contiguous(), torch.nn.functional.pad(ends, (1, 0))
    # Records without a tile are not written, so results are not compared.
    torch.library.opcheck(OPS.tile_table.default, (offs, 37), test_utils=["test_schema", "test_faketensor"])
    mx = MXTensor.to_mx(x)
    for given in (offs, None):
        _check(OPS.quantize_to_rows.default, (x, given))
        _check(OPS.rebase_rows.default, (mx.qdata, mx.scale.view(torch.uint8), given))
        _check(OPS.dequantize_rows_in_use.default, (*OPS.quantize_to_rows(x, given), given, torch.bfloat16))
    fprop, dgrad = prepare_weights(w, "both")
    assert fprop is not None and dgrad is not None
    rows, transposed = (fprop.qdata, fprop.scale), (dgrad.qdata, dgrad.scale)
    for given, again in (
        ((*rows, *transposed), False),
        ((*rows, *transposed), True),
        ((*rows, None, None), True),
        ((None, None, *transposed), False),
    ):
        _check(OPS.prepare.default, (w, *given, again))
    _check(OPS.grouped_rows.default, (*OPS.quantize_to_rows(x, None), fprop.qdata, fprop.scale, ends, torch.bfloat16))


def test_products_of_experts() -> None:
    """Both products, in bf16 and with row scales, with all optional operands."""
    x, b_t, ends = operands(Case((3, 0, 34), n=128, k=64))
    w, offs = b_t.transpose(1, 2).contiguous(), torch.nn.functional.pad(ends, (1, 0))
    weights, tiles, bias = x[:, 0].float(), tile_table(offs, len(x)), w[:, :, 0].contiguous()
    fprop, _ = prepare_weights(w, "fprop")
    assert fprop is not None
    for rows, matrix in (((x, None), (w, None)), (OPS.quantize_to_rows(x, None), (fprop.qdata, fprop.scale))):
        activation = ("silu", True, 7.0, 1.702, 1.0)
        act = "mx" if rows[1] is None else "bf16"
        _check(OPS.gate_up.default, (*rows, *matrix, offs, None, weights, bias, *activation, True, act, False))
        operands_of = (*rows, *matrix, offs, tiles, weights, bias, False, False)
        _check(OPS.rows_product.default, operands_of)
        _check(OPS.rows_product_into.default, (*operands_of, x.new_zeros(len(x), 128)))


def test_gradients_of_experts() -> None:
    """Gradients of rows, weights, biases and row weights; schemas declare in-place writes."""
    dy, b_t, ends = operands(Case((3, 0, 34), n=96, k=64))
    w2, offs = b_t.contiguous(), torch.nn.functional.pad(ends, (1, 0))  # H 64, F 96
    pre, weights, tiles = torch.cat([dy, dy, dy], 1), dy[:, 0].float(), tile_table(offs, len(dy))
    activation = ("silu", True, None, 1.0, 0.0, False)
    _check(OPS.down_dgrad.default, (dy, None, w2, None, False, pre, weights, tiles, *activation))
    for given in (weights, None):
        _check(OPS.down_dgrad_over.default, (dy, None, w2, None, False, pre.clone(), given, tiles, *activation))
    shares = OPS.down_dgrad(dy, None, w2, None, False, pre, weights, tiles, *activation)[2]
    _check(OPS.row_weight_gradient.default, (shares, dy, None, w2[:, :, 0].contiguous(), tiles))
    _check(OPS.bias_gradient.default, (dy, offs, weights))
    out = backward.weight_gradient(dy, pre, offs).float()
    _check(OPS.weight_gradient.default, (dy, pre, offs, None, out, True, False, False))
    _check(OPS.weighted_rows_backward.default, (dy, None, pre[:, :64], weights, offs))
    copies = torch.tensor([[0, 3], [2, 36]], dtype=torch.int32, device=dy.device)
    given = (dy[:2].contiguous(), copies, offs, 1, offs, torch.diff(offs), len(dy), 16, 32)
    # Rows that are neither assignments nor padding are not written.
    torch.library.opcheck(OPS.expand_arrivals.default, given, test_utils=["test_schema", "test_faketensor"])


def test_the_front_door_compiles() -> None:
    """`grouped_gemm` of MXTensors compiles into one graph for any number of rows, with the same bits on both paths."""
    backend = "aot_eager" if INTERPRETING else "inductor"

    def products(a: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, weights = MXTensor.to_mx(a), MXTensor.to_mx(w).transpose(1, 2)
        by_values, by_elements = (gemm.grouped_gemm(rows, weights, ends, path=path) for path in ("bf16", "fp8"))
        return by_values, by_elements

    torch._dynamo.reset()
    compiled = torch.compile(products, fullgraph=True, backend=backend)
    for spare in (2, 7):
        a, b_t, ends = operands(Case((3, 0, 34), n=96, k=64, spare=spare))
        w = b_t.transpose(1, 2)
        torch._dynamo.mark_dynamic(a, 0)  # compile once
        assert all(map(torch.equal, compiled(a, w, ends), products(a, w, ends)))
