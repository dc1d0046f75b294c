"""Every public argument of every integration, with senseless values: each is accepted, or raises an EPError.

All ranks pass the same wrong value, so that no rank waits for another. Each sweep ends with the right call, whose
result must be right: a refused call leaves no state behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import triton_ep.integrations.te as te
from tests.patience import LIMIT_S
from triton_ep import pipeline
from triton_ep.distributed import current_heap
from triton_ep.errors import EPError
from triton_ep.integrations import deep_ep, megatron, torchtitan, vllm
from triton_ep.integrations.hybrid_ep import HybridEPBuffer, indices_to_map
from triton_ep.layer import EPAll2AllLayer

pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore:MXFP8 is emulated")]

HIDDEN, TOPK, TOKENS = 128, 2, 6


def _wrong_values(device: torch.device) -> list[Any]:
    """One value of every kind. A value that happens to be right for an argument is accepted."""
    return [
        None,
        "4",
        float("nan"),
        -1,
        1 << 70,
        [1.5, "x"],
        object(),
        torch.ones(2, 3, device=device, dtype=torch.int64),
        torch.ones(TOKENS, HIDDEN, device="meta", dtype=torch.bfloat16),
    ]


_OF_LAYERS = {"exp_indices", "input", "weight", "weights", "values"}
"""Names of arguments of layers."""


class _Sweep:
    """Collects errors that are not of this package's classes, or name arguments that the caller does not know."""

    def __init__(self) -> None:
        self.device = current_heap().device
        self.nameless: list[str] = []
        self.refused = 0

    def over(self, call: Callable[..., Any], right: dict[str, Any], *names: str) -> None:
        """Call with each argument of `right`, or each of these names, replaced by each wrong value."""
        for name, value in itertools.product(names or right, _wrong_values(self.device)):
            try:
                call(**{**right, name: value})
                continue
            except Exception as caught:
                error = caught
            if isinstance(error, EPError):
                self.refused += 1
                first = str(error).partition(" ")[0].partition("[")[0]
                if first not in _OF_LAYERS or first in right or first in names:
                    continue
            shown = f"{type(value).__name__} {list(value.shape)}" if isinstance(value, torch.Tensor) else value
            where = getattr(call, "__qualname__", call)
            self.nameless.append(f"{where}({name}={shown!r:.40}): {type(error).__name__}: {error!s:.150}")

    def end(self, least: int) -> None:
        """Check that every error is an EPError, and that enough values were refused."""
        assert not self.nameless, f"{len(self.nameless)} without a name:\n" + "\n".join(self.nameless)
        assert self.refused > least, self.refused


