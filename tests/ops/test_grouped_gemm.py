"""Grouped GEMM in bf16: forward and both gradients against float64 products of the same operands."""

from __future__ import annotations

import pytest
import torch

from tests.ops.grouped import CPU_GROUPS, DEVICE, Case, check, ends_of, operands
from triton_ep.errors import InputError
from triton_ep.ops.grouped_bf16 import bf16_gemm, bf16_wgrad
from triton_ep.reference import grouped_gemm as oracle


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("k_major", [True, False])
@pytest.mark.parametrize("sizes", CPU_GROUPS, ids=str)
def test_forward(sizes: tuple[int, ...], k_major: bool, tma: bool) -> None:
    """Groups that are empty, unaligned, or longer than a tile; columns off the tile."""
    a, b_t, ends = operands(Case(sizes, n=72, k=128, k_major=k_major, spare=3))
    exact = oracle.grouped_gemm(a, b_t, ends)
    out = bf16_gemm(a, b_t, ends, tma=tma)
    check(out, exact, oracle.magnitude(a, b_t, ends), terms=a.shape[1])
    assert torch.equal(out[ends[-1] :], torch.zeros_like(out[ends[-1] :]))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (20, 100), (64, 33), (130, 96)])
@pytest.mark.parametrize("k_major", [True, False])
def test_sizes_off_the_tile(n: int, k: int, k_major: bool) -> None:
    """K and N may have any size."""
    a, b_t, ends = operands(Case((5, 0, 40), n=n, k=k, k_major=k_major))
    check(bf16_gemm(a, b_t, ends), oracle.grouped_gemm(a, b_t, ends), oracle.magnitude(a, b_t, ends), terms=k)


@pytest.mark.parametrize("tma", [False, True])
def test_groups_do_not_see_each_other(tma: bool) -> None:
    """NaN in one group's rows and weights, and in rows of no group, stays there, although a tile's box reads it."""
    a, b_t, ends = operands(Case((5, 7, 30), n=40, k=64, spare=4))
    a[5:12] = float("nan")
    a[ends[-1] :] = float("nan")
    b_t[1] = float("inf")
    out = bf16_gemm(a, b_t, ends, tma=tma)
    kept = [*range(5), *range(12, 42)]
    check(out[kept], oracle.grouped_gemm(a, b_t, ends)[kept], oracle.magnitude(a, b_t, ends)[kept], terms=64)
    assert out[5:12].isnan().all() and not out[ends[-1] :].any()


@pytest.mark.parametrize("offs", ["ends", "starts", "int64"])
def test_offsets(offs: str) -> None:
    """[E] ends and [E + 1] starts give the same result."""
    a, b_t, ends = operands(Case((9, 0, 3), n=8, k=32))
    form = {"ends": ends, "starts": torch.nn.functional.pad(ends, (1, 0)), "int64": ends.long()}[offs]
    check(bf16_gemm(a, b_t, form), oracle.grouped_gemm(a, b_t, ends), oracle.magnitude(a, b_t, ends), terms=32)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_output_types(out_dtype: torch.dtype) -> None:
    """One rounding, to the requested dtype."""
    a, b_t, ends = operands(Case((9, 4), n=24, k=64))
    out = bf16_gemm(a, b_t, ends, out_dtype=out_dtype)
    assert out.dtype == out_dtype
    check(out, oracle.grouped_gemm(a, b_t, ends), oracle.magnitude(a, b_t, ends), terms=64)


def test_strides() -> None:
    """Rows with gaps, experts with gaps, and weights without a consecutive dimension."""
    a, b_t, ends = operands(Case((9, 4), n=24, k=64))
    exact, unit = oracle.grouped_gemm(a, b_t, ends), oracle.magnitude(a, b_t, ends)
    wide = torch.cat([a, a], 1)[:, 64:]
    gaps = torch.stack([b_t.transpose(1, 2)] * 2, 1)[:, 1].transpose(1, 2)
    scattered = b_t.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    for left, right in ((wide, b_t), (a, gaps), (a, scattered)):
        check(bf16_gemm(left, right, ends), exact, unit, terms=64)


