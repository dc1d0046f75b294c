"""The entry point of the grouped GEMM: bf16 and MX operands, and the choice of the path."""

from __future__ import annotations

import pytest
import torch

from tests.ops.grouped import CPU_GROUPS, DEVICE, Case, check, operands
from triton_ep.errors import InputError
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops import grouped_gemm as ops
from triton_ep.ops.prepare import prepare_weights
from triton_ep.ops.row_scales import rebase_rows
from triton_ep.reference import grouped_gemm as oracle
from triton_ep.reference import mxfp8

FP8_STEPS = 0.0 if DEVICE == "cpu" else 2.0**-9
HAS_MX = DEVICE == "cpu" or torch.cuda.get_device_capability() >= (10, 0)


def _mx(x: torch.Tensor, transposed: bool = False) -> tuple[MXTensor, torch.Tensor]:
    """MXTensor quantised by the oracle along the last dimension (transposed: the last but one), and its values."""
    qdata, scale = mxfp8.quantize((x.transpose(-2, -1) if transposed else x).contiguous().cpu())
    mx = MXTensor.from_qdata_and_scales(qdata.to(DEVICE), scale.to(DEVICE), torch.bfloat16)
    values = mxfp8.dequantize(qdata, scale, torch.float32).to(DEVICE)
    return (mx.transpose(-2, -1), values.transpose(-2, -1)) if transposed else (mx, values)


@pytest.mark.parametrize("path", ["auto", "bf16", "mx"])
@pytest.mark.parametrize("sizes", CPU_GROUPS, ids=str)
def test_exact_paths(sizes: tuple[int, ...], path: str) -> None:
    """The float64 product of the quantised values, up to float32 accumulation and one rounding."""
    if path == "mx" and not HAS_MX:
        pytest.skip("needs tensor cores that know MX scales: sm_100")
    x, w, ends = operands(Case(sizes, n=40, k=96, spare=2))
    (a, a_values), (b_t, b_values) = _mx(x), _mx(w, transposed=True)
    out = ops.grouped_gemm(a, b_t, ends, path=path)
    check(out, oracle.grouped_gemm(a_values, b_values, ends), oracle.magnitude(a_values, b_values, ends), terms=96)
    assert not out[ends[-1] :].any()


@pytest.mark.parametrize("sizes", CPU_GROUPS, ids=str)
def test_fp8_path(sizes: tuple[int, ...]) -> None:
    """Like the exact paths, plus the error of equal scales: 2^-10 of the scale of each 128 values, per operand."""
    x, w, ends = operands(Case(sizes, n=40, k=160, spare=2))
    (a, a_values), (b_t, b_values) = _mx(x), _mx(w, transposed=True)
    exact, unit = oracle.grouped_gemm(a_values, b_values, ends), oracle.magnitude(a_values, b_values, ends)
    # A scale is at most amax / 224; this bound takes amax of the whole tensor.
    a_error, b_error = (torch.full_like(v, v.abs().max() * 2.0**-10 / 224) for v in (a_values, b_values))
    moved = oracle.grouped_gemm(a_error, b_values.abs() + b_error, ends)
    moved += oracle.grouped_gemm(a_values.abs(), b_error, ends)
    out = ops.grouped_gemm(a, b_t, ends, path="fp8")
    check(out, exact, unit, terms=160, steps=FP8_STEPS, moved=moved)
    # Prepared operands give the same bits, and select this path without `path`.
    prepared = ops.equal_scales(b_t)
    assert torch.equal(ops.grouped_gemm(a, prepared, ends), out)
    assert torch.equal(ops.grouped_gemm(ops.equal_scales(a), prepared, ends), out)
    # In bf16, which many rows take: the same values.
    values = prepared.dequantize().transpose(1, 2)
    check(
        ops.grouped_gemm(a, prepared, ends, path="bf16"),
        oracle.grouped_gemm(a_values, values, ends),
        oracle.magnitude(a_values, values, ends),
        terms=160,
    )


def test_auto_is_exact_unless_weights_are_prepared() -> None:
    """Of weights with equal scales, only few rows are multiplied in fp8; weights that are not prepared take bf16."""
    x, w, ends = operands(Case((300,), n=8, k=32))
    (a, _), (b_t, _) = _mx(x), _mx(w, transposed=True)
    prepared = ops.equal_scales(b_t)
    assert ops._choose(a[:128], prepared) == "fp8"
    assert ops._choose(a, prepared) == ops._choose(x[:8], prepared) == ops._choose(a[:8], b_t) == "bf16"
    assert torch.equal(ops.grouped_gemm(a, prepared, ends), ops.grouped_gemm(a, prepared, ends, path="bf16"))


