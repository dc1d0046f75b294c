"""MoE modules in parallel training: DDP, FSDP2 over replicas of the experts' group, compiled, clipping, autocast."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.nn import dense
from triton_ep.distributed import current_heap
from triton_ep.errors import ConfigError, InputError
from triton_ep.nn import MoE, clip_grad_norm_, expert_placement, finalize_exchanges
from triton_ep.runtime.launch import INTERPRETING

pytestmark = pytest.mark.plain
HAS_MESHES = hasattr(_fsdp_common, "ShardPlacementResult")
EXPERTS, HIDDEN, FFN, TOKENS = 4, 64, 96, 6
SIZES: dict[str, Any] = {"num_experts": EXPERTS, "topk": 2, "max_tokens": TOKENS, "timeout_s": 60.0, "router": False}


class _Model(torch.nn.Module):
    """A dense layer, then experts with a given routing; the products cast the fp32 parameters."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        device = current_heap().device
        self.first = torch.nn.Linear(HIDDEN, HIDDEN, device=device)
        with torch.no_grad():
            self.first.weight.normal_(std=HIDDEN**-0.5, generator=torch.Generator(device).manual_seed(seed))
        self.moe = MoE(HIDDEN, FFN, params_dtype=torch.float32, **{**SIZES, **options})

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[T, H] float32."""
        hidden = self.first(x)
        return hidden + self.moe(hidden.bfloat16(), topk_idx=ids, topk_weights=weights).float()


def _batch(rank: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids and weights of a rank's tokens; equally many on every rank, so that means of means are means."""
    g = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(TOKENS, HIDDEN, generator=g)
    return x, torch.rand(TOKENS, EXPERTS, generator=g).topk(2).indices, torch.rand(TOKENS, 2, generator=g)


def _step(model: torch.nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    """Run a forward and backward pass; returns the mean loss of the rank's tokens."""
    loss = model(*(each.to(current_heap().device) for each in _batch(rank, step))).square().mean()
    loss.backward()
    return loss.detach()


def _exact_gradients(model: _Model, world: int, group: Any) -> dict[str, torch.Tensor]:
    """Gradients in one process, float64, for the mean loss of all ranks' tokens. Call it before sharding."""
    leaves = {}
    for name, parameter in model.named_parameters():
        own = parameter.detach().cpu()
        if ".experts." in name:
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, own, group=group)
            own = torch.cat(parts)
        leaves[name] = own.double().requires_grad_()
    batches = [_batch(rank) for rank in range(world)]
    hidden = [x.double() @ leaves["first.weight"].T + leaves["first.bias"] for x, _, _ in batches]
    ys = dense.moe(
        hidden, [ids for _, ids, _ in batches], [w.double() for _, _, w in batches],
        leaves["moe.experts.w13"], leaves["moe.experts.w2"], model.moe.experts.activation,
    )  # fmt: skip
    torch.stack([(h + y).square().mean() for h, y in zip(hidden, ys, strict=True)]).mean().backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def _check_gradients(model: torch.nn.Module, exact: dict[str, torch.Tensor], first: int, count: int) -> None:
    """Gradients of dense parameters, and of this rank's experts: first, first + 1 and so on."""
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        wanted = exact[name.removeprefix("module.")]
        if ".experts." in name:
            grad, wanted = (grad.to_local() if isinstance(grad, DTensor) else grad), wanted[first : first + count]
        elif isinstance(grad, DTensor):
            grad = grad.full_tensor()
        assert grad.shape == wanted.shape, name
        assert dense.decibel(grad, wanted) > 38.0, name


