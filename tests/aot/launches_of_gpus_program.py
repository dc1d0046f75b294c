"""Makes calls of layers and modules as on a GPU, without one, and prints the kernels that they request.

    TRITON_INTERPRET=1 python launches_of_gpus_program.py [RANKS_PER_NODE]

No kernel runs: results are whatever is in memory. So the calls are those that the host need not read anything for. The
last line is JSON: for each group of calls, the requests that no library built for it has, and how many there were.
"""

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from triton_ep import EPAll2AllLayer, MXTensor, autograd
from triton_ep.context.given import RoutingMap, Rows
from triton_ep.context.streams import SideStream
from triton_ep.distributed import initialize_distributed
from triton_ep.exchange import repeated_combine, repeated_dispatch, slots
from triton_ep.nn import MoE, expert_block, moe_block
from triton_ep.nn.exchanges import new_exchange
from triton_ep.ops import token_layout
from triton_ep.reference.channel_scales import quantize_channels
from triton_ep.runtime import jit_cache, launch
from triton_ep.runtime.plans import experts, experts_backward, layers, products
from triton_ep.runtime.plans.request import KernelRequest

TOKENS, HIDDEN, TOPK, EXPERTS, FFN = 1024, 1024, 4, 8, 512
FEW = 64
RANKS_PER_NODE = int(sys.argv[1]) if len(sys.argv) > 1 else 1
REQUESTED: dict[str, str] = {}
STREAM: Any = SimpleNamespace(wait_stream=lambda other: None)


def as_on_a_gpu() -> None:
    """Record launches instead of making them; decide everything as for an H200."""

    def record(self: launch.Launcher, grid: int, args: tuple[Any, ...], stream: Any) -> None:
        if grid:
            pointers = [arg.data_ptr() if isinstance(arg, torch.Tensor) else 0 for arg in args]
            request = self._request(args, [i for i, address in enumerate(pointers) if address & 15])
            REQUESTED[request.signature()] = request.text()

    def by_name(self: launch.Launcher) -> Callable[..., None]:
        return launch._by_name(self.plan.kernel, self.names, self.launch_in_order)

    for module in [each for name, each in sys.modules.items() if name.startswith("triton_ep")]:
        if hasattr(module, "INTERPRETING"):
            module.INTERPRETING = False
        if hasattr(module, "multiprocessors"):
            module.multiprocessors = lambda device: 132
    launch.Launcher.launch_in_order, launch.Launcher._short_cut = record, by_name
    repeated_dispatch.find = repeated_combine.find = lambda *_: None  # so each call makes requests
    launch.architecture, launch._place = lambda: "sm_90", lambda: -1
    jit_cache.current = lambda *_: None
    SideStream.fork, SideStream.join, SideStream.wait_joined = lambda self: STREAM, lambda self: None, lambda self: None
    moe_block.current_stream = expert_block.current_stream = lambda: STREAM
    EPAll2AllLayer.comm_stream = property(lambda self: STREAM if self.context.backward else None)
    torch.cuda.is_current_stream_capturing = lambda: True  # so no tensor is recorded on a stream
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)
    torch.cuda.get_device_capability = lambda *_: (9, 0)


def missing(wanted: list[KernelRequest]) -> dict[str, Any]:
    """What was requested since the last call, and is not wanted."""
    built = {each.signature() for each in wanted}
    found = {"missing": [text for key, text in REQUESTED.items() if key not in built], "requested": len(REQUESTED)}
    REQUESTED.clear()
    return found


def layer_of(**options: Any) -> EPAll2AllLayer:
    """A layer, static unless `options` say otherwise. It is not finalized: ranks would wait for kernels."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = options.pop("max_tokens", TOKENS), HIDDEN, TOPK, rank, EXPERTS, RANKS_PER_NODE, world
    options = {"num_sm": 20, "capacity": TOKENS * TOPK + EXPERTS * 128, **options}
    return EPAll2AllLayer(dist.group.WORLD, *sizes, **options)


def inputs(num: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, ids and weights of so many tokens."""
    return torch.zeros(num, HIDDEN).bfloat16(), torch.zeros(num, TOPK, dtype=torch.int64), torch.ones(num, TOPK)


def missing_of(layer: EPAll2AllLayer, **uses: Any) -> dict[str, Any]:
    """`missing` of what is built for a layer that is used in this way."""
    shape = layer.config.shape(layer.context.network, False)
    return missing(layers.layer_requests(shape, layers.LayerCalls(**uses)))


