"""MX on several ranks: quantised shards, parallel layers, FSDP's gather in MX. On 2 ranks and, on GPUs, on 4."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.mx.blocks import DEVICE
from triton_ep.errors import InputError
from triton_ep.mx.convert import (
    MXDynamicActivationMXWeightConfig,
    MXWeightOnlyConfig,
    NVFP4WeightOnlyConfig,
    quantize_,
)
from triton_ep.mx.dtensor import redistribute
from triton_ep.mx.fsdp import MXShard, gather_in_mx_
from triton_ep.mx.linear import MXLinear, MXLinearConfig
from triton_ep.mx.nvfp4 import NVFP4Tensor
from triton_ep.mx.tensor import MXTensor

pytestmark = pytest.mark.plain
WORLDS = pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 2), pytest.param(1, 4, marks=pytest.mark.on_gpus)])
ELEMENTS = (torch.float8_e4m3fn, torch.float8_e5m2, "fp6_e2m3", torch.float4_e2m1fn_x2)


def _x(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same values on every rank; blocks differ in scale."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.logspace(-2, 2, shape[-1])).bfloat16().to(DEVICE)


def _mesh(num_ranks: int) -> DeviceMesh:
    return init_device_mesh(DEVICE, (num_ranks,))


def _same_bytes(got: MXTensor, want: MXTensor) -> None:
    for name in ("qdata", "scale"):
        one, other = getattr(got, name), getattr(want, name)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), name


def _local(mx: MXTensor) -> MXTensor:
    """This rank's shard."""
    assert isinstance(mx.qdata, DTensor) and isinstance(mx.scale, DTensor)
    parts = mx.qdata.to_local(), mx.scale.to_local()
    return MXTensor(*parts, mx.elem_dtype, mx.block_size, mx.orig_dtype, block_dim=mx.block_dim)


