"""Calls that a layer repeats, and whether a repeated call launches what the ordinary steps launch."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from triton_ep import EPAll2AllLayer, MXTensor
from triton_ep.context.given import RoutingMap, Rows
from triton_ep.exchange import steps
from triton_ep.exchange.repeated_combine import RepeatedCombine
from triton_ep.exchange.repeated_dispatch import RepeatedDispatch
from triton_ep.ops import combine as combine_ops

Calls = dict[str, tuple[type, Callable[[], object]]]
"""What repeats a call, and the call."""
Launches = list[tuple[str, dict[str, Any]]]
"""Name of each kernel, and what it is launched with, by name: numbers, addresses, dtypes."""
CHANGING = ("read_number",)
"""What differs between any two calls."""


def calls_of(layer: EPAll2AllLayer, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> Calls:
    """Expert-major dispatches, and combines, of all kinds, with tensors of their own besides the inputs."""
    cfg, device = layer.config, x.device
    desc = layer.dispatch(x, idx, weights)[2]
    y = torch.zeros(desc.num_recv_rows, cfg.hidden, dtype=cfg.token_dtype, device=device)
    factors, out, second = torch.ones(len(y), device=device), torch.empty_like(x), x.clone()
    probs = torch.zeros(len(x), cfg.num_experts, device=device).scatter_(1, idx.long().clamp(0, cfg.num_experts - 1), 1)
    routed, excess = probs.bool(), torch.zeros(1, dtype=torch.int32, device=device)
    by_map, by_map_alone = RoutingMap(routed, probs, excess), RoutingMap(routed, None, None)

    def backward() -> torch.Tensor:
        with layer.context.backward_pass():
            return layer.combine(y, desc)

    found: Calls = {
        "dispatch": (RepeatedDispatch, lambda: layer.dispatch(x, idx, weights)),
        "no weights": (RepeatedDispatch, lambda: layer.dispatch(x, idx)),
        "again": (RepeatedDispatch, lambda: layer.dispatch_again(x, desc)),
        "again with weights": (RepeatedDispatch, lambda: layer.dispatch_again(x, desc, weights)),
        "by map": (RepeatedDispatch, lambda: layer.dispatch_with_row_map(Rows(x), by_map, None)),
        "by map alone": (RepeatedDispatch, lambda: layer.dispatch_with_row_map(Rows(x), by_map_alone, None)),
        "combine": (RepeatedCombine, lambda: layer.combine(y, desc)),
        "weighted": (RepeatedCombine, lambda: layer.combine(y, desc, factors)),
        "bias": (RepeatedCombine, lambda: layer.combine(y, desc, bias=x)),
        "biases": (RepeatedCombine, lambda: layer.combine(y, desc, factors, bias=(x, second))),
        "out": (RepeatedCombine, lambda: layer.combine(y, desc, out=out)),
        "backward": (RepeatedCombine, backward),
    }
    data = x.to(torch.float8_e4m3fn)
    scale = torch.zeros(len(x), cfg.hidden // 32, dtype=torch.uint8, device=device)
    if cfg.payload is not None:
        rows = MXTensor(data, scale.view(torch.float8_e8m0fnu), torch.float8_e4m3fn, 32, cfg.token_dtype)
        return found | {
            "quantised": (RepeatedDispatch, lambda: layer.dispatch(rows, idx, weights)),
            "row": (RepeatedDispatch, lambda: layer.dispatch(x, idx, landing="row")),
            "bf16": (RepeatedDispatch, lambda: layer.dispatch(x, idx, landing="bf16")),
        }
    return found | {
        "kept": (RepeatedDispatch, lambda: layer.dispatch_ahead(x, idx, weights, None, later=False, keep_rows=True)),
        "scaled": (RepeatedDispatch, lambda: layer.dispatch_scaled(data, scale, idx, weights)),
        "scaled again": (RepeatedDispatch, lambda: layer.dispatch_scaled(data, scale, None, layout_desc=desc)),
    }


def compact_calls_of(
    layer: EPAll2AllLayer, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, num_rows: int | None
) -> Calls:
    """The same of compact rows, of a layer without a capacity. num_rows: as in `dispatch_compact`."""
    data, other = x.to(torch.float8_e4m3fn), idx.to(torch.int32 if idx.dtype == torch.int64 else torch.int64)
    scale = torch.zeros(len(x), layer.config.hidden // 32, dtype=torch.uint8, device=x.device)
    rows = layer.dispatch_compact(x, idx, weights, num_rows=num_rows)
    given = {"num_rows": num_rows}
    return {
        "compact": (RepeatedDispatch, lambda: layer.dispatch_compact(x, idx, weights, **given)),
        "other ids": (RepeatedDispatch, lambda: layer.dispatch_compact(x, other, **given)),
        "compact scaled": (RepeatedDispatch, lambda: layer.dispatch_compact(data, idx, weights, scale=scale, **given)),
        "compact again": (RepeatedDispatch, lambda: layer.dispatch_compact_again(x, rows.layout_desc)),
        "sum": (RepeatedCombine, lambda: layer.combine(rows.x, rows.layout_desc)),
    }


def check_all(
    layer: EPAll2AllLayer, noted: Calls, calls: Calls, launches_of: Callable[[Callable[[], object]], Launches]
) -> dict[str, dict[str, Any]]:
    """For each call how many launches it repeats, and what is wrong with them.

    noted: calls of the same kinds with other tensors, which are noted before. launches_of: makes a call, and holds all
    tensors of its launches, so that no later call gets their memory.
    """
    found, ctx = {}, layer.context
    for name, (by, call) in calls.items():
        ctx.repeats = None
        call()  # it may need more room than calls before
        first, second = launches_of(call), launches_of(call)
        ctx.repeats = {}
        noted[name][1]()
        before = launches_of(noted[name][1])
        (known,) = ctx.repeats.values()
        if not isinstance(known, by):
            found[name] = {"launches": 0, "wrong": ["not repeated"]}
            continue
        with (
            mock.patch.object(steps, "count", side_effect=AssertionError("an ordinary dispatch")),
            mock.patch.object(combine_ops, "combine", side_effect=AssertionError("an ordinary combine")),
        ):
            repeated = launches_of(call)
        found[name] = {"launches": len(repeated), "wrong": differences(before, first, second, repeated)}
    return found


def differences(noted: Launches, first: Launches, second: Launches, repeated: Launches) -> list[str]:
    """How repeated launches differ from those of two ordinary calls, whose results are in other memory: what is the
    same in both must be the same, and what is new must be the same new memory in the same places, and not that of the
    noted call."""
    if [name for name, _ in first] != [name for name, _ in repeated]:
        return ["other kernels"]
    found: list[str] = []
    new: dict[object, object] = {}
    old = {value for _, told in noted for value in told.values()}
    for (kernel, one), (_, two), (_, again) in zip(first, second, repeated, strict=True):
        if one.keys() != again.keys():
            return [f"{kernel} has other arguments"]
        for name, value in one.items():
            if name in CHANGING:
                continue
            given = again[name]
            if given != (value if value == two[name] else new.setdefault(value, given)):
                found.append(f"{kernel}: {name} is {given}, not {value}")
            elif value != two[name] and given in old:
                found.append(f"{kernel}: {name} is that of the noted call")
    return found + ["one memory for two results"] * (len(set(new.values())) < len(new))
