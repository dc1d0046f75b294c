"""A build compiles exactly the kernels that the experts of a layer launch on a GPU of that architecture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from triton_ep.ops import experts, prepare, row_scales
from triton_ep.ops.activation import Activation
from triton_ep.ops.row_scales import RowScaled
from triton_ep.ops.tiles import tile_table
from triton_ep.runtime import launch as runtime
from triton_ep.runtime.plans.experts import experts as requests_of_experts
from triton_ep.runtime.plans.request import KernelRequest
from triton_ep.runtime.plans.shape import Plan

EXPERTS, F, H = 4, 128, 192
SPECIALISED = ("f", "k", "n", "stride_em", "stride_om")
"""Integers that the kernels are specialised by; the interpreter does not know them."""


def _request(plan: Plan, args: Sequence[Any]) -> KernelRequest:
    types, numbers = {}, {}
    for (name, declared), arg in zip(runtime.spec(plan.kernel).arguments.items(), args, strict=True):
        if isinstance(arg, runtime.Boxes):
            types[name] = arg.type
        elif isinstance(arg, torch.Tensor) and f"*{runtime._TYPES[arg.dtype]}" != declared:
            types[name] = f"*{runtime._TYPES[arg.dtype]}"
        elif name in SPECIALISED:
            numbers[name] = arg
    return KernelRequest.of(plan, types, numbers)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Signatures of all launches, as if on an H200; nothing runs."""
    found: dict[str, str] = {}

    def launch(plan: Plan, grid: int, **arguments: Any) -> None:
        request = _request(plan, [arguments[name] for name in runtime.spec(plan.kernel).arguments])
        found[request.signature()] = request.text()

    monkeypatch.setattr(runtime, "launch", launch)
    monkeypatch.setattr(runtime, "architecture", lambda: "sm_90")
    monkeypatch.setattr(experts, "programs", lambda device: 132)
    for module in (experts, prepare, row_scales):
        monkeypatch.setattr(module, "INTERPRETING", False)
    return found


def _zeros(*shape: int, scaled: bool) -> Any:
    """An operand, in bf16 or with row scales."""
    if not scaled:
        return torch.zeros(shape, dtype=torch.bfloat16)
    return RowScaled(torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.zeros(shape[:-1]))


def _steps(how: str, rows: int, training: bool, bias: torch.Tensor | None, activation: Activation) -> None:
    """Run forward, and backward of the rows."""
    scaled = how != "bf16"
    offs, weights = torch.zeros(EXPERTS + 1, dtype=torch.int32), torch.ones(rows)
    x, w13 = _zeros(rows, H, scaled=scaled), _zeros(EXPERTS, 2 * F, H, scaled=scaled)
    a, w2 = _zeros(rows, F, scaled=scaled), _zeros(EXPERTS, H, F, scaled=scaled)
    given = {"fast": how == "fast", "tiles": tile_table(offs, rows)}
    b13, b2 = (None, None) if bias is None else (bias[:, : 2 * F], bias[:, :H])
    experts.gate_up(
        x, w13, offs, row_weights=weights, activation=activation, bias=b13, keep_pre=training,
        act="mx" if scaled else "bf16", **given,
    )  # fmt: skip
    for aligned in (True, False):
        experts.rows_product(a, w2, offs, bias=b2, row_weights=weights, aligned=aligned, **given)
        if training:
            dpre = _zeros(rows, 2 * F, scaled=scaled)
            back = _zeros(EXPERTS, H, 2 * F, scaled=True) if scaled else w13.transpose(1, 2)
            experts.rows_product(dpre, back, offs, aligned=aligned, **given)
    if scaled and training:
        weight = torch.zeros(EXPERTS, 2 * F, H, dtype=torch.bfloat16)
        for uses in ("both", "fprop", "dgrad"):
            prepare.prepare_weights(weight, uses, out=prepare.prepare_weights(weight, uses))
        for columns in (1024, 2048, 4096, 8192, 16384):
            wide = torch.zeros(rows, columns, dtype=torch.bfloat16)
            row_scales.quantize_to_rows(wide, offs)
            scales = torch.zeros(rows, columns // 32, dtype=torch.uint8)
            row_scales.rebase_rows(wide.to(torch.float8_e4m3fn), scales, offs)
            row_scales.dequantize_rows_in_use(_zeros(rows, columns // 2, scaled=True), offs)
            row_scales.dequantize_rows_beside(_zeros(rows, columns, scaled=True), offs, slice(0, columns // 2), None)


@pytest.mark.parametrize("how", ["bf16", "fp8", "fast"])
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("gpt_oss", [False, True])
def test_experts_launch_what_is_built(launched: dict[str, str], how: str, few: bool, gpt_oss: bool) -> None:
    """With and without training, for few rows and many, with and without a bias; every variant is used."""
    options: dict[str, Any] = {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0} if gpt_oss else {}
    bias = torch.zeros(EXPERTS, 512, dtype=torch.bfloat16) if gpt_oss else None
    for training in (True, False):
        for rows in (8, 20, 40) if few else (200,):
            _steps(how, rows * EXPERTS, training, bias, Activation(**options))
    wanted = requests_of_experts(
        EXPERTS, (how,), few_rows=(few,), aligned=(True, False), bias="bf16" if gpt_oss else None, **options
    )
    named = {request.signature(): request.text() for request in wanted}
    assert [text for signature, text in launched.items() if signature not in named] == []
    assert [text for signature, text in named.items() if signature not in launched] == []
