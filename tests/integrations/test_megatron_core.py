"""Megatron-Core's own flex dispatcher over the integration, against its all-to-all dispatcher; skipped without it.

    pip install --no-deps megatron-core        (into a folder of its own: --target DIR, and PYTHONPATH=DIR)

Megatron is unmodified. Even on the CPU its all-to-all dispatcher requests streams from torch.cuda, and expects counts
from a GPU; `_cpu_stand_ins` provides both for the duration of the test. The integration does not need them.
"""

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from triton_ep.distributed import current_heap
from triton_ep.integrations import deep_ep


def _is_installed() -> bool:
    return importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None


pytestmark = [
    pytest.mark.plain,
    pytest.mark.skipif(not _is_installed(), reason="megatron-core is not installed"),
]

HIDDEN, TOPK, EXPERTS = 16, 2, 2  # experts per rank
MODES: dict[str, dict[str, Any]] = {
    "dropless": {},
    "capacity": {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "probs"},
    "padding": {},
}


class _NoStream:
    """Stands for a stream and an event on a machine without a GPU: all work is done already."""

    def wait_stream(self, other: object) -> None:
        """No effect."""

    def record_event(self) -> "_NoStream":
        """An event that has already happened."""
        return self

    def synchronize(self) -> None:
        """No effect."""


@contextlib.contextmanager
def _cpu_stand_ins(dispatcher_module: Any) -> Iterator[None]:
    """Provide the parts of torch.cuda that Megatron uses even without a GPU."""
    if current_heap().device.type == "cuda":
        yield
        return
    stream = _NoStream()

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    with (
        mock.patch.object(dispatcher_module.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", stream),
        mock.patch.object(dispatcher_module, "maybe_move_tensor_to_cpu", to_cpu),
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
        mock.patch.object(torch.cuda, "stream", return_value=contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
    ):
        yield


def _groups(rank: int) -> Any:
    """Expert parallelism over the world, no tensor parallelism."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    groups = ProcessGroupCollection()
    groups.ep = groups.tp_ep = dist.group.WORLD
    groups.expt_tp = groups.tp = groups.cp = alone
    return groups


def _config(kind: str, mode: str, backend: str = "deepep") -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    ranks = dist.get_world_size()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=EXPERTS * ranks,
        moe_router_topk=TOPK,
        moe_token_dispatcher_type=kind,
        moe_router_dtype="fp32",
        expert_model_parallel_size=ranks,
        **({"moe_flex_dispatcher_backend": backend} if kind == "flex" else {}),
        **MODES[mode],
    )
    # Megatron documents this for FP8 and FP4 only, which need TransformerEngine; without them the rows are the same.
    config.moe_router_padding_for_quantization = mode == "padding"
    return config


def _inputs(rank: int, mode: str) -> tuple[torch.Tensor, ...]:
    """Tokens, routing map, probabilities and a gradient, whose products and sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    num_experts = EXPERTS * dist.get_world_size()
    tokens = (40 if mode == "padding" else 9) + 3 * rank
    x, grad = (torch.randint(-2, 3, (tokens, 1, HIDDEN), generator=generator).bfloat16() for _ in range(2))
    ids = torch.rand(tokens, num_experts, generator=generator).topk(TOPK, 1).indices
    routing_map = torch.zeros(tokens, num_experts, dtype=torch.bool).scatter(1, ids, True)
    if mode == "capacity":
        # Each expert drops its third token, as a router with a capacity factor may.
        routing_map &= routing_map.cumsum(0) != 3
    probs = torch.randint(1, 5, routing_map.shape, generator=generator) / 4 * routing_map
    device = current_heap().device
    return x.to(device), routing_map.to(device), probs.to(device), grad.to(device)


def _through(dispatcher: Any, rank: int, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Output and gradients of a MoE layer on this dispatcher, whose experts multiply by a power of two."""
    x, routing_map, probs, grad = inputs
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    hidden, moved = dispatcher.dispatch_preprocess(x, routing_map.clone(), probs)
    hidden, moved = dispatcher.token_dispatch(hidden, moved)
    rows, counts, row_probs = dispatcher.dispatch_postprocess(hidden, moved)
    assert rows.shape[0] == int(counts.sum())
    experts = torch.arange(rank * EXPERTS, (rank + 1) * EXPERTS).repeat_interleave(counts.cpu())
    scale = (2.0 ** (experts % 3 - 1)).to(rows.device)
    rows = (rows.float() * (scale * row_probs).unsqueeze(1)).bfloat16()
    combined = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
    out = dispatcher.combine_postprocess(combined)
    out.backward(grad)
    return out.detach(), x.grad, probs.grad * routing_map, counts.cpu()


def _check(rank: int, nodes: int, ranks_per_node: int, mode: str, backend: str) -> None:
    deep_ep.install()
    try:
        import megatron.core.jit

        megatron.core.jit.disable_jit_fuser()  # torch.compile of three lines would take most of the time
        from megatron.core.transformer.moe import fused_a2a, token_dispatcher

        assert fused_a2a.HAVE_DEEP_EP
        assert fused_a2a.Buffer is deep_ep.Buffer
        assert fused_a2a.HybridEPBuffer is deep_ep.HybridEPBuffer
        local = list(range(rank * EXPERTS, (rank + 1) * EXPERTS))
        groups, inputs = _groups(rank), _inputs(rank, mode)
        flex = token_dispatcher.MoEFlexTokenDispatcher(EXPERTS, local, _config("flex", mode, backend), groups)
        results = [_through(flex, rank, inputs) for _ in range(2)]
        with _cpu_stand_ins(token_dispatcher):
            plain = token_dispatcher.MoEAlltoAllTokenDispatcher(EXPERTS, local, _config("alltoall", mode), groups)
            expected = _through(plain, rank, inputs)
        for result in results:
            for name, seen, wanted in zip(("output", "dx", "dprobs"), result, expected, strict=False):
                assert torch.equal(seen, wanted), name
            # The two pad differently: the all-to-all dispatcher the rows of every sender, the other the received rows.
            if mode == "padding":
                assert (result[3] % 16 == 0).all()
            else:
                assert torch.equal(result[3], expected[3])
    finally:
        if "fused_a2a" in locals():
            fused_a2a._buffer = None
            if fused_a2a._hybrid_ep_buffer is not None:
                fused_a2a._hybrid_ep_buffer.close()
            fused_a2a.reset_hybrid_ep_buffer()
        deep_ep.release()
        deep_ep.uninstall()


@pytest.mark.parametrize(
    "nodes, ranks_per_node, mode, manager",
    # HybridEP's manager pads for FP8 and FP4 only, which need TransformerEngine.
    [(1, ranks, mode, "deepep") for ranks in (2, 4, 8) for mode in MODES]
    + [(1, ranks, mode, "hybridep") for ranks in (2, 4, 8) for mode in ("dropless", "capacity")],
)
def test_flex_dispatcher_equals_the_all_to_all_dispatcher(run_ranks, nodes, ranks_per_node, mode, manager):
    """Outputs and gradients of tokens and probabilities, bit for bit; twice with one dispatcher."""
    run_ranks(_check, nodes, ranks_per_node, mode, manager)