def test_nothing_to_do() -> None:
    """No rows, no columns, no terms, or no rows in any group."""
    a, b_t, ends = operands(Case((0, 0), n=8, k=32))
    assert bf16_gemm(a, b_t, ends).shape == (0, 8)
    a, b_t, ends = operands(Case((0, 0), n=8, k=32, spare=3))
    assert not bf16_gemm(a, b_t, ends).any()
    assert not bf16_wgrad(bf16_gemm(a, b_t, ends), a, ends, 2).any()
    a, b_t, ends = operands(Case((2, 1), n=8, k=32))
    assert not bf16_gemm(a[:, :0], b_t[:, :0], ends).any()
    assert bf16_gemm(a, b_t[:, :, :0], ends).shape == (3, 0)


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("sizes", CPU_GROUPS, ids=str)
def test_gradient_of_weights(sizes: tuple[int, ...], tma: bool) -> None:
    """dY^T @ A inside each group; zeros for an empty group; rows of no group or of other groups have no effect."""
    a, _, ends = operands(Case(sizes, n=8, k=72, spare=3))
    dy, _, _ = operands(Case(sizes, n=8, k=104, spare=3, seed=1))
    a[ends[-1] :] = float("nan")
    out = bf16_wgrad(dy, a, ends, len(sizes), tma=tma)
    exact, unit = oracle.wgrad(dy, a, ends), oracle.wgrad(dy.abs(), a.abs(), ends)
    check(out, exact, unit, terms=max(sizes))
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    rows = slice(int(ends[largest]) - sizes[largest], int(ends[largest]))
    alone = torch.full_like(a, float("nan"))
    alone[rows] = a[rows]
    assert torch.equal(bf16_wgrad(dy, alone, ends, len(sizes), tma=tma)[largest], out[largest])


def test_same_bits_every_time() -> None:
    """A tile's result does not depend on the program that computes it."""
    a, b_t, ends = operands(Case((50, 3, 20), n=130, k=64))
    assert torch.equal(bf16_gemm(a, b_t, ends), bf16_gemm(a, b_t, ends))


def test_errors() -> None:
    """Operands that do not fit each other are refused with both numbers."""
    a, b_t, ends = operands(Case((2, 1), n=8, k=40))
    with pytest.raises(InputError, match="K = 40, b_t has K = 32"):
        bf16_gemm(a, b_t[:, :32], ends)
    with pytest.raises(InputError, match="bfloat16"):
        bf16_gemm(a.float(), b_t, ends)
    with pytest.raises(InputError, match="3-D"):
        bf16_gemm(a, b_t[0], ends)
    with pytest.raises(InputError, match="4 entries"):
        bf16_gemm(a, b_t, torch.zeros(4, dtype=torch.int32, device=DEVICE))
    with pytest.raises(InputError, match="int32 or int64"):
        bf16_gemm(a, b_t, ends.float())
    with pytest.raises(InputError, match="out_dtype"):
        bf16_gemm(a, b_t, ends, out_dtype=torch.float64)
    with pytest.raises(InputError, match="do not fit TMA: K = 40"):
        bf16_gemm(a, b_t, ends, tma=True)
    with pytest.raises(InputError, match="rows"):
        bf16_wgrad(a[:2], a, ends, 2)
    with pytest.raises(InputError, match="out_dtype"):
        bf16_wgrad(a, a, ends, 2, out_dtype=torch.float64)


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU the host would have to wait for the values")
@pytest.mark.parametrize("bounds", [[2, 1], [2, 4], [-1, 3], [1, 2, 3]], ids=str)
def test_groups_that_do_not_follow_one_another(bounds: list[int]) -> None:
    """Groups that overlap, leave out the first rows, or end past the last row are refused: they would multiply rows by
    other matrices, or read and write other memory."""
    a, b_t, ends = operands(Case((2, 1), n=8, k=40))
    for call in (lambda offs: bf16_gemm(a, b_t, offs), lambda offs: bf16_wgrad(a, a, offs, 2)):
        with pytest.raises(InputError, match="must begin at row 0, follow one another, and end at 3 or before"):
            call(ends.new_tensor(bounds))


def test_oracle_of_one_group_is_a_matmul() -> None:
    """For one group, the oracle's float64 loop and its gradients equal those of a matmul."""
    a = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(1, 5, 4, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(6, 4, dtype=torch.float64)
    ends = ends_of((6,)).cpu()
    out = a @ w[0]
    out.backward(dy)
    assert torch.equal(oracle.grouped_gemm(a.detach(), w.detach(), ends), out.detach())
    torch.testing.assert_close(oracle.dgrad(dy, w.detach(), ends), a.grad)
    torch.testing.assert_close(oracle.wgrad(dy, a.detach(), ends).transpose(1, 2), w.grad)