def test_weights_with_row_scales() -> None:
    """Any number of MX rows gets row scales and is multiplied in fp8; bf16 rows meet the weights' values in bf16."""
    x, w, ends = operands(Case((9, 0, 13), n=40, k=64))
    (a, _), (b_t, _) = _mx(x), _mx(w, transposed=True)
    prepared, _ = prepare_weights(w.transpose(1, 2).contiguous(), "fprop")
    assert prepared is not None
    moved = rebase_rows(a.qdata, a.scale)
    out = ops.grouped_gemm(a, prepared, ends)
    assert torch.equal(out, ops.grouped_gemm(moved, prepared, ends))
    assert torch.equal(out, ops.grouped_gemm(moved, b_t, ends, path="fp8"))
    values = prepared.dequantize().transpose(1, 2)
    exact, unit = (oracle_of(moved.dequantize(), values, ends) for oracle_of in (oracle.grouped_gemm, oracle.magnitude))
    check(out, exact, unit, terms=64, steps=FP8_STEPS)
    unit = oracle.magnitude(x, values, ends)
    check(ops.grouped_gemm(x, prepared, ends), oracle.grouped_gemm(x, values, ends), unit, terms=64)
    with pytest.raises(InputError, match="give both of one kind"):
        ops.grouped_gemm(ops.equal_scales(a), prepared, ends, path="fp8")


def test_mixed_operands() -> None:
    """One operand in bf16, the other quantised along either dimension."""
    x, w, ends = operands(Case((5, 9), n=64, k=32))
    (a, a_values), (b_t, b_values), (along_n, n_values) = _mx(x), _mx(w, transposed=True), _mx(w)
    for left, right, left_values, right_values in (
        (a, w, a_values, w),
        (x, b_t, x, b_values),
        (x, along_n, x, n_values),
    ):
        exact = oracle.grouped_gemm(left_values, right_values, ends)
        unit = oracle.magnitude(left_values, right_values, ends)
        check(ops.grouped_gemm(left, right, ends), exact, unit, terms=32)


@pytest.mark.parametrize("k_major", [True, False])
def test_gradients(k_major: bool) -> None:
    """dY W and dY^T A of bf16 and of quantised operands."""
    a, b_t, ends = operands(Case((33, 0, 1, 6), n=96, k=64, k_major=k_major, spare=2))
    dy, _, _ = operands(Case((33, 0, 1, 6), n=8, k=96, spare=2, seed=1))
    (dy_mx, dy_values), (b_mx, b_values) = _mx(dy), _mx(b_t.contiguous())
    for grad, grad_values, weights, weight_values in ((dy, dy, b_t, b_t), (dy_mx, dy_values, b_mx, b_values)):
        da = ops.grouped_gemm_dgrad(grad, weights, ends)
        unit = oracle.magnitude(grad_values, weight_values.transpose(1, 2), ends)
        check(da, oracle.dgrad(grad_values, weight_values, ends), unit, terms=96)
        dw = ops.grouped_gemm_wgrad(grad, a, ends, 4)
        unit = oracle.wgrad(grad_values.abs(), a.abs(), ends)
        check(dw, oracle.wgrad(grad_values, a, ends), unit, terms=33)


def test_values_at_the_ends_of_bf16() -> None:
    """Path bf16 is exact for scale bytes 3 to 246; with other bytes, values outside bf16's range round or overflow."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    codes = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    qdata = torch.nn.functional.pad(codes.view(torch.uint8), (0, 2)).view(1, 256).view(torch.float8_e4m3fn)
    for byte, is_exact in ((0, False), (2, False), (3, True), (127, True), (246, True), (247, False)):
        scale = torch.full((1, 8), byte, dtype=torch.uint8, device=DEVICE)
        mx = MXTensor.from_qdata_and_scales(qdata, scale, torch.bfloat16)
        values = qdata.double() * 2.0 ** (byte - 127)
        assert torch.equal(mx.dequantize(torch.bfloat16).double(), values) == is_exact


def test_errors() -> None:
    """Paths that do not fit an operand, and unknown paths."""
    x, w, ends = operands(Case((5, 9), n=64, k=32))
    (a, _), (b_t, _), (along_n, _) = _mx(x), _mx(w, transposed=True), _mx(w)
    with pytest.raises(InputError, match="choose from"):
        ops.grouped_gemm(a, b_t, ends, path="fast")
    with pytest.raises(InputError, match="a is not an MXTensor"):
        ops.grouped_gemm(x, b_t, ends, path="fp8")
    with pytest.raises(InputError, match="along K"):
        ops.grouped_gemm(a, along_n, ends, path="fp8")
    if HAS_MX:
        with pytest.raises(InputError, match="b_t is not an MXTensor"):
            ops.grouped_gemm(a, w, ends, path="mx")
    else:
        with pytest.raises(InputError, match="sm_100"):
            ops.grouped_gemm(a, b_t, ends, path="mx")
