"""A build compiles exactly the kernels that the backward pass of experts launches on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from triton_ep.ops import arrivals, experts_backward, grouped_bf16, weighted_rows
from triton_ep.ops.activation import Activation
from triton_ep.ops.row_scales import RowScaled
from triton_ep.runtime import launch as runtime
from triton_ep.runtime.plans.experts_backward import experts_backward as requests_of_experts
from triton_ep.runtime.plans.request import KernelRequest
from triton_ep.runtime.plans.shape import Plan

EXPERTS, F, H, ROWS = 4, 128, 192, 256


def _request(plan: Plan, args: Sequence[Any]) -> KernelRequest:
    types, numbers, unaligned = {}, {}, []
    for (name, declared), arg in zip(runtime.spec(plan.kernel).arguments.items(), args, strict=True):
        if isinstance(arg, runtime.Boxes):
            types[name] = arg.type
        elif isinstance(arg, torch.Tensor):
            if f"*{runtime._TYPES[arg.dtype]}" != declared:
                types[name] = f"*{runtime._TYPES[arg.dtype]}"
            if arg.data_ptr() % 16:
                unaligned.append(name)
        elif name in runtime.spec(plan.kernel).specialised:
            numbers[name] = arg
    return KernelRequest.of(plan, types, numbers, unaligned)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Signatures of all launches, as if on a GPU; nothing runs."""
    found: dict[str, str] = {}

    def launch(plan: Plan, grid: int, **arguments: Any) -> None:
        request = _request(plan, [arguments[name] for name in runtime.spec(plan.kernel).arguments])
        found[request.signature()] = request.text()

    monkeypatch.setattr(runtime, "launch", launch)
    monkeypatch.setattr(runtime, "INTERPRETING", False)
    monkeypatch.setattr(grouped_bf16, "launch", launch)
    for module in (experts_backward, grouped_bf16):
        monkeypatch.setattr(module, "INTERPRETING", False)
    monkeypatch.setattr(experts_backward, "programs", lambda device: 132)
    return found


def _zeros(*shape: int, scaled: bool = False) -> Any:
    """An operand, in bf16 or with row scales."""
    if not scaled:
        return torch.zeros(shape, dtype=torch.bfloat16)
    return RowScaled(torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.zeros(shape[:-1]))


def _steps(how: str, tiles: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> None:
    """Compute all gradients, in one arithmetic."""
    scaled, offs, row_weights = how != "bf16", torch.zeros(EXPERTS + 1, dtype=torch.int32), torch.ones(ROWS)
    dy, pre = _zeros(ROWS, H, scaled=scaled), _zeros(ROWS, 2 * F)
    w2 = _zeros(EXPERTS, F, H, scaled=True) if scaled else _zeros(EXPERTS, H, F)
    given = {"activation": activation, "fast": how == "fast", "tiles": tiles}
    experts_backward.down_dgrad(dy, w2, pre, offs, row_weights=row_weights, bias=bias, **given)
    if not scaled:
        numbers = torch.zeros(2, 8, dtype=torch.int32)
        arrivals.expand_arrivals(_zeros(2, H), numbers, numbers, 0, offs, offs[:-1], ROWS)
    for aligned in (True, False):
        experts_backward.weight_gradient(pre, _zeros(ROWS, H), offs, aligned=aligned)
        main_grad = torch.zeros(EXPERTS, 2 * F, H)
        given = (pre, _zeros(ROWS, H), offs)
        for beside in (False, True):
            experts_backward.weight_gradient(*given, out=main_grad, accumulate=True, aligned=aligned, beside=beside)
    if bias is not None:
        experts_backward.bias_gradient(pre, offs)
        experts_backward.bias_gradient(_zeros(ROWS, H), offs, row_weights)


@pytest.mark.parametrize("how", ["bf16", "fp8", "fast"])
@pytest.mark.parametrize("gpt_oss", [False, True])
def test_the_backward_pass_launches_what_is_built(launched: dict[str, str], how: str, gpt_oss: bool) -> None:
    """With and without a bias, and the backward of a combine with weights; every variant is used."""
    activation = Activation("silu", limit=7.0, alpha=1.702, up_offset=1.0) if gpt_oss else Activation()
    tiles = torch.zeros(1 + EXPERTS + 2, 4, dtype=torch.int32)
    _steps(how, tiles, torch.zeros(EXPERTS, H, dtype=torch.bfloat16) if gpt_oss else None, activation)
    y, weights = _zeros(ROWS, H), torch.ones(ROWS)
    for offs in (None, torch.zeros(EXPERTS + 1, dtype=torch.int32)):
        weighted_rows.weighted_rows_backward(y, y, weights, offs)
        scale = torch.zeros(ROWS, H // 32, dtype=torch.uint8)
        weighted_rows.weighted_rows_backward(y.to(torch.float8_e4m3fn), y, weights, offs, scale=scale)
    bias = "bf16" if gpt_oss else None
    wanted = requests_of_experts(EXPERTS, (how,), aligned=(True, False), bias=bias, **activation._asdict())
    named = {request.signature(): request.text() for request in wanted}
    assert [text for signature, text in launched.items() if signature not in named] == []
    assert [text for signature, text in named.items() if signature not in launched] == []
