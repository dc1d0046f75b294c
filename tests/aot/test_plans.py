"""What a build compiles for a configuration is what layers of it launch: every launch is among what `plans` names."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.aot.library import Built
from triton_ep import EPAll2AllLayer, autograd, runtime
from triton_ep.aot.store import Library
from triton_ep.kernels.spec import SPECS
from triton_ep.mx.tensor import MXTensor
from triton_ep.plans import layers
from triton_ep.plans.asked import Asked, ask
from triton_ep.plans.shape import Plan
from triton_ep.testing import make_workload

SPECIALISED = {"row_words", "row_bytes", "hidden"}
"""Integers that the kernels of layers are specialised by; the last test compares."""


def _asked(spec: Any, args: Any, constexprs: dict[str, Any]) -> Asked:
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
    return ask(Plan(spec.name, values), types, numbers, unaligned)


def _comparable(asked: Asked) -> Asked:
    """Without what the interpreter does not have, warps, or has by the number of tokens: blocks to quantise."""
    constexprs = {name: value for name, value in asked.constexprs.items() if name != "BLOCKS"}
    return replace(asked, constexprs=constexprs, num_warps=None, maxnreg=None)


def _check_launches(rank: int, nodes: int, ranks_per_node: int, options: dict[str, Any]) -> None:
    world = nodes * ranks_per_node
    found: dict[str, str] = {}
    plain = runtime._interpret

    def noting(spec: Any, grid: int, args: Any, constexprs: dict[str, Any]) -> None:
        if spec.name != "dequantize_rows_kernel":  # this test's own use of what arrived
            asked = _comparable(_asked(spec, args, constexprs))
            found[asked.signature()] = asked.text()
        plain(spec, grid, args, constexprs)

    layer = EPAll2AllLayer(dist.group.WORLD, 6, 64, 3, rank, 8, ranks_per_node, world, num_sm=2, **options)
    runtime._interpret = noting
    try:
        with layer:
            layer.barrier.barrier_all()
            layer.barrier.barrier_all(intra_node_only=True)
            for seed, idx_dtype in enumerate((torch.int32, torch.int64)):
                work = make_workload(
                    rank, world, 6 - rank, hidden=64, topk=3, num_experts=8, seed=seed, idx_dtype=idx_dtype
                )
                for weights in (None, work.topk_weights):
                    recv_x, recv_weights, desc = layer.dispatch(work.x, work.topk_idx, weights)
                    y = recv_x.dequantize(torch.bfloat16) if isinstance(recv_x, MXTensor) else recv_x
                    layer.combine(y, desc, weights=recv_weights)
            if not options.get("low_latency"):
                w = work.topk_weights.requires_grad_()
                recv_x, recv_weights, desc = autograd.dispatch(layer, work.x, work.topk_idx, w)
                y = recv_x.dequantize(torch.bfloat16) if isinstance(recv_x, MXTensor) else recv_x
                autograd.combine(layer, y.detach(), desc, recv_weights).sum().backward()
    finally:
        runtime._interpret = plain
    shape = layer.config.shape(layer.context.network, interpreted=True)
    named = {_comparable(one).signature() for one in layers.layer(shape)}
    assert len(found) > 5
    missing = [text for signature, text in found.items() if signature not in named]
    assert missing == [], missing


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
    run_ranks: Callable[..., Any], nodes: int, ranks_per_node: int, options: dict[str, Any]
) -> None:
    """Dispatch, combine, barriers and a backward pass: kernels, constexprs, types, alignment of every launch."""
    run_ranks(_check_launches, nodes, ranks_per_node, options)


def test_the_index_says_what_the_specs_say(built: Built) -> None:
    """The index tells the run time of the same arguments as the KernelSpecs do, and of the same integers."""
    library = Library(built.folder, "sm_90")
    specs = {spec.name: spec for spec in SPECS}
    for name, info in library.kernels.items():
        assert dict(info["arguments"]) == dict(specs[name].arguments)
        assert list(dict(info["arguments"])) == list(specs[name].arguments)
    of_layers = {entry.asked.kernel for entry in library.entries if "LWP" in entry.asked.constexprs}
    assert {argument for name in of_layers for argument in library.kernels[name]["specialised"]} <= SPECIALISED