def _ddp(rank: int, nodes: int, ranks_per_node: int) -> None:
    world = nodes * ranks_per_node
    model = _Model(1)
    exact = _exact_gradients(model, world, dist.group.WORLD)
    experts = [name for name, _ in model.named_parameters() if ".experts." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
    wrapped = DistributedDataParallel(model)
    _step(wrapped, rank)
    for parameter in model.moe.experts.parameters():
        parameter.grad.div_(world)  # as DDP has divided all others: the loss is a mean of means
    count = EXPERTS // world
    _check_gradients(wrapped, exact, rank * count, count)

    norm = torch.cat([grad.flatten() for grad in exact.values()]).norm()
    torch.testing.assert_close(clip_grad_norm_(model, 0.25).double().cpu(), norm, rtol=1e-2, atol=0)
    _check_gradients(wrapped, {name: grad * 0.25 / norm for name, grad in exact.items()}, rank * count, count)
    largest = max(float(grad.abs().max()) for grad in exact.values()) * 0.25 / float(norm)
    assert clip_grad_norm_(model, 1e9, torch.inf).item() == pytest.approx(largest, rel=2e-2)
    with pytest.raises(InputError, match="norm_type above 0"):
        clip_grad_norm_(model, 1.0, 0)
    finalize_exchanges()


def test_gradients_beside_ddp_are_those_of_one_process(run_ranks):
    """DDP averages shared parameters; the exchange sums expert gradients. Clipping counts all ranks' experts."""
    run_ranks(_ddp, 1, 2)


def _mesh(world: int) -> DeviceMesh:
    """Two replicas of the experts of half of the ranks."""
    shape = (2, world // 2)
    return init_device_mesh(current_heap().device.type, shape, mesh_dim_names=("replicas", "experts"))


def _own_experts(mesh: DeviceMesh) -> tuple[int, int]:
    """The first expert whose gradient is on this rank, and their number."""
    place, count = mesh.get_local_rank("experts") * 2 + mesh.get_local_rank("replicas"), EXPERTS // mesh.size()
    return place * count, count


# A group of one rank shards over its replicas as larger ones do; four CPU ranks take four times as long.
TWO_OR_FOUR = pytest.mark.parametrize(
    ("nodes", "ranks_per_node"), [(1, 2), pytest.param(1, 4, marks=pytest.mark.on_gpus)]
)


def _sharded(model: _Model, mesh: DeviceMesh) -> _Model:
    """Shard experts over the replicas of their group, the rest over all ranks; divide all gradients by all ranks."""
    fully_shard(model.moe.experts, mesh=mesh["replicas"])
    model.moe.experts.set_gradient_divide_factor(mesh.size())
    model.moe.experts.set_force_sum_reduction_for_comms(True)  # Gloo cannot scale during the reduction
    fully_shard(model, mesh=mesh["replicas", "experts"]._flatten("all"))
    return model


def _fsdp(rank: int, nodes: int, ranks_per_node: int) -> None:
    world = nodes * ranks_per_node
    mesh = _mesh(world)
    group = mesh["experts"].get_group()
    model = _Model(2, group=group)
    exact = _exact_gradients(model, world, group)
    _sharded(model, mesh)
    _step(model, rank)
    _check_gradients(model, exact, *_own_experts(mesh))
    norm = torch.cat([grad.flatten() for grad in exact.values()]).norm()
    torch.testing.assert_close(clip_grad_norm_(model, 0.25).double().cpu(), norm, rtol=1e-2, atol=0)
    finalize_exchanges()


def test_gradients_under_fsdp_are_those_of_one_process(run_ranks):
    """Experts sharded over 2 replicas of a group of 2; clipping counts every shard once."""
    run_ranks(_fsdp, 1, 4)


def _train(rank: int, nodes: int, ranks_per_node: int, steps: int) -> None:
    mesh = _mesh(nodes * ranks_per_node)
    found = []
    for prepared in ("both", "none"):
        model = _sharded(_Model(3, group=mesh["experts"].get_group(), payload="mxfp8", prepared=prepared), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for step in range(steps):
            losses.append(_step(model, rank, step))
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append((torch.stack(losses), model.moe.experts.w13.to_local(), model.moe.experts.w2.to_local()))
    for kept, made_anew in zip(*found, strict=True):
        assert torch.equal(kept, made_anew)
    assert not torch.equal(found[0][0][0], found[0][0][-1])
    finalize_exchanges()


@pytest.mark.on_gpus  # on CPUs the steps below compare kept copies with copies made anew
@TWO_OR_FOUR
def test_kept_copies_of_weights_change_no_bit(run_ranks, backend, nodes, ranks_per_node):
    """Steps with experts and FSDP2 in MXFP8, 20 on GPUs: copies kept between passes equal copies built per pass."""
    run_ranks(_train, nodes, ranks_per_node, 20 if backend == "nvshmem" else 2)


# --- FSDP2 and torch.compile ------------------------------------------------------------------------------


def _everyone(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of all ranks. FSDP takes no second mesh of one group, so two ranks, all replicas, get another group."""
    if mesh["experts"].size() == 1:
        return DeviceMesh.from_group(dist.new_group(), mesh.device_type)
    return mesh["replicas", "experts"]._flatten("all")


def _placed(model: _Model, mesh: DeviceMesh) -> _Model:
    """As `_sharded`, by one call: the model itself has the hooks."""
    fully_shard(
        model,
        mesh=_everyone(mesh),
        reshard_after_forward=True,
        shard_placement_fn=expert_placement(model, mesh["replicas"]),
    )
    model.set_gradient_divide_factor(mesh.size())
    model.set_force_sum_reduction_for_comms(True)
    return model


def _compiled(rank: int, nodes: int, ranks_per_node: int) -> None:
    mesh = _mesh(nodes * ranks_per_node)
    group = mesh["experts"].get_group()
    model = _Model(5, group=group, capacity=2.0)
    exact = _exact_gradients(model, mesh.size(), group)
    _placed(model, mesh)
    if not INTERPRETING:  # on the CPU the compiled steps below show that nothing changes, and the compiler runs once
        model.compile(fullgraph=True, backend="aot_eager")
    _step(model, rank)
    _check_gradients(model, exact, *_own_experts(mesh))

    found = []
    for shard in (_sharded, _placed):
        torch._dynamo.reset()
        prepared = "both" if shard is _placed else "none"
        model = shard(_Model(6, group=group, capacity=2.0, payload="mxfp8", prepared=prepared), mesh)
        if shard is _placed:
            model.compile(fullgraph=True, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for step in range(2 if INTERPRETING else 3):
            losses.append(_step(model, rank, step))
            optimizer.step()  # copies of the weights gathered next must follow
            optimizer.zero_grad()
        found.append((torch.stack(losses), *(each.to_local() for each in model.parameters())))
    assert all(map(torch.equal, *found))
    assert len(set(found[0][0].tolist())) == len(losses)
    finalize_exchanges()


@pytest.mark.skipif(not HAS_MESHES, reason="torch before 2.12 has one mesh per call of fully_shard")
@TWO_OR_FOUR
def test_blocks_under_fsdp_compile_into_one_graph(run_ranks, nodes, ranks_per_node):
    """Hooks only on the block: gradients of one process, bit-identical to uncompiled steps under other hooks, whose
    copies of the weights are made anew for each pass."""
    run_ranks(_compiled, nodes, ranks_per_node)


def _hooks_inside(rank: int, nodes: int, ranks_per_node: int) -> None:
    torch._dynamo.reset()
    mesh = init_device_mesh(current_heap().device.type, (1, ranks_per_node), mesh_dim_names=("replicas", "experts"))
    model = _sharded(_Model(7, capacity=2.0), mesh)
    loss = _step(model, rank)
    whole = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="expert_placement"):
        _step(whole, rank)
    torch._dynamo.reset()
    assert torch.equal(_step(torch.compile(model, backend="aot_eager"), rank), loss)
    with pytest.raises(ConfigError, match="one dimension"):
        expert_placement(model, mesh)
    finalize_exchanges()


def test_hooks_inside_of_a_graph_break_it_and_say_what_helps(run_ranks):
    """Experts sharded separately: fullgraph=True is refused with a reason; without it the result is the same."""
    run_ranks(_hooks_inside, 1, 1 if INTERPRETING else 2)  # the compiler takes seconds in each rank


def test_torch_without_meshes_per_parameter_is_named(monkeypatch):
    """`expert_placement` names the torch version that has them, and the alternative."""
    monkeypatch.delattr(_fsdp_common, "ShardPlacementResult", raising=False)
    mesh = SimpleNamespace(ndim=1)
    with pytest.raises(ConfigError, match=r"2\.12"):
        expert_placement(torch.nn.Linear(1, 1), mesh)


def _autocast(rank: int, nodes: int, ranks_per_node: int) -> None:
    device = current_heap().device
    found = []
    for enabled, given in ((False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float32)):
        model = _Model(4)
        x, ids, weights = (each.to(device) for each in _batch(rank))
        x = x.bfloat16().float().requires_grad_()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled):
            y = model.moe(x.to(given), topk_idx=ids, topk_weights=weights)
        y.float().square().sum().backward()
        found.append((y.detach(), x.grad, model.moe.experts.w13.grad, model.moe.experts.w2.grad))
    for plain, *others in zip(*found, strict=True):
        for cast in others:
            assert plain.dtype == cast.dtype
            assert torch.equal(plain, cast)
    for dtype, enabled in ((torch.bfloat16, False), (torch.float16, True)):
        with (
            torch.autocast(device.type, dtype=dtype, enabled=enabled),
            pytest.raises(InputError, match=r"x must be torch\.bfloat16, got torch\.float32"),
        ):
            model.moe(x, topk_idx=ids, topk_weights=weights)
    finalize_exchanges()


def test_autocast_casts_tokens_alone(run_ranks):
    """The payload alone decides the dtype in which a MoE module computes; autocast to bf16 casts x, as for a linear
    layer. Without it, or with another dtype, other tokens are refused."""
    run_ranks(_autocast, 1, 2)
