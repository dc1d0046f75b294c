"""torchtitan's interface over the layer: the bits of the core; torchtitan's own modules where it is installed."""

from dataclasses import fields
from importlib.util import find_spec

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from triton_ep import MXTensor, autograd
from triton_ep.distributed import current_heap
from triton_ep.errors import ConfigError
from triton_ep.integrations import torchtitan as door
from triton_ep.integrations.torchtitan import TokenDispatch, close_layers, grouped_mm
from triton_ep.testing import make_workload

HIDDEN, FFN, EXPERTS, TOPK = 64, 32, 2, 2  # experts per rank
TOKENS = (11, 0, 7, 16)
# torchtitan's dispatchers check for tracing through a name that torch 2.11 does not have.
OLD_TORCH = pytest.mark.skipif(
    not hasattr(torch.compiler, "_is_non_strict_tracing"),
    reason=f"torchtitan 0.3 does not run on torch {torch.__version__}",
)
NO_TORCHTITAN = pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")


def make_mesh(world_size: int):
    return init_device_mesh(current_heap().device.type, (world_size,), mesh_dim_names=("ep",))


def make_batch(rank: int, world_size: int, topk: int = TOPK, tokens: tuple[int, ...] = TOKENS):
    """x and scores with gradients, ids, the gradient of the output."""
    count, device = tokens[rank % len(tokens)], current_heap().device
    work = make_workload(
        rank, world_size, count, hidden=HIDDEN, topk=topk, num_experts=EXPERTS * world_size, drop=0.0, seed=3
    )
    generator = torch.Generator().manual_seed(rank)
    x = (work.x / 4).to(device).requires_grad_()
    grad = torch.randn(count, HIDDEN, generator=generator).bfloat16().to(device)
    return x, work.topk_weights.to(device).requires_grad_(), work.topk_idx.long().to(device), grad


def make_weights(world_size: int, rank: int) -> dict[str, torch.Tensor]:
    """Weights of this rank's experts, with the shapes of torchtitan's GroupedExperts."""
    generator = torch.Generator().manual_seed(17)
    mine = slice(rank * EXPERTS, (rank + 1) * EXPERTS)
    shapes = {"w1_EFD": (FFN, HIDDEN), "w2_EDF": (HIDDEN, FFN), "w3_EFD": (FFN, HIDDEN)}
    made = {n: torch.randn(EXPERTS * world_size, *s, generator=generator) / s[1] ** 0.5 for n, s in shapes.items()}
    return {name: w[mine].contiguous().to(current_heap().device) for name, w in made.items()}


def _check_checkpoint(rank: int, nodes: int, ranks_per_node: int) -> None:
    world_size = nodes * ranks_per_node
    dispatcher = TokenDispatch(
        num_experts=EXPERTS * world_size, top_k=TOPK, hidden_dim=HIDDEN, num_max_tokens_per_rank=max(TOKENS)
    )
    dispatcher.wire_meshes(ep_mesh=make_mesh(world_size))
    weight = make_weights(world_size, rank)["w1_EFD"][0].bfloat16()

    def block(x, scores, ids):
        rows, _, metadata = dispatcher.dispatch(x, scores, ids)
        return dispatcher.combine(torch.tanh(rows @ weight.T) @ weight, metadata, x)

    def two(x, scores, ids):  # so that the replay creates a descriptor again after later ones
        return block(block(x, scores, ids), scores, ids)

    results = []
    for replay in (None, False, True):
        x, scores, ids, grad = make_batch(rank, world_size)
        out = two(x, scores, ids) if replay is None else checkpoint(two, x, scores, ids, use_reentrant=replay)
        out.backward(grad)
        results.append((out.detach(), x.grad, scores.grad))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    close_layers()


@pytest.mark.plain
def test_activation_checkpoints_replay_a_dispatch(run_ranks):
    """Outputs and gradients have the same bits when the backward pass repeats the exchange."""
    run_ranks(_check_checkpoint, 1, 2)