def calls_of_a_layer(landings: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
    """Dispatches by ids of both dtypes, with and without weights, and their combines and backward passes."""
    layer = layer_of(**options)
    x, ids, weights = inputs(layer.config.max_tokens)
    for dtype in (torch.int32, torch.int64):
        for given in (None, weights):
            rows, row_weights, desc = layer.dispatch(x, ids.to(dtype), given)
            y = rows.qdata.to(torch.bfloat16) if isinstance(rows, MXTensor) else rows
            layer.combine(y, desc, weights=row_weights)
    with layer.context.making_room(), layer.context.backward_pass():
        layer.combine(y, desc)
        slots.to_slots(layer.context, torch.zeros(y.shape[0]), slots.needed_slots(layer.context, desc), desc)
    for landing in landings:
        layer.dispatch_again(x, layer.dispatch(x, ids, weights, landing=landing)[2], landing=landing)
    rows, row_weights, desc = autograd.dispatch(layer, x.requires_grad_(), ids, weights.requires_grad_())
    y = rows.qdata.to(torch.bfloat16) if isinstance(rows, MXTensor) else rows
    autograd.combine(layer, y.detach().requires_grad_(), desc, row_weights).sum().backward()
    return missing_of(layer, landing=landings)


@torch.no_grad()
def calls_of_integrations() -> dict[str, Any]:
    """Compact rows, in one byte, too; rows by routing maps, with scales; the layout."""
    exact, static = layer_of(capacity=None), layer_of()
    x, ids, weights = inputs()
    data, scale = quantize_channels(x, False, False)
    for dtype in (torch.int32, torch.int64):
        token_layout.token_layout(ids.to(dtype), EXPERTS, RANKS_PER_NODE, RANKS_PER_NODE, token_layout.LayoutMemory())
        for given in (None, weights):
            got = exact.dispatch_compact(x, ids.to(dtype), given, num_rows=TOKENS)
            exact.combine(got.x, got.layout_desc)
            exact.dispatch_compact(data, ids.to(dtype), given, scale=scale, num_rows=TOKENS)
            static.dispatch_scaled(data, scale, ids.to(dtype), given)
    routed = torch.ones(TOKENS, EXPERTS, dtype=torch.bool)
    for probs in (None, torch.ones(TOKENS, EXPERTS)):
        static.dispatch_with_row_map(Rows(x), RoutingMap(routed, probs, None), None)
    return missing_of(static, compact=True, fp8_rows=True, maps=True)


@torch.no_grad()
def calls_of_low_latency(**options: Any) -> dict[str, Any]:
    """Dispatches with and without weights, by ids of both dtypes, of MXTensors, too; combines of either weights."""
    layer = layer_of(max_tokens=FEW, low_latency=True, **options)
    x, ids, weights = inputs(FEW)
    data, scale = x.to(torch.float8_e4m3fn), torch.zeros(FEW, HIDDEN // 32).byte().view(torch.float8_e8m0fnu)
    quantised = [MXTensor(data, scale, torch.float8_e4m3fn, 32, torch.bfloat16)] if layer.config.payload else []
    for rows in (x, *quantised):
        for dtype in (torch.int32, torch.int64):
            for factors in (None, weights):
                got, row_weights, desc = layer.dispatch(rows, ids.to(dtype), factors)
                y = torch.zeros(got.shape, dtype=torch.bfloat16)
                layer.combine(y, desc, weights=row_weights)
    layer.combine(y, desc, weights=weights)
    return missing_of(layer)


def step_of_a_module(precision: str = "default", **options: Any) -> dict[str, Any]:
    """A step of a module whose router is given, then one whose gradients are added to main_grad, then inference."""
    sizes = {"num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS, "capacity": 2.0, "num_sm": 20}
    exchange = new_exchange(HIDDEN, **sizes, **options)
    moe = MoE(HIDDEN, FFN, **sizes, **options, precision=precision, router=False, exchange=exchange)
    x, ids, weights = inputs()
    y = moe(x.requires_grad_(), topk_idx=ids, topk_weights=weights.requires_grad_())
    torch.autograd.grad(y, [x, weights, *moe.parameters()], torch.zeros_like(y))
    for parameter in moe.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    moe(x, topk_idx=ids, topk_weights=weights).sum().backward()
    with torch.no_grad():
        moe(x, topk_idx=ids, topk_weights=weights)
    arithmetic = ("bf16", "fp8", "fast")
    wanted = layers.layer_requests(
        exchange.config.shape(exchange.context.network, False), layers.LayerCalls(landing=("row", "bf16"))
    )
    mine = EXPERTS // dist.get_world_size()
    wanted += experts.experts(mine, arithmetic, exact=True) + experts_backward.experts_backward(mine, arithmetic)
    return missing(wanted + products.mxfp8(mine))


def main() -> None:
    """Print what is missing."""
    initialize_distributed()
    as_on_a_gpu()
    found = {
        "bf16": calls_of_a_layer(),
        "summed": calls_of_a_layer(enable_local_combine=True, alignment=128),
        "mxfp8": calls_of_a_layer(("row", "bf16"), payload="mxfp8", alignment=128, enable_local_combine=True),
        "budget": calls_of_a_layer(sm_budget=24),
    }
    one_node = dist.get_world_size() == RANKS_PER_NODE
    found |= of_one_node() if one_node else {}
    print(json.dumps(found))


def of_one_node() -> dict[str, dict[str, Any]]:
    """What is missing of calls that need one node."""
    return {
        "few tokens": calls_of_a_layer(max_tokens=FEW),
        "low latency": calls_of_low_latency(),
        "low latency in mxfp8": calls_of_low_latency(payload="mxfp8", alignment=128),
        "integrations": calls_of_integrations(),
        "module": step_of_a_module(),
        "module in mxfp8": step_of_a_module(payload="mxfp8"),
        "exact": step_of_a_module(payload="mxfp8", precision="exact"),
    }


if __name__ == "__main__":
    main()
