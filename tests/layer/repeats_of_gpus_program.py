"""Makes calls of layers as on a GPU, without one, and prints whether repeated launches are those of the ordinary steps.

    TRITON_INTERPRET=1 python repeats_of_gpus_program.py RANKS

No kernel runs, so the calls are those that the host need not read anything for. The last line is JSON: of each kind of
call how many launches it repeats, and what is wrong with them.
"""

import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from tests.aot import launches_of_gpus_program as stand_in
from triton_ep import EPAll2AllLayer, MXTensor
from triton_ep.context.given import RoutingMap, Rows
from triton_ep.distributed import initialize_distributed
from triton_ep.exchange import repeated_combine, repeated_dispatch
from triton_ep.runtime import launch
from triton_ep.runtime import repeat as repeats

STREAM = 77
Started = list[tuple[launch.Launcher, tuple[Any, ...]]]
"""Launchers, and what their compiled kernels were started with: grid, stream, addresses and integers."""
STARTED: Started = []
HELD: list[object] = []
"""Tensors of ordinary launches, and results: no later call gets their memory."""


def as_on_a_gpu() -> None:
    """As the stand-in, but note what compiled kernels would be started with."""
    finds = repeated_dispatch.find, repeated_combine.find
    stand_in.as_on_a_gpu()
    repeated_dispatch.find, repeated_combine.find = finds

    def started(self: launch.Launcher, grid: int, args: tuple[Any, ...], stream: Any) -> None:
        if self.noted is not None:
            self.noted.append(launch.Launch(self, grid, args, stream))
        HELD.append(args)
        passed = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
        STARTED.append((self, (grid, STREAM if stream is None else stream, *passed)))

    def start_of(self: launch.Launcher, _: Any) -> Callable[..., None]:
        return lambda *given: STARTED.append((self, given))

    launch.Launcher.launch_in_order, launch.Launcher.start_of = started, start_of
    repeats._raw_stream = lambda device: STREAM
    torch.cuda.current_device = lambda: 0


def launches_of(call: Callable[[], object]) -> Started:
    """What a call launches."""
    STARTED.clear()
    HELD.append(call())
    return list(STARTED)


def wrong(first: Started, second: Started, repeated: Started) -> list[str]:
    """How repeated launches differ from two ordinary calls, whose results are in other memory."""
    if [each for each, _ in first] != [each for each, _ in repeated]:
        return ["other kernels"]
    found, new = [], {}
    for (launcher, one), (_, two), (_, again) in zip(first, second, repeated, strict=True):
        names = ("grid", "stream", *launcher.names)
        for name, value, other, given in zip(names, one, two, again, strict=True):
            alike = given == value if value == other else new.setdefault(value, given) == given
            if not alike:
                found.append(f"{launcher.plan.kernel}: {name} is {given}, not {value}")
    return found + ["one memory for two results"] * (len(set(new.values())) < len(new))


def check(layer: EPAll2AllLayer, noted: Callable[[], object], call: Callable[[], object], by: type) -> dict[str, Any]:
    """How many launches a call repeats, and what is wrong with them. noted: a call of its kind with other tensors."""
    ctx = layer.context
    ctx.repeats = None
    call()
    HELD.clear()
    first, second = launches_of(call), launches_of(call)
    ctx.repeats = {}
    noted()
    noted()
    (known,) = ctx.repeats.values()
    if not isinstance(known, by):
        return {"launches": 0, "wrong": ["not repeated"]}
    with mock.patch.object(launch.Launcher, "launch_in_order", side_effect=AssertionError("an ordinary launch")):
        repeated = launches_of(call)
    return {"launches": len(repeated), "wrong": wrong(first, second, repeated)}


Calls = dict[str, tuple[type, Callable[[], object]]]
"""What repeats a call, and the call."""
DISPATCH, COMBINE = repeated_dispatch.RepeatedDispatch, repeated_combine.RepeatedCombine