def _check_shards(rank: int, nodes: int, ranks_per_node: int) -> None:
    num_ranks = nodes * ranks_per_node
    mesh = _mesh(num_ranks)
    x = _x(11, 128 * num_ranks)  # 11 rows: 6 and 5 on 2 ranks; 3, 3, 3 and 2 on 4
    for elem in ELEMENTS:
        # Every format by rows; two formats along every dimension.
        for placement in (Shard(0), Shard(1), Replicate()) if elem in ELEMENTS[::3] else (Shard(0),):
            for block_dim, values in ((-1, x), (-2, x.t().contiguous())):
                sharded = distribute_tensor(values, mesh, [placement])
                whole = MXTensor.to_mx(values, elem, block_dim=block_dim)
                mx = MXTensor.to_mx(sharded, elem, block_dim=block_dim)
                assert (mx.shape, mx.dtype, mx.qdata.placements) == (values.shape, values.dtype, (placement,))
                # Quantising after sharding equals sharding after quantising.
                start = whole
                if isinstance(placement, Shard):
                    size = -(-values.shape[placement.dim] // num_ranks)
                    start = whole.split(size, placement.dim)[rank]
                _same_bytes(_local(mx), start)
                back = mx.dequantize(torch.float32)
                assert isinstance(back, DTensor) and back.placements == (placement,)
                assert torch.equal(back.to_local(), start.dequantize(torch.float32))
                if placement == Shard(0):
                    _same_bytes(_local(redistribute(mx, [Replicate()])), whole)
    _check_moves(x, mesh)
    _check_refusals(x, mesh)


def _check_moves(x: torch.Tensor, mesh: DeviceMesh) -> None:
    """Views, products and gradients of an MXTensor of DTensors."""
    rows, columns = (distribute_tensor(x, mesh, [Shard(dim)]) for dim in (0, 1))
    mx = MXTensor.to_mx(rows)
    whole = MXTensor.to_mx(x)
    assert torch.equal(mx.t().dequantize().full_tensor(), whole.t().dequantize())
    torch.testing.assert_close((mx @ whole_weight(x, mesh)).full_tensor(), whole @ x[:6].t())
    torch.testing.assert_close((MXTensor.to_mx(columns) @ columns.t()).full_tensor(), whole @ x.t(), rtol=0.02, atol=1)
    leaf = rows.detach().requires_grad_()
    MXTensor.to_mx(leaf).dequantize().sum().backward()
    assert leaf.grad.full_tensor().eq(1).all()


def whole_weight(x: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """[K, 6], replicated."""
    return distribute_tensor(x[:6].t().contiguous(), mesh, [Replicate()])


def _check_refusals(x: torch.Tensor, mesh: DeviceMesh) -> None:
    """Blocks on two ranks, and partial sums."""
    with pytest.raises(InputError, match="cut blocks of 32"):
        MXTensor.to_mx(distribute_tensor(x[:, : 32 * 3].contiguous(), mesh, [Shard(1)]))
    with pytest.raises(InputError, match="Partial"):
        MXTensor.to_mx(DTensor.from_local(x, mesh, [Partial()]))
    sharded = MXTensor.to_mx(distribute_tensor(x[:, :96].contiguous(), mesh, [Shard(0)]))
    with pytest.raises(InputError, match="cut blocks of 32"):
        redistribute(sharded, [Shard(1)])
    with pytest.raises(InputError, match="made from a DTensor"):
        redistribute(MXTensor.to_mx(x), [Replicate()])


class _MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.w1 = nn.Linear(64, 256, bias=False)
        self.w2 = nn.Linear(256, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.w2(nn.functional.silu(self.w1(self.norm(x))))


def _mlp(config: MXLinearConfig | None) -> _MLP:
    torch.manual_seed(3)
    model = _MLP().to(DEVICE)
    if config is not None:
        quantize_(model, config)
    return model


PLANS: dict[str, Callable[[], dict[str, Any]]] = {
    "tensor": lambda: {"w1": ColwiseParallel(), "w2": RowwiseParallel()},
    "sequence": lambda: {
        "norm": SequenceParallel(),
        "w1": ColwiseParallel(input_layouts=Shard(1)),
        "w2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    },
}


def _check_parallel(rank: int, nodes: int, ranks_per_node: int, plan: str) -> None:
    num_ranks = nodes * ranks_per_node
    mesh = _mesh(num_ranks)
    for config in (MXLinearConfig(), MXLinearConfig("fp6_e3m2", wgrad_with_hp=True)):
        alone, model = _mlp(config), _mlp(config)
        x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        parallelize_module(model, mesh, PLANS[plan]())
        if plan == "sequence":
            parallelize_module(
                model, mesh, PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
            )
        assert type(model.w1) is MXLinear and isinstance(model.w1.weight, DTensor)
        want_x, got_x = x.clone().requires_grad_(), x.clone().requires_grad_()
        want, got = alone(want_x), model(got_x)
        whole = got.full_tensor() if isinstance(got, DTensor) else got
        torch.testing.assert_close(whole, want, rtol=1e-4, atol=1e-4)
        want.square().sum().backward()
        whole.square().sum().backward()
        assert _relative(got_x.grad, want_x.grad) < 0.02
        for name, parameter in model.named_parameters():
            gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            reference = alone.get_parameter(name).grad
            # Sums over shards round differently, which occasionally moves a value to the next element.
            assert _relative(gradient, reference) < 0.02, name

    if plan != "tensor":
        return
    # For inference, weights are sharded first and then quantised: torch cannot shard the bytes of a quantised weight.
    for weights in (MXWeightOnlyConfig("fp6_e2m3"), MXDynamicActivationMXWeightConfig()):
        alone, model = _mlp(None), parallelize_module(_mlp(None), mesh, PLANS["tensor"]())
        for each in (alone, model):
            quantize_(each, weights)
        assert isinstance(model.w1.weight, MXTensor) and isinstance(model.w1.weight.qdata, DTensor)
        with torch.no_grad():
            torch.testing.assert_close(model(x), alone(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="weight of w1 is a DTensor"):
        quantize_(parallelize_module(_mlp(None), mesh, PLANS["tensor"]()), NVFP4WeightOnlyConfig())
    with pytest.raises(InputError, match="x is a DTensor"):
        NVFP4Tensor.to_nvfp4(distribute_tensor(x, mesh, [Shard(0)]))


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def _train(model: nn.Module, batch: torch.Tensor, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _layers(config: MXLinearConfig) -> nn.Sequential:
    """31 and 7 output features, which no number of ranks divides."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 31), nn.ReLU(), nn.Linear(31, 7)).to(DEVICE)
    quantize_(model, config, lambda module, name: name in ("0", "2"))
    return model


def _check_fsdp(rank: int, nodes: int, ranks_per_node: int) -> None:
    num_ranks = nodes * ranks_per_node
    mesh = _mesh(num_ranks)
    seen: list[list[tuple[torch.dtype, int]]] = []
    in_fp4 = MXLinearConfig(torch.float8_e4m3fn, torch.float4_e2m1fn_x2, wgrad_with_hp=True)
    for config, limit in ((MXLinearConfig(), 0.05), (in_fp4, 0.3)):
        alone, plain, model = (_layers(config) for _ in range(3))
        gather_in_mx_(model)
        for each in (plain, model):
            for layer in each:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(each, mesh=mesh)
        assert isinstance(model[0].weight.to_local(), MXShard)
        batches = torch.randn(num_ranks, 32, 64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        # The first product is bit-identical to that of a weight gathered in high precision.
        with torch.no_grad():
            assert torch.equal(model(batches[rank]), plain(batches[rank]))
        with _gathered(seen):
            got = _train(model, batches[rank], 3)
        assert got == pytest.approx(_train(plain, batches[rank], 3), rel=limit)
        assert got[2] < got[0]
        start = copy.deepcopy(alone)
        _train(alone, batches.flatten(0, 1), 3)
        for (name, one), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            moved = other.detach() - start.get_parameter(name).detach()
            value = one.detach().full_tensor()
            assert _relative(value - start.get_parameter(name).detach(), moved) < limit, name
    # Gathered bytes: elements and scales, for equally many rows on every rank.
    rows = [-(-num_rows // num_ranks) for num_rows in (96, 31)]
    assert {tuple(call) for call in seen} == {
        tuple((torch.uint8, rows[layer] * k // n) for n in (per_byte, 32))
        for per_byte in (1, 2)
        for layer, k in enumerate((64, 96))
    }


class _gathered:
    """Records dtype and numel of what FSDP gathers."""

    def __init__(self, seen: list[list[tuple[torch.dtype, int]]]) -> None:
        self.seen = seen

    def __enter__(self) -> None:
        self.original = MXShard.fsdp_pre_all_gather

        def record(shard: MXShard, mesh: DeviceMesh) -> Any:
            made = self.original(shard, mesh)
            self.seen.append([(part.dtype, part.numel()) for part in made[0]])
            return made

        MXShard.fsdp_pre_all_gather = record

    def __exit__(self, *error: Any) -> None:
        MXShard.fsdp_pre_all_gather = self.original


@WORLDS
def test_shards_are_quantised_as_the_whole(run_ranks: Any, nodes: int, ranks_per_node: int) -> None:
    """Quantising after sharding equals sharding after quantising, bit for bit: formats, dimensions, uneven shards."""
    run_ranks(_check_shards, nodes, ranks_per_node)


@WORLDS
@pytest.mark.parametrize("plan", PLANS)
def test_parallel_layers_compute_what_one_does(run_ranks: Any, nodes: int, ranks_per_node: int, plan: str) -> None:
    """An MLP of MXLinear, tensor- and sequence-parallel: output, gradients of inputs and of weights."""
    run_ranks(_check_parallel, nodes, ranks_per_node, plan)


@WORLDS
def test_fsdp_gathers_in_mx(run_ranks: Any, nodes: int, ranks_per_node: int) -> None:
    """Bit-identical outputs, three training steps close to those in one process; uneven shards."""
    run_ranks(_check_fsdp, nodes, ranks_per_node)


def test_gathering_needs_layers_that_are_there() -> None:
    """It needs MXLinear layers with whole blocks that are not sharded yet."""
    with pytest.raises(InputError, match="no MXLinear"):
        gather_in_mx_(nn.Linear(64, 64))
    with pytest.raises(InputError, match="40 input features"):
        gather_in_mx_(nn.Sequential(MXLinear(64, 64), MXLinear(40, 64)))
    layer = MXLinear(64, 64, device=DEVICE)
    before = copy.deepcopy(layer)
    gather_in_mx_(layer)
    with pytest.raises(InputError, match="MXShard"):
        gather_in_mx_(layer)
    x = torch.randn(3, 64, device=DEVICE)
    assert torch.equal(layer(x), before(x))
    assert isinstance(layer.weight, MXShard) and layer.weight.requires_grad