def _tokens(device: torch.device, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.arange(TOKENS * HIDDEN, device=device).view(TOKENS, HIDDEN).remainder(7).bfloat16()
    ids = torch.stack([torch.arange(TOKENS) % experts, (torch.arange(TOKENS) + 1) % experts], 1).to(device)
    return x, ids, torch.full((TOKENS, TOPK), 0.5, device=device)


def _deep_ep(rank: int, nodes: int, ranks_per_node: int) -> None:
    sweep, ranks = _Sweep(), nodes * ranks_per_node
    experts = 2 * ranks
    x, ids, weights = _tokens(sweep.device, experts)
    nbytes = deep_ep.Config().get_nvl_buffer_size_hint(2 * HIDDEN, ranks)
    rdma = deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, ranks, experts)
    made = {"num_nvl_bytes": nbytes, "num_rdma_bytes": rdma, "low_latency_mode": True, "timeout_s": LIMIT_S}
    sweep.over(deep_ep.Buffer, {"group": dist.group.WORLD, **made})
    sweep.over(deep_ep.Config, {"num_sms": 4})
    sweep.over(deep_ep.Config().get_nvl_buffer_size_hint, {"hidden_bytes": 4, "num_ranks": 2})
    sizes = {"num_max_dispatch_tokens_per_rank": TOKENS, "hidden": HIDDEN, "num_experts": experts}
    sweep.over(deep_ep.Buffer.get_low_latency_rdma_size_hint, {**sizes, "num_ranks": ranks})
    before = deep_ep.Buffer.num_sms
    sweep.over(deep_ep.Buffer.set_num_sms, {"new_num_sms": 4})
    deep_ep.Buffer.num_sms, deep_ep.Buffer.budgeted = before, False

    buffer = deep_ep.Buffer(dist.group.WORLD, **made)
    sweep.over(buffer.get_dispatch_layout, {"topk_idx": ids, "num_experts": experts, "previous_event": None})
    _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, experts)
    right = {
        "x": x,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": ids,
        "topk_weights": weights,
        "expert_alignment": 1,
        "num_worst_tokens": 0,
        "config": None,
        "previous_event": None,
        "handle": None,
    }
    sweep.over(buffer.dispatch, right)
    pair = (x.to(torch.float8_e4m3fn), torch.ones(TOKENS, 1, device=x.device))
    sweep.over(buffer.dispatch, {**right, "x": pair}, "previous_event", "topk_idx")
    rows, _, row_weights, _, handle, _ = buffer.dispatch(**right)
    sweep.over(buffer.dispatch, {"x": x, "handle": handle, "previous_event": None})
    back = {"x": rows, "handle": handle, "topk_weights": row_weights, "bias": None, "previous_event": None}
    sweep.over(buffer.combine, back)
    sweep.over(deep_ep.EventOverlap, {"event": None})
    sweep.over(deep_ep.EventHandle, {"event": None})
    low = {
        "x": x,
        "topk_idx": ids,
        "num_max_dispatch_tokens_per_rank": TOKENS,
        "num_experts": experts,
        "cumulative_local_expert_recv_stats": None,
        "dispatch_wait_recv_cost_stats": None,
        "use_fp8": False,
    }
    sweep.over(buffer.low_latency_dispatch, low)
    sweep.over(buffer.low_latency_dispatch, {**low, "use_fp8": True}, "x", "topk_idx")
    slabs, _, low_handle, _, _ = buffer.low_latency_dispatch(**low)
    sum_of = {"x": slabs, "topk_idx": ids, "topk_weights": weights, "handle": low_handle, "out": None}
    sweep.over(buffer.low_latency_combine, sum_of)
    sweep.over(buffer.get_next_low_latency_combine_buffer, {"handle": low_handle})
    sweep.over(buffer.clean_low_latency_buffer, sizes)

    combined, _, _ = buffer.combine(**{**back, "topk_weights": None})
    on_ranks = torch.stack([(ids // 2 == each).any(1) for each in range(ranks)]).sum(0)
    assert torch.equal(combined, (x.float() * on_ranks.unsqueeze(1)).bfloat16())
    low_sum, _, _ = buffer.low_latency_combine(**sum_of)
    assert torch.equal(low_sum, x)
    buffer.destroy()
    sweep.end(60)


def _hybrid_ep(rank: int, nodes: int, ranks_per_node: int) -> None:
    sweep, ranks = _Sweep(), nodes * ranks_per_node
    experts = 2 * ranks
    x, ids, weights = _tokens(sweep.device, experts)
    sizes = {
        "group": dist.group.WORLD,
        "hidden_dim": HIDDEN,
        "max_num_of_tokens_per_rank": TOKENS,
        "num_local_experts": 2,
        "num_sms_dispatch_api": None,
        "num_sms_combine_api": None,
        "num_of_hybrid_ep_ranks_per_nvlink_domain": ranks_per_node,
        "topk": None,
        "timeout_s": LIMIT_S,
        "use_fp8": False,
        "enable_local_combine": False,
    }
    sweep.over(HybridEPBuffer, sizes)
    buffer = HybridEPBuffer(**sizes)
    routing_map, probs = indices_to_map(ids, weights, TOKENS, experts)
    sweep.over(
        indices_to_map,
        {"topk_idx": ids, "topk_weights": weights, "num_of_tokens": TOKENS, "num_of_experts": experts},
    )
    right: dict[str, Any] = {
        "hidden": x,
        "routing_map": routing_map,
        "probs": probs,
        "scaling_factor": None,
        "num_permuted_tokens": None,
        "pad_multiple": None,
        "num_of_experts_per_rank": None,
        "num_of_experts": None,
        "num_of_tokens_per_rank": None,
        "handle": None,
        "use_fp8": None,
    }
    sweep.over(buffer.dispatch_with_permute, right)
    by_ids = {**right, "routing_map": None, "probs": None, "topk_idx": ids, "topk_weights": weights}
    sweep.over(buffer.dispatch_with_permute, by_ids, "topk_idx", "topk_weights", "routing_map")
    one_byte = {"hidden": x.to(torch.float8_e4m3fn), "scaling_factor": torch.ones(TOKENS, 1, device=x.device)}
    one_byte_call = {**right, **one_byte, "use_fp8": True}
    sweep.over(buffer.dispatch_with_permute, one_byte_call, "hidden", "scaling_factor", "use_fp8")
    hidden, row_probs, _, _, handle = buffer.dispatch_with_permute(**right)
    again = {"hidden": x, "handle": handle, "probs": probs, "pad_multiple": None, "num_permuted_tokens": None}
    sweep.over(buffer.dispatch_with_permute, again)
    again = {"hidden": x, "handle": handle, "topk_idx": ids, "topk_weights": weights, "use_fp8": None}
    sweep.over(buffer.dispatch_with_permute, again)
    back = {"hidden": hidden, "probs": row_probs, "handle": handle, "pad_multiple": None}
    sweep.over(buffer.combine_with_unpermute, back)
    plain = {
        name: right[name] for name in ("hidden", "scaling_factor", "routing_map", "probs", "num_of_experts", "handle")
    }
    sweep.over(buffer.dispatch, {**plain, "num_dispatched_tokens": None, "num_of_tokens_per_rank": None})
    arrived, arrived_probs, _, by_rank = buffer.dispatch(**plain)
    sweep.over(buffer.dispatch, {"hidden": x, "handle": by_rank, "probs": probs})
    sweep.over(buffer.combine, {"hidden": arrived, "probs": arrived_probs, "handle": by_rank})
    combined, combined_probs = buffer.combine_with_unpermute(**back)
    assert torch.equal(combined, x * TOPK) and torch.equal(combined_probs, probs)
    buffer.close()

    make = {"group": dist.group.WORLD, "hidden_dim": HIDDEN, "num_tokens": TOKENS, "num_local_experts": 2}
    sweep.over(megatron.init_hybrid_ep_buffer, {**make, "num_sms_dispatch_api": None, "topk": None})
    megatron.reset_hybrid_ep_buffer()
    call = {"x": x, "routing_map": routing_map, "probs": probs, "group": dist.group.WORLD, "num_local_experts": 2}
    sweep.over(megatron.hybrid_ep_dispatch, {**call, "num_permuted_tokens": None, "pad_multiple": None})
    megatron.reset_hybrid_ep_buffer()
    hidden, *_, handle = megatron.hybrid_ep_dispatch(**call)
    sweep.over(megatron.hybrid_ep_combine, {"x": hidden, "handle": handle, "pad_multiple": None})
    assert torch.equal(megatron.hybrid_ep_combine(hidden, handle), x * TOPK)
    megatron.reset_hybrid_ep_buffer()
    sweep.end(60)


def _megatron(rank: int, nodes: int, ranks_per_node: int) -> None:
    sweep, ranks = _Sweep(), nodes * ranks_per_node
    experts = 2 * ranks
    x, ids, weights = _tokens(sweep.device, experts)
    call = {"x": x, "token_indices": ids, "token_probs": weights, "num_experts": experts, "group": dist.group.WORLD}
    sweep.over(megatron.get_hidden_bytes, {"x": x})
    sweep.over(megatron.get_buffer, {"group": dist.group.WORLD, "hidden_bytes": 2 * HIDDEN})
    sweep.over(megatron.fused_dispatch, call)
    rows, _, _, _, handle = megatron.fused_dispatch(**call)
    sweep.over(megatron.fused_combine, {"x": rows, "group": dist.group.WORLD, "handle": handle})
    on_ranks = torch.stack([(ids // 2 == each).any(1) for each in range(ranks)]).sum(0)
    combined, _ = megatron.fused_combine(rows, dist.group.WORLD, handle)
    assert torch.equal(combined, (x.float() * on_ranks.unsqueeze(1)).bfloat16())
    deep_ep.release()
    sweep.end(20)


def _te(rank: int, nodes: int, ranks_per_node: int) -> None:
    sweep, ranks = _Sweep(), nodes * ranks_per_node
    experts = 2 * ranks
    x, ids, weights = _tokens(sweep.device, experts)
    boot = {
        "ep_group": dist.group.WORLD,
        "num_experts": experts,
        "max_tokens_per_rank": TOKENS,
        "hidden_dim": HIDDEN,
        "num_topk": TOPK,
        "recv_capacity_per_rank": None,
        "max_num_sms": 0,
        "zero_copy": False,
        "drop_on_overflow": False,
        "max_token_dtype": torch.bfloat16,
    }

    def bootstrap(**given: Any) -> None:
        te.ep_finalize()
        te.ep_bootstrap(**given)

    sweep.over(bootstrap, boot)
    bootstrap(**boot)
    sizes = {
        "top_k": TOPK,
        "max_tokens_per_rank": TOKENS,
        "hidden_dim": HIDDEN,
        "num_local_experts": 2,
        "recv_capacity_per_rank": None,
        "alignment": 0,
        "payload_dtype": torch.bfloat16,
        "device": None,
        "dispatch_fwd_quant_recipe": None,
        "combine_bwd_quant_recipe": None,
    }
    sweep.over(te.EpBuffer, sizes)
    buffer = te.EpBuffer(**sizes)
    call = {"buffer": buffer, "tokens": x, "topk_idx": ids, "topk_weights": weights}
    sweep.over(te.ep_dispatch, {**call, "recv_tokens": None, "recv_topk_weights": None})
    rows, _, _ = te.ep_dispatch(**call)
    back = {"buffer": buffer, "expert_out": rows, "num_local_tokens": TOKENS, "grad_out": None}
    sweep.over(te.ep_combine, back)
    assert torch.equal(te.ep_combine(**back), x * TOPK)
    te.ep_finalize()
    with EPAll2AllLayer(dist.group.WORLD, TOKENS, 64, TOPK, rank, experts, ranks_per_node, ranks) as layer:
        block = {"layer": layer, "ffn_hidden_size": 64, "activation": "swiglu", "bias": False, "router_seed": 0}
        sweep.over(te.EPMoE, block)
    linear = {"in_features": 64, "out_features": 64, "bias": True, "params_dtype": torch.bfloat16, "device": None}
    sweep.over(te.Linear, {**linear, "init_method": None, "tp_group": None, "tp_size": 1})
    sweep.over(te.GroupedLinear, {**linear, "num_gemms": 2})
    made = te.GroupedLinear(2, 64, 64, params_dtype=torch.bfloat16, device=sweep.device)
    sweep.over(made, {"inp": x[:, :64].contiguous(), "m_splits": [2, TOKENS - 2]})
    sweep.over(te.Linear(64, 64, device=sweep.device), {"inp": torch.ones(2, 64, device=sweep.device)})
    sweep.over(te.MXFP8Quantizer, {"fp8_dtype": torch.float8_e4m3fn, "rowwise": True, "columnwise": True})
    quantizer = te.MXFP8Quantizer(torch.float8_e4m3fn)
    given = torch.ones(32, 32, device=sweep.device)
    sweep.over(quantizer, {"tensor": given, "out": None, "dtype": None})
    sweep.over(quantizer.update_quantized, {"src": given, "dst": quantizer(given), "noop_flag": None})
    sweep.over(quantizer.make_empty, {"shape": (32, 32), "dtype": torch.bfloat16, "device": None})
    sweep.over(te.MXFP8TensorStorage, quantizer(given).get_metadata())
    sweep.over(te.MXFP8Tensor, {"shape": (32, 32), "dtype": torch.bfloat16, **quantizer(given).get_metadata()})
    sweep.over(
        te.MXFP8BlockScaling,
        {"margin": 0, "fp8_format": te.Format.E4M3, "backward_override": None, "enable_2d_quantization": False},
    )

    def under(**given: Any) -> None:
        with te.autocast(**given):
            pass

    sweep.over(under, {"enabled": True, "recipe": te.MXFP8BlockScaling(), "calibrating": False})

    def model(**given: Any) -> None:
        with te.quantized_model_init(**given):
            pass

    sweep.over(model, {"enabled": True, "recipe": te.MXFP8BlockScaling()})
    sweep.end(60)


def _torchtitan(rank: int, nodes: int, ranks_per_node: int) -> None:
    sweep, ranks = _Sweep(), nodes * ranks_per_node
    experts = 2 * ranks
    x, ids, weights = _tokens(sweep.device, experts)
    mesh = SimpleNamespace(get_group=lambda: dist.group.WORLD)
    sizes = {
        "num_experts": experts,
        "top_k": TOPK,
        "hidden_dim": HIDDEN,
        "num_max_tokens_per_rank": TOKENS,
        "dtype": torch.bfloat16,
        "pad_multiple": None,
        "non_blocking_capacity_factor": None,
        "payload": None,
        "num_sm": None,
        "local_world_size": ranks_per_node,
        "timeout_s": LIMIT_S,
    }

    def make(ep_mesh: Any, **given: Any) -> torchtitan.TokenDispatch:
        made = torchtitan.TokenDispatch(**given)
        made.wire_meshes(ep_mesh=ep_mesh)
        torchtitan.close_layers()
        return made

    sweep.over(make, {"ep_mesh": mesh, **sizes})
    made = torchtitan.TokenDispatch(**sizes)
    made.wire_meshes(ep_mesh=mesh)
    call = {"x_TD": x, "topk_scores_TK": weights, "topk_expert_ids_TK": ids}
    sweep.over(made.dispatch, call)
    rows, _, metadata = made.dispatch(**call)
    sweep.over(made.combine, {"routed_output_RD": rows, "metadata": metadata})
    assert torch.equal(made.combine(rows, metadata), x)
    torchtitan.close_layers()
    weight = torch.ones(2, HIDDEN, 32, device=sweep.device).bfloat16().transpose(1, 2).contiguous().transpose(1, 2)
    offs = torch.tensor([2, TOKENS], device=sweep.device, dtype=torch.int32)
    for recipe in ("bf16", "mxfp8"):
        sweep.over(torchtitan.grouped_mm, {"A": x, "B_t": weight, "offs": offs, "recipe": recipe})
    sweep.end(60)


def _vllm(rank: int, nodes: int, ranks_per_node: int) -> None:
    sweep, ranks = _Sweep(), nodes * ranks_per_node
    experts = 2 * ranks
    x, ids, weights = _tokens(sweep.device, experts)
    sizes = {
        "group": dist.group.WORLD,
        "max_tokens": TOKENS,
        "hidden": HIDDEN,
        "topk": TOPK,
        "num_experts": experts,
        "batched": False,
        "capacity": None,
        "dtype": torch.bfloat16,
        "num_sm": None,
        "local_world_size": ranks_per_node,
        "timeout_s": LIMIT_S,
        "formats": None,
        "micro_batch": None,
        "quantize": None,
    }
    sweep.over(vllm.PrepareFinalize, sizes)
    made = vllm.PrepareFinalize(**sizes)
    here = range(rank * 2, rank * 2 + 2)
    expert_map = torch.tensor([each - rank * 2 if each in here else -1 for each in range(experts)], dtype=torch.int32)
    call = {
        "a1": x,
        "topk_weights": weights,
        "topk_ids": ids,
        "num_experts": experts,
        "expert_map": expert_map,
        "apply_router_weight_on_input": False,
        "quant_config": SimpleNamespace(quant_dtype=None),
        "defer_input_quant": False,
    }
    sweep.over(made.prepare, call)
    rows, _, _, row_ids, row_weights = made.prepare(**call)
    back = {
        "output": torch.empty_like(x),
        "fused_expert_output": rows,
        "topk_weights": row_weights,
        "topk_ids": row_ids,
        "apply_router_weight_on_input": False,
        "weight_and_reduce_impl": None,
    }

    def finalize(**given: Any) -> None:
        made.prepare(**call)
        made.finalize(**given)

    sweep.over(finalize, back)
    made.prepare(**call)
    made.finalize(**back)
    assert torch.equal(back["output"], x)
    made.close()
    sweep.end(60)


def _pipeline(rank: int, nodes: int, ranks_per_node: int) -> None:
    sweep, ranks = _Sweep(), nodes * ranks_per_node
    x = torch.ones(2 * ranks, HIDDEN, device=sweep.device).bfloat16()
    splits = [2] * ranks
    call = {"input": x, "output_splits": splits, "input_splits": splits, "group": dist.group.WORLD}
    call |= {"scaling_mode": "rceil", "block_size": 32}
    sweep.over(pipeline.a2a_dispatch, call)
    sweep.over(pipeline.a2a_combine, {**call, "mxfp8_bwd": True})
    by_name = {**call, "group_name": dist.group.WORLD.group_name, "group": None}
    sweep.over(pipeline.a2a_dispatch_mxfp8_fwd_hp_bwd, by_name)
    sweep.over(pipeline.a2a_combine_hp_fwd_mxfp8_bwd, by_name)
    rows = pipeline.a2a_dispatch(**call)
    counts = torch.ones(2 * ranks, dtype=torch.int64, device=sweep.device)
    pad = {
        "x": rows,
        "num_tokens_per_expert": counts,
        "ep_degree": ranks,
        "num_local_experts": 2,
        "alignment": 32,
    }
    # On a GPU nothing tells that counts belong to other rows, but an assertion of torch, which ends the process.
    sweep.over(pipeline.permute_and_pad, pad, *[name for name in pad if name != "x" or sweep.device.type == "cpu"])
    padded_shape, permuted, indices, _, ends = pipeline.permute_and_pad(**pad)
    sweep.over(pipeline.permute, {"mx": rows, "permuted_indices": indices, "padded_shape": padded_shape})
    plain = permuted.dequantize()
    sweep.over(pipeline.unpermute, {"x": plain, "permuted_indices": indices, "padded_shape": padded_shape})
    sweep.over(
        pipeline.generate_permute_indices,
        {
            "tokens_per_expert_group": counts,
            "experts_per_rank": 2,
            "num_ranks": ranks,
            "max_len": 128,
            "alignment": 32,
        },
    )
    weight = torch.ones(2, HIDDEN, 32, device=sweep.device).bfloat16()
    product = {"A": permuted, "B_t": weight, "offs": ends, "bias": None, "out_dtype": torch.bfloat16}
    product |= {"kernel_preference": None, "wgrad_with_hp": False, "scale_calculation_mode": "rceil"}
    sweep.over(pipeline.to_mxfp8_then_scaled_grouped_mm, {**product, "block_size": 32})
    back = pipeline.a2a_combine(pipeline.unpermute(plain, indices, padded_shape), splits, splits)
    assert torch.equal(back, x)
    sweep.end(60)


INTEGRATIONS = {
    "deep_ep": _deep_ep,
    "hybrid_ep": _hybrid_ep,
    "megatron": _megatron,
    "te": _te,
    "torchtitan": _torchtitan,
    "vllm": _vllm,
    "pipeline": _pipeline,
}


OF_ONE_RANK = ("deep_ep", "hybrid_ep", "vllm")
"""Sweeps of many calls, which all ranks exchange: with one rank they take a third of the time."""


@pytest.mark.parametrize("integration", INTEGRATIONS)
def test_wrong_arguments_are_named(run_ranks, integration):
    """Wrong arguments of integrations raise no errors other than EPError."""
    run_ranks(INTEGRATIONS[integration], 1, 1 if integration in OF_ONE_RANK else 2)