def calls_of(layer: EPAll2AllLayer) -> Calls:
    """Dispatches and combines of a static layer, with tensors of their own."""
    x, ids, weights = stand_in.inputs(layer.config.max_tokens)
    desc = layer.dispatch(x, ids, weights)[2]
    y, factors = torch.zeros(layer.config.recv_capacity, layer.config.hidden).bfloat16(), torch.ones(desc.num_recv_rows)
    out, second, probs = torch.empty_like(x), x.clone(), torch.ones(len(x), layer.config.num_experts)
    routed = probs.bool()
    found: Calls = {
        "dispatch": (DISPATCH, lambda: layer.dispatch(x, ids, weights)),
        "no weights": (DISPATCH, lambda: layer.dispatch(x, ids)),
        "again": (DISPATCH, lambda: layer.dispatch_again(x, desc)),
        "map": (DISPATCH, lambda: layer.dispatch_with_row_map(Rows(x), RoutingMap(routed, probs, None), None)),
        "combine": (COMBINE, lambda: layer.combine(y, desc)),
        "weighted": (COMBINE, lambda: layer.combine(y, desc, factors)),
        "biases": (COMBINE, lambda: layer.combine(y, desc, bias=(x, second))),
        "out": (COMBINE, lambda: layer.combine(y, desc, out=out)),
    }
    if layer.config.payload is not None:
        data, scale = x.to(torch.float8_e4m3fn), torch.zeros(len(x), layer.config.hidden // 32).byte()
        rows = MXTensor(data, scale.view(torch.float8_e8m0fnu), torch.float8_e4m3fn, 32, torch.bfloat16)
        found |= {
            "quantised": (DISPATCH, lambda: layer.dispatch(rows, ids, weights)),
            "row": (DISPATCH, lambda: layer.dispatch(x, ids, landing="row")),
            "bf16": (DISPATCH, lambda: layer.dispatch(x, ids, landing="bf16")),
        }
    return found


def calls_of_compact(layer: EPAll2AllLayer, num_rows: int) -> Calls:
    """Compact rows of a layer without a capacity, of which the caller gives the number."""
    x, ids, weights = stand_in.inputs(layer.config.max_tokens)
    rows = layer.dispatch_compact(x, ids, weights, num_rows=num_rows)
    data, scale = x.to(torch.float8_e4m3fn), torch.ones(len(x), layer.config.hidden // 128)
    return {
        "compact": (DISPATCH, lambda: layer.dispatch_compact(x, ids, weights, num_rows=num_rows)),
        "scaled": (DISPATCH, lambda: layer.dispatch_compact(data, ids, weights, scale=scale, num_rows=num_rows)),
        "compact again": (DISPATCH, lambda: layer.dispatch_compact_again(x, rows.layout_desc)),
        "sum": (COMBINE, lambda: layer.combine(rows.x, rows.layout_desc)),
    }


def checked(layer: EPAll2AllLayer, noted: Calls, calls: Calls) -> dict[str, dict[str, Any]]:
    """`check` of all calls."""
    return {name: check(layer, noted[name][1], call, by) for name, (by, call) in calls.items()}


def main() -> None:
    """Print what was found."""
    stand_in.RANKS_PER_NODE = int(sys.argv[1])
    initialize_distributed()
    as_on_a_gpu()
    found = {}
    with torch.no_grad():
        for name, options in {
            "bf16": {},
            "summed": {"enable_local_combine": True, "alignment": 128, "shared_staging": True},
            "mxfp8": {"payload": "mxfp8", "enable_local_combine": True},
            "budget": {"sm_budget": 24},
            "few": {"max_tokens": stand_in.FEW},
        }.items():
            layer = stand_in.layer_of(**options)
            of_layer = checked(layer, calls_of(layer), calls_of(layer))
            found |= {f"{call} of {name}": result for call, result in of_layer.items()}
        exact = stand_in.layer_of(capacity=None)
        found |= checked(exact, calls_of_compact(exact, stand_in.TOKENS), calls_of_compact(exact, stand_in.TOKENS + 8))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
