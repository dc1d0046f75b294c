"""Experts on received rows, through the integrations of torchtitan, Megatron and vLLM, against dense experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integrations import vllm_stand_in as stand_in
from tests.nn import dense
from triton_ep import MXTensor
from triton_ep.distributed import current_heap
from triton_ep.errors import ConfigError, InputError
from triton_ep.integrations import vllm as vllm_door
from triton_ep.integrations.arrived import ArrivedExperts
from triton_ep.integrations.megatron import GroupedExperts
from triton_ep.runtime.launch import INTERPRETING

pytestmark = pytest.mark.plain
DEVICE = "cpu" if INTERPRETING else "cuda"
EXPERTS, HIDDEN, FFN = 3, 64, 96
COUNTS = [5, 0, 9]
LEAST_DB = {"bf16": 38.0, "mxfp8": 19.0, "mxfp8-exact": 19.0}


def _randn(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(scale).to(DEVICE)


def _operands(dtype: torch.dtype) -> list[torch.Tensor]:
    """Leaves x (with rows past the last expert's), gate, up, down."""
    x = _randn(sum(COUNTS) + 2, HIDDEN, seed=1).bfloat16()
    gate, up = (_randn(EXPERTS, FFN, HIDDEN, seed=seed, scale=HIDDEN**-0.5).to(dtype) for seed in (2, 3))
    down = _randn(EXPERTS, HIDDEN, FFN, seed=4, scale=FFN**-0.5).to(dtype)
    return [each.requires_grad_() for each in (x, gate, up, down)]


def _exact(leaves: list[torch.Tensor], weights: torch.Tensor | None, grad: torch.Tensor) -> list[torch.Tensor]:
    """y of the used rows, and gradients of x, gate, up and down, in float64."""
    x, gate, up, down = (leaf.detach().double().cpu().requires_grad_() for leaf in leaves)
    used = sum(COUNTS)
    ids = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(COUNTS)).unsqueeze(1)
    ones = torch.ones(used) if weights is None else weights[:used].cpu().double()
    (y,) = dense.moe([x[:used]], [ids], [ones.unsqueeze(1).double()], torch.cat([gate, up], 1), down)
    return [y.detach(), *torch.autograd.grad(y, (x, gate, up, down), grad[:used].double().cpu())]


@pytest.mark.parametrize(("recipe", "dtype"), [("bf16", torch.float32), ("mxfp8", torch.bfloat16)])
def test_weights_of_a_framework(recipe: str, dtype: torch.dtype) -> None:
    """Separate gate and up, as in torchtitan: forward, backward, and again after an optimizer step."""
    leaves, experts = _operands(dtype), ArrivedExperts(recipe)
    x, gate, up, down = leaves
    counts, used = torch.tensor(COUNTS, device=DEVICE), sum(COUNTS)
    grad = _randn(*x.shape, seed=5).bfloat16()
    optimizer = torch.optim.SGD([gate, up, down], lr=0.1)
    for _ in range(2):
        y = experts(x, counts, (gate, up), down)
        found = [y[:used], *torch.autograd.grad(y, leaves, grad)]
        found[1] = found[1].clone()
        found[1][used:] = 0  # rows past the last expert's are undefined
        for name, seen, wanted in zip(("y", "x", "gate", "up", "down"), found, _exact(leaves, None, grad), strict=True):
            assert dense.decibel(seen, wanted) > LEAST_DB[recipe], name
        for leaf, by in zip((gate, up, down), found[2:], strict=True):
            leaf.grad = by
        optimizer.step()
    if recipe == "mxfp8":  # rows received in MXFP8
        quantised = experts(MXTensor.to_mx(x.detach()), counts, (gate, up), down)[:used]
        assert dense.decibel(quantised, _exact(leaves, None, grad)[0]) > LEAST_DB[recipe]
    with pytest.raises(ConfigError, match="'fp4'"):
        ArrivedExperts("fp4")
    with pytest.raises(InputError, match=r"counts must be integers \[e\]"):
        experts(x, counts.float(), (gate, up), down)