def _check_core(rank: int, nodes: int, ranks_per_node: int, options: dict) -> None:
    world_size = nodes * ranks_per_node
    mesh = make_mesh(world_size)
    sizes = {"hidden_dim": HIDDEN, "num_max_tokens_per_rank": max(TOKENS), "local_world_size": ranks_per_node}
    dispatcher = TokenDispatch(num_experts=EXPERTS * world_size, top_k=TOPK, **sizes, **options)
    dispatcher.wire_meshes(ep_mesh=mesh)
    twin = TokenDispatch(num_experts=EXPERTS * world_size, top_k=TOPK, **sizes, **options)
    twin.wire_meshes(ep_mesh=mesh)
    assert twin.layer is dispatcher.layer  # memory of one layer for any number of MoE layers
    recipe = "mxfp8" if options.get("payload") else "bf16"
    results = []
    for core in (False, True):
        x, scores, ids, grad = make_batch(rank, world_size)
        weights = {name: w.requires_grad_() for name, w in make_weights(world_size, rank).items()}
        if core:
            rows, row_scores, desc = autograd.dispatch(dispatcher.layer, x, ids, scores)
            ends = desc.expert_offsets[1:]
        else:
            rows, counts, metadata = dispatcher.dispatch(x, scores, ids, None)
            assert counts.dtype == torch.int64 and not (counts % (options.get("pad_multiple") or 1)).any()
            assert isinstance(rows, MXTensor) == (recipe == "mxfp8") and int(dispatcher.overflow) == 0
            ends = counts.cumsum(0, dtype=torch.int32)
        gate = grouped_mm(rows, weights["w1_EFD"].bfloat16().transpose(-2, -1), ends, recipe)
        up = grouped_mm(rows, weights["w3_EFD"].bfloat16().transpose(-2, -1), ends, recipe)
        hidden = torch.nn.functional.silu(gate) * up
        out = grouped_mm(hidden, weights["w2_EDF"].bfloat16().transpose(-2, -1), ends, recipe)
        y = autograd.combine(dispatcher.layer, out, desc, row_scores) if core else dispatcher.combine(out, metadata, x)
        y.backward(grad)
        results.append([y.detach(), x.grad, scores.grad, *(w.grad for w in weights.values())])
    for door_saw, core_saw in zip(*results, strict=True):
        assert torch.equal(door_saw, core_saw)
    assert results[0][1].any() or not results[0][1].numel()
    close_layers()


@pytest.mark.plain  # the kernels of the layer
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), (1, 4)])
@pytest.mark.parametrize(
    "options",
    [{"pad_multiple": 16}, {"pad_multiple": 32, "non_blocking_capacity_factor": 1.0, "payload": "mxfp8"}],
    ids=["padded", "static_mxfp8"],
)
def test_the_bits_of_the_core(run_ranks, backend, nodes, ranks_per_node, options):
    """Output and gradients of tokens, scores and weights; equal dispatchers share a layer."""
    if backend == "host" and nodes * ranks_per_node > 2:
        pytest.skip("4 ranks show no more than 2 do: they are for --backend nvshmem")
    run_ranks(_check_core, nodes, ranks_per_node, options)


def _check_mistakes(rank: int, nodes: int, ranks_per_node: int) -> None:
    dispatcher = TokenDispatch(num_experts=4, top_k=2, num_max_tokens_per_rank=8)
    with pytest.raises(ConfigError, match="expert_parallel_degree=1"):
        dispatcher.wire_meshes(ep_mesh=None)
    with pytest.raises(ConfigError, match="before wire_meshes"):
        dispatcher.init_buffer()
    with pytest.raises(ConfigError, match="hidden_dim is not set"):
        dispatcher.wire_meshes(ep_mesh=make_mesh(1))
    x, scores, ids, _ = make_batch(0, 1)
    with pytest.raises(ConfigError, match="has no mesh"):
        dispatcher.dispatch(x, scores, ids)
    with pytest.raises(ConfigError, match=r"recipe must be .*, got 'fp4'"):
        grouped_mm(x, x, ids, "fp4")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = door.no_such_name


@pytest.mark.plain
def test_mistakes_are_told(run_ranks):
    """Errors for a missing mesh, a missing size, an unknown recipe."""
    run_ranks(_check_mistakes, 1, 1)


@pytest.mark.parametrize("trans", [False, True])
def test_grouped_mm_is_exact_with_its_gradients(trans: bool) -> None:
    """Small integers, so that every sum is exact: equal to the product of each expert; an empty expert, unused rows."""
    generator, device = torch.Generator().manual_seed(5), "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.randint(-3, 4, (13, 32), generator=generator).bfloat16().to(device).requires_grad_()
    shape = (3, 32, 48) if trans else (3, 48, 32)
    w = torch.randint(-3, 4, shape, generator=generator).bfloat16().to(device).requires_grad_()
    b_t = w if trans else w.transpose(-2, -1)
    ends = torch.tensor([4, 4, 11], dtype=torch.int32, device=device)
    out = grouped_mm(a, b_t, ends)
    grad = torch.randint(-2, 3, out.shape, generator=generator).bfloat16().to(device)
    out.backward(grad)
    exact_a, exact_w = (t.detach().double().requires_grad_() for t in (a, b_t))
    exact = torch.cat([exact_a[:4] @ exact_w[0], exact_a[4:11] @ exact_w[2], exact_a.new_zeros(2, 48)])
    exact.backward(grad.double())
    assert torch.equal(out.double(), exact) and torch.equal(a.grad.double(), exact_a.grad)
    assert torch.equal((w.grad if trans else w.grad.transpose(-2, -1)).double(), exact_w.grad)


def _routed_experts(world_size: int, rank: int, topk: int, ours: dict | None):
    """torchtitan's RoutedExperts with this rank's experts: over its all-to-all, or over triton_ep."""
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    config = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(dim=HIDDEN, hidden_dim=FFN, num_experts=EXPERTS),
        token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=EXPERTS * world_size, top_k=topk),
    )
    if ours is not None:
        door.use_triton_ep(config, **ours)
    module = config.build().to(current_heap().device)
    module.load_state_dict({f"inner_experts.{name}": w for name, w in make_weights(world_size, rank).items()})
    return module


