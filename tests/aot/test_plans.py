"""A build compiles what layers of a configuration launch: `plans` names every launch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.aot.library import Built
from triton_ep import EPAll2AllLayer, autograd
from triton_ep.context.given import RoutingMap, Rows
from triton_ep.errors import InputError
from triton_ep.integrations.deep_ep import Buffer, release
from triton_ep.integrations.deep_ep.layers import layers_of
from triton_ep.kernels.device.codes import LANDING_WORDS
from triton_ep.kernels.spec import all_kernels
from triton_ep.mx.tensor import MXTensor
from triton_ep.reference.channel_scales import quantize_channels
from triton_ep.runtime import launch as runtime
from triton_ep.runtime.library import Library
from triton_ep.runtime.plans import exchange, layers
from triton_ep.runtime.plans.request import KernelRequest
from triton_ep.runtime.plans.shape import Plan, Shape
from triton_ep.testing import make_workload

ON_HOST = "launches are recorded in the interpreter"
SPECIALISED = {"row_words", "x_words", "row_bytes", "hidden"}
"""Integers that the kernels of layers are specialised by; the last test checks them."""


def _request(spec: Any, args: Any, constexprs: dict[str, Any]) -> KernelRequest:
    types, numbers, unaligned = {}, {}, []
    for (name, declared), arg in zip(spec.arguments.items(), args, strict=True):
        if isinstance(arg, torch.Tensor):
            kind = f"*{runtime._TYPES[arg.dtype]}"
            if kind != declared:
                types[name] = kind
            if arg.data_ptr() % 16:
                unaligned.append(name)
        elif name in SPECIALISED:
            numbers[name] = arg
    values = {name: getattr(value, "name", value) for name, value in constexprs.items()}
    return KernelRequest.of(Plan(spec.name, values), types, numbers, unaligned)


def _comparable(request: KernelRequest) -> KernelRequest:
    """Drop what the interpreter lacks (warps, multiprocessors), and what depends there on the number of tokens (blocks
    to quantise)."""
    constexprs = {name: value for name, value in request.constexprs.items() if name != "BLOCKS"}
    return replace(request, constexprs=constexprs, num_warps=None, maxnreg=None, side_by_side=None)


@contextmanager
def _noted() -> Iterator[dict[str, str]]:
    """Record every launch from here on, as text by signature."""
    found: dict[str, str] = {}
    plain = runtime._interpret

    def noting(spec: Any, grid: int, args: Any, constexprs: dict[str, Any]) -> None:
        if spec.name != "dequantize_rows_kernel":  # only this test itself launches it
            request = _comparable(_request(spec, args, constexprs))
            found[request.signature()] = request.text()
        plain(spec, grid, args, constexprs)

    runtime._interpret = noting
    try:
        yield found
    finally:
        runtime._interpret = plain


def _assert_named(found: dict[str, str], wanted: list[KernelRequest]) -> None:
    named = {_comparable(one).signature() for one in wanted}
    assert len(found) > 5
    missing = [text for signature, text in found.items() if signature not in named]
    assert missing == [], missing


def _check_launches(rank: int, nodes: int, ranks_per_node: int, options: dict[str, Any]) -> None:
    world = nodes * ranks_per_node
    layer = EPAll2AllLayer(dist.group.WORLD, 6, 64, 3, rank, 8, ranks_per_node, world, num_sm=2, **options)
    uses = layers.LayerCalls()
    with _noted() as found, layer:
        layer.barrier.barrier_all()
        layer.barrier.barrier_all(intra_node_only=True)
        for seed, idx_dtype in enumerate((torch.int32, torch.int64)):
            work = make_workload(rank, world, 6 - rank, hidden=64, topk=3, num_experts=8, seed=seed).with_ids(idx_dtype)
            for weights in (None, work.topk_weights):
                recv_x, recv_weights, desc = layer.dispatch(work.x, work.topk_idx, weights)
                y = recv_x.dequantize(torch.bfloat16) if isinstance(recv_x, MXTensor) else recv_x
                layer.combine(y, desc, weights=recv_weights)
        if not options.get("low_latency"):
            w = work.topk_weights.requires_grad_()
            recv_x, recv_weights, desc = autograd.dispatch(layer, work.x, work.topk_idx, w)
            y = recv_x.dequantize(torch.bfloat16) if isinstance(recv_x, MXTensor) else recv_x
            autograd.combine(layer, y.detach(), desc, recv_weights).sum().backward()
            landings = ("row", "bf16") if layer.config.payload else ()
            for landing in landings:
                desc = layer.dispatch(work.x, work.topk_idx, w.detach(), landing=landing)[2]
                layer.dispatch_again(work.x, desc, landing=landing)
            if layer.config.payload is None and layer.config.enable_local_combine and not layer.config.copy_engines:
                # as in a forward pass of MoE
                layer.dispatch_ahead(work.x, work.topk_idx, w.detach(), None, later=False, keep_rows=True)
            uses = layers.LayerCalls(landing=landings)
    _assert_named(found, layers.layer_requests(layer.config.shape(layer.context.network, interpreted=True), uses))


def test_bytes_of_any_dtype_are_one_variant() -> None:
    """Rows that stay on their rank are read as bytes where the caller has them; the interpreter gets views of bytes."""
    shape = Shape(1024, 256, 3, 8, 2, 2, enable_local_combine=True)
    built = {each.signature() for each in layers.layer_requests(shape)}
    plan = exchange.expand(shape, LANDING_WORDS, True, True, 64)
    launcher = runtime.Launcher(plan)
    for dtype in (torch.uint8, torch.bfloat16, torch.float8_e4m3fn):
        args: list[Any] = []
        for name, declared in launcher._types.items():
            of_rows = {"x_ptr": dtype, "recv_x_ptr": torch.int64, "recv_scale_ptr": torch.uint8}.get(name)
            kinds = {"*u8": torch.uint8, "*i32": torch.int32, "*i64": torch.int64, "*fp32": torch.float32}
            pointer = declared[0] == "*"
            args.append(torch.zeros(16, dtype=of_rows or kinds[declared]) if pointer else 64)
        assert launcher._request(args, ()).signature() in built, dtype


@pytest.mark.parametrize("change", [{}, {"max_tokens": 512}, {"enable_local_combine": False}, {"budgeted": True}])
def test_combines_next_to_products_are_built(change: dict[str, Any]) -> None:
    """Where a module may request them, whether its router has gradients or not; on CPU ranks none does."""
    sizes: dict[str, Any] = {"max_tokens": 1024, "hidden": 256, "topk": 3, "num_experts": 8, "world_size": 2}
    shape = Shape(**{**sizes, "local_world_size": 2, "enable_local_combine": True, **change})
    built = {each.signature() for each in layers.layer_requests(shape, layers.LayerCalls(gradients=False))}
    outputs = dict.fromkeys(("out_ptr", "bias_ptr", "second_bias_ptr", "own_ptr"), "*bf16")
    wanted = (
        (exchange.reduce(shape, False, 3, beside=True), {"y_ptr": "*bf16"}),
        (exchange.pull(shape, False, True, copies=3, beside=True), outputs),
    )
    for plan, types in wanted:
        assert (KernelRequest.of(plan, types, {"hidden": 256}).signature() in built) == (not change)


@pytest.mark.plain
@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "options"),
    [
        (1, 2, {"enable_local_combine": True}),
        (1, 2, {"payload": "mxfp8", "alignment": 32}),
        (2, 1, {"payload": "mxfp8", "enable_local_combine": True}),
        (2, 1, {}),
        (1, 2, {"low_latency": True, "capacity": 64, "payload": "mxfp8"}),
    ],
    ids=["summed", "mxfp8", "nodes-summed", "nodes", "low-latency"],
)
def test_layers_launch_what_is_built(
    run_ranks: Callable[..., Any], backend: str, nodes: int, ranks_per_node: int, options: dict[str, Any]
) -> None:
    """Dispatch, combine, barriers and a backward pass: kernels, constexprs, types, alignment of every launch."""
    if backend != "host":
        pytest.skip(ON_HOST)
    run_ranks(_check_launches, nodes, ranks_per_node, options)


def _check_door(rank: int, nodes: int, ranks_per_node: int) -> None:
    """All calls of the DeepEP integration launch kernels that a manifest names."""
    world, hidden, experts, most = nodes * ranks_per_node, 1024, 8, 8
    group = dist.group.WORLD
    size = Buffer.get_low_latency_rdma_size_hint(most, hidden, world, experts)
    work = make_workload(rank, world, 6 - rank, hidden=hidden, topk=3, num_experts=experts).with_ids(torch.int64)
    x, idx, weights = work.x, work.topk_idx, work.topk_weights
    pairs = [quantize_channels(x, True, packed) for packed in (False, True)]
    low_latency = nodes == 1
    with _noted() as found:
        buffer = Buffer(group, 1 << 24, size, low_latency_mode=low_latency)
        for ids in (idx.int(), idx):
            per_expert = buffer.get_dispatch_layout(ids, experts)[2]
            for rows in (x, *pairs):
                # One node has every pair of ids and weights, on which no kernel between nodes depends.
                for given in (None, weights) if nodes == 1 else (weights if ids is idx else None,):
                    routing = {"num_tokens_per_expert": per_expert, "topk_idx": ids, "topk_weights": given}
                    got = buffer.dispatch(rows, **routing)
                if ids is idx:
                    buffer.dispatch(rows, handle=got[4])
        received = buffer.dispatch(x, **routing)
        buffer.combine(received[0], received[4], received[2])
        buffer.combine(received[0], received[4], bias=(x, x))
        with pytest.raises(InputError):  # a refused call dispatches, too
            buffer.dispatch(x, **{**routing, "topk_weights": weights.double()})
        for ids in (idx, idx.int()) if low_latency else ():
            for options in ({"use_fp8": False}, {}, {"round_scale": True, "use_ue8m0": True}):
                handle = buffer.low_latency_dispatch(x, ids, most, experts, **options)[2]
            y = buffer.get_next_low_latency_combine_buffer(handle).zero_()
            ones = torch.ones(experts * len(y[0]), dtype=torch.int32)
            for signals in ({}, {"src_signals": ones, "src_signal_expect_value": 1}, {"comp_signal": ones}):
                buffer.low_latency_combine(y, ids, weights, handle, overlap=bool(signals), **signals)
        made = list(layers_of(group).layers.values())
        for ids, given in ((idx, weights), (idx.int(), None)):  # as HybridEPBuffer sends them
            desc = made[0].dispatch_scaled(*pairs[0], ids, given)[3]
            made[0].dispatch_scaled(*pairs[0], None, given, layout_desc=desc)
        routed = torch.zeros(len(x), experts, dtype=torch.bool).scatter_(1, idx.clamp(0, experts - 1), True)
        for probs in (None, torch.rand(len(x), experts)):
            for excess in (None, torch.zeros(1, dtype=torch.int32)):
                made[0].dispatch_with_row_map(Rows(x), RoutingMap(routed, probs, excess), None)
        release(group)
    assert len(made) == 1 + 2 * low_latency  # rows of two kinds
    wanted = []
    for layer in made:
        how = {"slabs": True} if layer.config.low_latency else {"compact": True, "biases": True}
        uses = layers.LayerCalls(fp8_rows=True, maps=True, **how)
        wanted += layers.layer_requests(layer.config.shape(layer.context.network, interpreted=True), uses)
    _assert_named(found, wanted)


@pytest.mark.plain
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 2), (2, 1)])
def test_the_deepep_door_launches_what_is_built(
    run_ranks: Callable[..., Any], backend: str, nodes: int, ranks_per_node: int
) -> None:
    """Rows in bf16 and FP8 with either form of scales, handles, combined weights, and the low-latency calls."""
    if backend != "host":
        pytest.skip(ON_HOST)
    run_ranks(_check_door, nodes, ranks_per_node)


def test_the_index_says_what_kernels_declare(built: Built) -> None:
    """The index and the declarations have the same arguments, and the same integers to specialise by."""
    library = Library(built.folder, "sm_90")
    specs = all_kernels()
    for name, info in library.kernels.items():
        assert dict(info["arguments"]) == dict(specs[name].arguments)
        assert list(dict(info["arguments"])) == list(specs[name].arguments)
    of_layers = {entry.request.kernel for entry in library.entries if "LWP" in entry.request.constexprs}
    assert {argument for name in of_layers for argument in library.kernels[name]["specialised"]} <= SPECIALISED
