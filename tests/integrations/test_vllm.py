"""vLLM's modular prepare and finalize over the layer, driven in vLLM's call sequence by a stand-in for vLLM."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.integrations import vllm_stand_in as vllm
from triton_ep import EPAll2AllLayer
from triton_ep.distributed import current_heap
from triton_ep.errors import ConfigError, InputError, PeerFailed
from triton_ep.integrations import vllm as door
from triton_ep.integrations.vllm import prepare_finalize
from triton_ep.integrations.vllm.quantize import quantize_rows
from triton_ep.testing import apply_expert, apply_experts, make_workload

HIDDEN, EXPERTS, TOPK = 64, 2, 2  # experts per rank
TOKENS = (9, 0, 5, 12)
PLAIN = SimpleNamespace(quant_dtype=None)
MXFP8 = SimpleNamespace(quant_dtype="mxfp8", is_scale_swizzled=False)
# vLLM's configurations request tiles by default; FP8 has none.
FP8 = SimpleNamespace(
    quant_dtype=torch.float8_e4m3fn, a1_scale=None, per_act_token_quant=True, block_shape=None, is_scale_swizzled=True
)
FP8_ONE_SCALE = SimpleNamespace(**{**vars(FP8), "per_act_token_quant": False})


def _batch(rank: int, world_size: int, seed: int, topk: int = TOPK, num_experts: int | None = None):
    num_experts = num_experts or EXPERTS * world_size
    work = make_workload(
        rank,
        world_size,
        TOKENS[(rank + seed) % len(TOKENS)],
        hidden=HIDDEN,
        topk=topk,
        num_experts=num_experts,
        seed=seed,
    )
    device = current_heap().device
    ids = torch.where(work.topk_idx == num_experts, -1, work.topk_idx)
    return work.x.to(device), work.topk_weights.to(device), ids.to(device)


def _dense(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The expected result, in plain torch, in double precision."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for k in range(ids.shape[1]):
        kept = (ids[:, k] >= 0).cpu()
        out[kept] += weights.cpu()[kept, k, None].double() * apply_expert(x.cpu()[kept], ids.cpu()[kept, k]).double()
    return out


def _no_copies() -> mock._patch:
    """Low-latency kernels write slabs and read from them: a copy of rows between slabs and segments would fail."""
    return mock.patch.multiple(prepare_finalize, to_slabs=None, from_slabs=None)


def _check_kernel(rank: int, nodes: int, ranks_per_node: int, case: str) -> None:
    options, quant, reduce = CASES[case]
    world_size = nodes * ranks_per_node
    sizes = (max(TOKENS), HIDDEN, TOPK, rank, EXPERTS * world_size, ranks_per_node, world_size)
    with vllm.installed():
        made = door.TritonEPPrepareAndFinalize(
            dist.group.WORLD,
            max_tokens=max(TOKENS),
            hidden=HIDDEN,
            topk=TOPK,
            num_experts=EXPERTS * world_size,
            local_world_size=ranks_per_node,
            **options,
        )
        assert isinstance(made, vllm.FusedMoEPrepareAndFinalizeModular) and made.num_dispatchers() == world_size
        batched = options.get("batched", False)
        assert made.activation_format is vllm.FusedMoEActivationFormat["BatchedExperts" if batched else "Standard"]
        assert made.max_num_tokens_per_rank() == (max(TOKENS) if batched else None) and made.output_is_reduced()
        expert_map = vllm.expert_map_of(rank, world_size, EXPERTS * world_size)
        experts = vllm.Experts(quant, getattr(vllm, f"TopKWeightAndReduce{reduce}")(), expert_map)
        for seed in range(2):
            x, weights, ids = _batch(rank, world_size, seed)
            vllm.UBATCH.now = seed % 2  # two micro-batches, each with its own layer
            in_place = batched and quant is not MXFP8 and nodes == 1
            with _no_copies() if in_place else nullcontext():
                out = vllm.kernel(made, experts, x, weights, ids, EXPERTS * world_size)
                vllm.UBATCH.hooks.append(ran := mock.Mock())  # pending of the other micro-batch
                again = vllm.kernel(made, experts, x, weights, ids, EXPERTS * world_size, whole=True)
            ran.assert_called_once_with()
            assert torch.equal(again, out)
            # A rounding of the sum per rank, or of its rows, and one at the end; more by experts that weight; e4m3.
            plain = (
                2**-5 if reduce != "Delegate" else 2**-7 if batched or made._options["enable_local_combine"] else 2**-8
            )
            close = plain if quant is PLAIN else 0.08
            dense = _dense(x, weights, ids)
            scale = dense.abs().amax().item() if dense.numel() else 1.0
            torch.testing.assert_close(out.cpu().double(), dense, rtol=close, atol=close * scale)
            if quant is PLAIN and reduce == "Delegate":
                same = {"num_sm": None, **made._options}
                with EPAll2AllLayer(dist.group.WORLD, *sizes, **same) as layer:
                    recv_x, recv_weights, desc = layer.dispatch(x, ids, weights)
                    y = apply_experts(recv_x, desc.expert_offsets, rank * EXPERTS)
                    assert torch.equal(out, layer.combine(y, desc, recv_weights))
        assert len(made._pool.layers) == 2
        vllm.UBATCH.now = 0
        made.close()


CASES = {
    "standard": ({}, PLAIN, "Delegate"),
    "standard_rounded_once": ({"enable_local_combine": False}, PLAIN, "Delegate"),
    "standard_weights_by_experts": ({}, PLAIN, "NoOP"),
    "standard_static_contiguous": ({"capacity": 64}, PLAIN, "Contiguous"),
    "standard_mxfp8": ({}, MXFP8, "Delegate"),
    "standard_fp8": ({}, FP8, "Delegate"),
    "batched": ({"batched": True}, PLAIN, "Delegate"),
    "batched_mxfp8": ({"batched": True}, MXFP8, "Delegate"),
    "batched_fp8": ({"batched": True}, FP8, "Delegate"),
    "batched_fp8_one_scale": ({"batched": True}, FP8_ONE_SCALE, "Delegate"),
}


@pytest.mark.plain  # the kernels of the layer
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("case", CASES)
def test_moe_in_vllms_call_sequence(run_ranks, backend, nodes, ranks_per_node, case):
    """Against a dense computation; in bf16 the bits of the core. Two micro-batches, a rank without tokens."""
    if backend == "host" and nodes * ranks_per_node > 2:
        pytest.skip("4 ranks show no more than 2 do: they are for --backend nvshmem")
    if backend == "host" and case in ("standard_fp8", "batched_fp8"):
        pytest.skip("one scale for all rows shows the same on the host, and more")
    run_ranks(_check_kernel, nodes, ranks_per_node, case)


def _check_mistakes(rank: int, nodes: int, ranks_per_node: int) -> None:
    world_size = nodes * ranks_per_node
    sizes = {"max_tokens": 12, "hidden": HIDDEN, "topk": 1, "num_experts": EXPERTS * world_size}
    for change, text in (
        ({"num_experts": "4"}, "num_experts must be an integer"),
        ({"max_tokens": None}, "max_tokens"),
        ({"hidden": "64"}, "hidden"),
        ({"topk": 0}, "topk"),
        ({"local_world_size": 0}, "local_world_size"),
        ({"local_world_size": "2"}, "local_world_size"),
        ({"capacity": "many"}, "capacity"),
        ({"dtype": "bf16"}, "dtype"),
        ({"timeout_s": "soon"}, "timeout_s"),
        ({"batched": "no"}, "batched"),
        ({"num_sm": "20"}, "num_sm"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"formats": 3}, "formats"),
    ):
        with pytest.raises(ConfigError, match=text):
            door.PrepareFinalize(dist.group.WORLD, **{**sizes, **change})
    made = door.PrepareFinalize(dist.group.WORLD, **sizes)
    x, weights, ids = _batch(rank, world_size, 0, topk=1)
    assert made.activation_format == "Standard"
    for change, text in (
        ({"num_experts": 99}, "num_experts is 99"),
        ({"a1": None}, "a1 must be"),
        ({"topk_ids": ids[:, 0]}, "topk_ids must be a tensor of 2 dimensions"),
        ({"topk_ids": ids.float()}, r"topk_ids must be .*torch.int32 or torch.int64, got \[\d+, 1\] torch.float32"),
        ({"topk_weights": 1.0}, "topk_weights must be"),
        ({"topk_weights": weights[:, :0]}, r"topk_weights \[\d+, 0\], topk_ids \[\d+, 1\]: they must have"),
        ({"a1": x.new_zeros(len(x) + 1, HIDDEN)}, "they must have one row per token"),
        ({"quant_config": FP8}, "without vLLM's moe_kernel_quantize_input"),
        ({"quant_config": SimpleNamespace(quant_dtype="mxfp8", is_scale_swizzled=True)}, "is_scale_swizzled"),
        (
            {"apply_router_weight_on_input": True, "topk_ids": ids.repeat(1, 2), "topk_weights": weights.repeat(1, 2)},
            "topk_ids has 2",
        ),
    ):
        call = {
            "a1": x,
            "topk_weights": weights,
            "topk_ids": ids,
            "num_experts": EXPERTS * world_size,
            "expert_map": None,
            "apply_router_weight_on_input": False,
            "quant_config": PLAIN,
            **change,
        }
        with pytest.raises(InputError, match=text):
            made.prepare(**call)
    with pytest.raises(InputError, match="without a prepare"):
        made.finalize(x, x, weights, ids, False, None)

    # One expert per token, weights applied before the dispatch: combine does not apply them again.
    expert_map = vllm.expert_map_of(rank, world_size, EXPERTS * world_size)
    experts = vllm.Experts(PLAIN, vllm.TopKWeightAndReduceDelegate(), expert_map)
    made._formats = (vllm.FusedMoEActivationFormat, vllm.ExpertTokensMetadata)
    out = vllm.kernel(made, experts, x, weights, ids, EXPERTS * world_size, on_input=True)
    want = _dense((x.float() * weights.bfloat16().float()).bfloat16(), torch.ones_like(weights), ids)
    assert torch.equal(out.cpu().double(), want)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = door.no_such_name
    # A mistake of one rank is told the others, which then know of a layer to be told through.
    for change in ({"topk_ids": ids.float()}, {"topk_weights": None}, {"a1": x.to_sparse()}, {"quant_config": FP8}):
        call = {"a1": x, "topk_weights": weights, "topk_ids": ids, "quant_config": PLAIN, **(change if rank else {})}
        with pytest.raises(InputError if rank else PeerFailed, match=r"must be|without vLLM|rank 1 rejected"):
            made.prepare(
                num_experts=EXPERTS * world_size, expert_map=expert_map, apply_router_weight_on_input=False, **call
            )
    made.close()


@pytest.mark.plain
def test_mistakes_are_told(run_ranks):
    """Wrong sizes, unsupported quantisation, finalize before prepare; weights on the input count once."""
    run_ranks(_check_mistakes, 1, 2)


PLACED = {
    "round_robin": (4, True, {}),
    "round_robin_batched": (4, True, {"batched": True}),
    "uneven": (5, False, {}),
    "uneven_static": (5, False, {"capacity": 64}),
    "uneven_round_robin_batched": (5, True, {"batched": True}),
    "rank_without_experts_batched": (1, False, {"batched": True}),
}


def _prepare_and_check(made, x, weights, ids, expert_map):
    """With a static capacity, errors of other ranks are only raised by `check`."""
    prepared = made.prepare(x, weights, ids, expert_map.numel(), expert_map.to(x.device), False, PLAIN)
    for layer in made._pool.layers.values():
        layer.check()
    return prepared


def _check_placement(rank: int, nodes: int, ranks_per_node: int, case: str) -> None:
    """Rows are scaled by the expert that the map places on the rank, so a wrong expert gives a wrong sum."""
    num_experts, round_robin, options = PLACED[case]
    world_size = nodes * ranks_per_node
    topk = min(TOPK, num_experts)
    made = door.PrepareFinalize(
        dist.group.WORLD,
        max_tokens=max(TOKENS),
        hidden=HIDDEN,
        topk=topk,
        num_experts=num_experts,
        local_world_size=ranks_per_node,
        formats=(vllm.FusedMoEActivationFormat, vllm.ExpertTokensMetadata),
        **options,
    )
    expert_map = vllm.expert_map_of(rank, world_size, num_experts, round_robin)
    experts = vllm.Experts(PLAIN, vllm.TopKWeightAndReduceDelegate(), expert_map)
    for seed in range(2):
        x, weights, ids = _batch(rank, world_size, seed, topk, num_experts)
        if seed:  # another tensor with the same values; and E instead of -1 for dropped entries
            experts = vllm.Experts(PLAIN, vllm.TopKWeightAndReduceDelegate(), expert_map.clone())
            ids = torch.where(ids < 0, num_experts, ids).long()
        out = vllm.kernel(made, experts, x, weights, ids, num_experts)
        dense = _dense(x, weights, torch.where(ids == num_experts, -1, ids))
        scale = dense.abs().amax().item() if dense.numel() else 1.0
        torch.testing.assert_close(out.cpu().double(), dense, rtol=2**-7, atol=2**-7 * scale)
    call = (x, weights, ids, num_experts)
    other = experts.device_map.clone()
    if (held := int((other >= 0).sum())) > 1:
        other[other >= 0] = other[other >= 0].flip(0)
        message = rf"expert_map places expert \d at {held - 1}, that of the first call at 0"
        with pytest.raises(InputError, match=message):
            made.prepare(*call, other, False, PLAIN)
        experts.device_map.copy_(other)  # in place
        with pytest.raises(InputError, match="an object serves one placement"):
            made.prepare(*call, experts.device_map, False, PLAIN)
    with pytest.raises(InputError, match="expert_map is None, but"):
        made.prepare(*call, None, False, PLAIN)
    bad = torch.full_like(ids, -1)
    if rank == 1:  # the rank that has tokens in this batch
        bad[0, 0] = num_experts + 1  # out of range, though layers have more places if ranks are uneven
    if made._options["low_latency"]:  # low latency drops the id
        assert not _prepare_and_check(made, x, weights, bad, expert_map)[2].expert_num_tokens.any()
    else:
        with pytest.raises(InputError, match="of rank 1 is "):
            _prepare_and_check(made, x, weights, bad, expert_map)
    made.close()


@pytest.mark.plain
@pytest.mark.parametrize("case", PLACED)
def test_experts_are_where_the_map_says(run_ranks, case):
    """Round robin, unequal numbers of experts, a rank without any: the dense result; a different map is refused."""
    run_ranks(_check_placement, 1, 2, case)


def _check_wrong_maps(rank: int, nodes: int, ranks_per_node: int) -> None:
    world_size = nodes * ranks_per_node
    x, weights, ids = _batch(rank, world_size, 0)
    blocks = vllm.expert_map_of(rank, world_size, EXPERTS * world_size).to(x.device)
    for num_experts, given, text in (
        (3, None, "num_experts is 3, not a multiple of the 2 ranks, and expert_map is None"),
        (4, blocks if rank else None, r"expert_map is None only on ranks \[0\] of 2"),
        (4, torch.arange(4, device=x.device), r"expert 0 is on ranks \[0, 1\]"),
        (4, torch.full_like(blocks, -1), "expert 0 is on no rank"),
        (4, blocks if rank else blocks.float(), r"rank 0: expert_map must be \[4\] int32, got \[4\] torch.float32"),
        (4, blocks[:3] if rank else blocks, r"rank 1: expert_map must be \[4\] int32, got \[3\]"),
        (4, blocks if rank else [0, 1], "rank 0: expert_map must be a tensor or None, got list"),
        (4, blocks * 2 if rank else blocks, r"rank 1: expert_map has the places \[-2, -2, 0, 2\]"),
    ):
        made = door.PrepareFinalize(dist.group.WORLD, max_tokens=12, hidden=HIDDEN, topk=TOPK, num_experts=num_experts)
        with pytest.raises(InputError, match=text):
            made.prepare(x, weights, ids, num_experts, given, False, PLAIN)
        made.close()


@pytest.mark.plain
def test_wrong_maps_are_told_to_all_ranks(run_ranks):
    """Maps that are no placement, or given on one rank only: every rank raises the same InputError, without waiting."""
    run_ranks(_check_wrong_maps, 1, 2)


def _in_tiles(A, A_scale, quant_dtype, per_act_token_quant, block_shape, is_scale_swizzled=True):
    """Quantise with the argument name of newer vLLM releases."""
    return A, A_scale * is_scale_swizzled


def _in_fp4_tiles(A, A_scale, quant_dtype, per_act_token_quant, block_shape, is_fp4_scale_swizzled=True):
    """Quantise with the argument name of older vLLM releases."""
    return A, A_scale * is_fp4_scale_swizzled


def test_rows_are_quantised_as_the_configuration_says():
    """Tiles or not, under the names of vLLM's releases; one scale or many; undefined rows have no influence."""
    common = {"quant_dtype": "nvfp4", "a1_gscale": torch.ones(6, 1), "per_act_token_quant": False, "block_shape": None}
    for name, function in (("is_scale_swizzled", _in_tiles), ("is_nvfp4_scale_swizzled", _in_fp4_tiles)):
        for tiles in (False, True):
            config = SimpleNamespace(**common, **{name: tiles})
            assert quantize_rows(function, torch.ones(6, 32), config, None)[1].unique().tolist() == [tiles]

    slabs = torch.randn(2, 3, 32).bfloat16()
    slabs[1, 1:] = float("nan")
    in_use = torch.tensor([[True, True, True], [True, False, False]])
    data, scales = quantize_rows(vllm.moe_kernel_quantize_input, slabs, FP8_ONE_SCALE, lambda: in_use)
    assert scales.shape == (2, 1, 1)
    torch.testing.assert_close((data.float() * scales)[in_use], slabs[in_use].float(), rtol=0.07, atol=0.02)
    _, scales = quantize_rows(vllm.moe_kernel_quantize_input, slabs, FP8, lambda: in_use)
    assert scales.shape == (2, 3, 1)