def _check_torchtitan(rank: int, nodes: int, ranks_per_node: int, topk: int, options: dict) -> None:
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher

    set_spmd_backend("default")
    world_size = nodes * ranks_per_node
    mesh = make_mesh(world_size)
    ours = {"hidden_dim": HIDDEN, "num_max_tokens_per_rank": 16, "local_world_size": ranks_per_node, **options}
    results = []
    for which in (None, {**ours, "recipe": None}, ours):
        module = _routed_experts(world_size, rank, topk, which)
        assert isinstance(module.token_dispatcher, BaseEPTokenDispatcher)
        module.token_dispatcher.wire_meshes(ep_mesh=mesh)
        x, scores, ids, grad = make_batch(rank, world_size, topk, tokens=(16,))
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS * world_size)
        y = module(x.unsqueeze(0), scores.unsqueeze(0), ids.unsqueeze(0), counts)
        y.backward(grad.unsqueeze(0))
        experts = dict(module.inner_experts.named_parameters())
        results.append([y.detach(), x.grad, scores.grad, *(w.grad for w in experts.values())])
    # torchtitan rounds each row times its score, and sums in bf16; triton_ep rounds once. With one expert per token
    # and torchtitan's own experts the outputs are equal; triton_ep's block keeps gate and up in float32.
    if topk == 1:
        assert torch.equal(results[0][0], results[1][0])
    for theirs, *ours_of in zip(*results, strict=True):
        assert theirs.any()
        for mine in ours_of:
            torch.testing.assert_close(mine.float(), theirs.float(), rtol=2e-2, atol=2e-2 * theirs.abs().max().item())
    close_layers()


@NO_TORCHTITAN
@OLD_TORCH
@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), (1, 4), (2, 2), (1, 8)])
@pytest.mark.parametrize(
    "topk, options",
    [(1, {}), (2, {"pad_multiple": 32}), (2, {"pad_multiple": 16, "non_blocking_capacity_factor": 1.0})],
    ids=["top1", "padded", "static"],
)
def test_torchtitan_runs_over_it(run_ranks, nodes, ranks_per_node, topk, options):
    """torchtitan's RoutedExperts over its own all-to-all and over triton_ep: outputs and all gradients."""
    run_ranks(_check_torchtitan, nodes, ranks_per_node, topk, options)


def _check_changed(rank: int, nodes: int, ranks_per_node: int) -> None:
    from torchtitan.models.common.moe import GroupedExperts

    device = current_heap().device
    rows = torch.randn(24, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16().to(device)
    counts = torch.tensor([16, 8], device=device)
    weights = make_weights(1, 0)
    config = GroupedExperts.Config(dim=HIDDEN, hidden_dim=FFN, num_experts=EXPERTS)
    kept = {f.name: getattr(config, f.name) for f in fields(config) if f.init}
    for recipe in ("bf16", "mxfp8"):
        found = []
        for sharded in (False, True):
            experts = door.TritonEPGroupedExperts.Config(**kept, recipe=recipe).build().to(device)
            experts.load_state_dict(weights)
            if sharded:
                fully_shard(experts, mesh=make_mesh(1), reshard_after_forward=True)
            optimizer = torch.optim.SGD(experts.parameters(), lr=0.5)
            ys = [experts(rows, counts)]
            experts.load_state_dict({name: value * 2 for name, value in experts.state_dict().items()})
            ys.append(experts(rows, counts))
            ys[-1].square().mean().backward()
            optimizer.step()
            ys.append(experts(rows, counts))
            found.append(torch.stack(ys).detach())
        assert torch.equal(*found)
        assert not torch.equal(found[0][0], found[0][1]) and not torch.equal(found[0][1], found[0][2])


@NO_TORCHTITAN
@OLD_TORCH
@pytest.mark.plain
def test_experts_follow_weights_that_change_under_fsdp(run_ranks):
    """After a load or an optimizer step, kept copies and the joined gate and up match the next gathered weights."""
    run_ranks(_check_changed, 1, 1)


@NO_TORCHTITAN
def test_torchtitan_takes_the_configuration() -> None:
    """torchtitan fills in the sizes, as for its HybridEP; the dispatcher is built from its configuration."""
    from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, HybridEPTokenDispatcher

    config = door.TritonEPTokenDispatcher.Config(num_experts=8, top_k=2, payload="mxfp8")
    assert isinstance(config, HybridEPTokenDispatcher.Config)
    config.hidden_dim, config.num_max_tokens_per_rank = 64, 16
    dispatcher = config.build()
    assert isinstance(dispatcher, BaseEPTokenDispatcher) and not isinstance(dispatcher, HybridEPTokenDispatcher)
    assert (dispatcher.hidden_dim, dispatcher.payload) == (64, "mxfp8")
    with pytest.raises(ConfigError, match='recipe="mxfp8"'):
        door.use_triton_ep(config, payload="mxfp8")