def test_megatron_calls_them_behind_its_dispatcher() -> None:
    """(output, None) for rows, host counts and probabilities; gradients of the weights go to main_grad."""
    leaves = _operands(torch.bfloat16)
    x, gate, up, down = leaves
    experts = GroupedExperts(HIDDEN, FFN, EXPERTS, device=DEVICE)
    assert all(parameter.allreduce is False for parameter in experts.parameters())
    experts.load_state_dict({"w1": gate.detach(), "w3": up.detach(), "w2": down.detach()})
    for parameter in experts.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, device=DEVICE)
    probs = (_randn(x.shape[0], seed=6).abs() + 0.5).requires_grad_()
    grad, used = _randn(*x.shape, seed=5).bfloat16(), sum(COUNTS)
    y, bias = experts(x, torch.tensor(COUNTS), probs)
    assert bias is None
    y.backward(grad)
    exact_y, exact_x, *exact = _exact(leaves, probs.detach(), grad)
    assert dense.decibel(y[:used], exact_y) > 38 and dense.decibel(x.grad[:used], exact_x[:used]) > 38
    assert experts.w13.grad is None and experts.w2.grad is None
    assert dense.decibel(experts.w13.main_grad, torch.cat(exact[:2], 1)) > 38
    assert dense.decibel(experts.w2.main_grad, exact[2]) > 38
    assert probs.grad is not None and probs.grad[:used].all()
    with pytest.raises(InputError, match=r"tokens_per_expert must be \[3\]"):
        experts(x, torch.tensor([1, 2]))


def _vllm(rank: int, nodes: int, ranks_per_node: int) -> None:
    world, device = nodes * ranks_per_node, current_heap().device
    num, tokens, topk = 2 * world, 6, 2
    w13 = torch.randn(num, 2 * FFN, HIDDEN, generator=torch.Generator().manual_seed(1)) * HIDDEN**-0.5
    w2 = torch.randn(num, HIDDEN, FFN, generator=torch.Generator().manual_seed(2)) * FFN**-0.5
    w13, w2 = w13.bfloat16(), w2.bfloat16()
    mine = slice(2 * rank, 2 * rank + 2)
    draw = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(tokens - 5 * rank, HIDDEN, generator=draw).bfloat16()
    ids = torch.rand(len(x), num, generator=draw).topk(topk).indices.int()
    weights = torch.rand(len(x), topk, generator=draw)
    (exact,) = dense.moe([x.double()], [ids], [weights.double()], w13.double(), w2.double())
    for options, dtype in (({}, None), ({}, "mxfp8"), ({"batched": True}, None), ({"capacity": 64}, "mxfp8"),
                           ({"batched": True}, "mxfp8")):  # fmt: skip
        quant: Any = SimpleNamespace(quant_dtype=dtype, is_scale_swizzled=False, per_act_token_quant=False,
                                     block_shape=None, a1_scale=None, a1_gscale=None)  # fmt: skip
        with stand_in.installed():
            sizes = {"max_tokens": tokens, "hidden": HIDDEN, "topk": topk, "num_experts": num}
            made = vllm_door.TritonEPPrepareAndFinalize(dist.group.WORLD, **sizes, **options)
            experts = vllm_door.TritonEPExperts(made, quant)
            assert isinstance(experts, stand_in.FusedMoEExpertsModular) and not experts.supports_chunking()
            assert experts._supports_activation("silu") and not experts._supports_activation("swigluoai")
            assert experts.activation_format() is made.activation_format
            placed = stand_in.expert_map_of(rank, world, num)
            adapter = stand_in.Adapter(experts, w13[mine].to(device), w2[mine].to(device), placed)
            out = stand_in.kernel(made, adapter, x.to(device), weights.to(device), ids.to(device), num)
            if len(x):
                assert dense.decibel(out, exact) > (38 if dtype is None else 19), (options, dtype)
            with pytest.raises(ConfigError, match="'nvfp4'"):
                vllm_door.Experts(made, SimpleNamespace(quant_dtype="nvfp4"))
            made.close()


def test_vllm_runs_them_between_prepare_and_finalize(run_ranks):
    """Standard and batched, bf16 and MXFP8, exact and with a capacity."""
    run_ranks(_vllm, 1, 2)
