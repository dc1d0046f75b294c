"""Compare other tiles of the experts' kernels with those in use, on one GPU, to choose the tables of plans.

    python tests/bench/bench_tiles.py                    # about 90 s
    python tests/bench/bench_tiles.py --group prepare,fp8

Sizes are for one of 4 GPUs with DeepSeek-V3's layer: 64 experts, 32,768 rows with random experts, segments aligned
to 128 rows, buffers of static capacity. All variants of a group take turns, so that they run at the same clocks; the
first variant of each kernel is the one in use. A line has the median in microseconds, its ratio to the first variant,
and the largest difference from the first variant's result, relative to the largest value. Without a GPU, the program
runs tiny sizes in the interpreter, to test itself.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from triton_ep.bench.timing import Timer
from triton_ep.ops.activation import Activation
from triton_ep.ops.experts import launch_gate_up, launch_rows_product
from triton_ep.ops.experts_backward import down_dgrad, weight_gradient
from triton_ep.ops.mxfp8 import quantize_rows
from triton_ep.ops.prepare import prepare_weights
from triton_ep.ops.row_scales import RowScaled, dequantize_rows_in_use, quantize_to_rows, rebase_rows
from triton_ep.ops.tiles import tile_table
from triton_ep.runtime.launch import INTERPRETING
from triton_ep.runtime.plans import experts as plans
from triton_ep.runtime.plans import experts_backward as backward_plans
from triton_ep.runtime.plans.compute import Tile
from triton_ep.runtime.plans.experts import ProductTile

GROUPS = ("prepare", "passes", "few", "fp8", "bf16", "wgrad")
WARMERS = 12
FP8 = {"in use": None, "64x128 s4": ProductTile(64, 128, 128, 4, 4, per_sm=2, promote=True)}
BF16 = {
    "in use": None,
    "128x256 s3": ProductTile(128, 256, 64, 3, flatten=True),
    "128x128 s4": ProductTile(128, 128, 64, 4),
}
PREPARED = (
    ((128, 64), 4, 128, 4),
    ((128, 64), 4, 128, 16),
    ((128, 64), 4, 128, 1),
    ((128, 64), 4, 128, 64),
    ((128, 64), 4, 160, 4),
    ((128, 64), 4, 128, 2),
    ((128, 64), 8, 80, 4),
    ((64, 64), 2, 128, 8),
    ((64, 128), 4, 128, 8),
    ((128, 128), 8, 128, 4),
)
"""Tile, warps, registers and steps of the kernel that prepares weights; the one in use comes first."""
WGRAD: dict[str, dict[str, Any]] = {
    "in use": {},
    "band 16": {"WGRAD_BAND": 16},
    "band 64": {"WGRAD_BAND": 64},
    "128x256 s4, 1 per SM": {"WGRAD": Tile(128, 256, 64, 4), "WGRAD_PROGRAMS": 1},
    "256x128 s4, 1 per SM": {"WGRAD": Tile(256, 128, 64, 4), "WGRAD_PROGRAMS": 1},
}


@dataclass(frozen=True)
class Variant:
    """One line: the kernel, a label of the variant, and the call, whose result is compared."""

    kernel: str
    how: str
    call: Callable[[], Any]


class Operands:
    """Rows and weights of a layer. tiny: little data for the same kernels."""

    def __init__(self, tiny: bool, device: torch.device) -> None:
        self.experts, self.hidden, self.ffn, rows = (64, 512, 256, 512) if tiny else (64, 7168, 2048, 32768)
        if INTERPRETING:
            self.experts = 4
        self.device, self.generator = device, torch.Generator(device).manual_seed(0)
        choice = torch.randint(self.experts, (rows,), generator=torch.Generator().manual_seed(0))
        filled = torch.bincount(choice, minlength=self.experts)
        ends = (-(-filled // 128) * 128).cumsum(0)
        starts = torch.cat([ends.new_zeros(1), ends])
        self.rows = -(-(rows * 5 // 4 + self.experts * 127) // 128) * 128
        self.offs, self.filled = starts.int().to(device), filled.int().to(device)
        self.tiles = self._table(starts, filled)
        row = torch.arange(self.rows, device=device)
        at = torch.searchsorted(ends.to(device), row, right=True).clamp(max=self.experts - 1)
        self.in_use = (row - starts.to(device)[at]) < filled.to(device)[at]
        e, h, f = self.experts, self.hidden, self.ffn
        self.x, self.dy = (self._rows(h) for _ in range(2))
        self.act, self.pre, self.dpre = self._rows(f), self._rows(2 * f), self._rows(2 * f)
        self.w13, self.w2 = self._normal(e, 2 * f, h, scale=h**-0.5), self._normal(e, h, f, scale=f**-0.5)
        self.weights = torch.rand(self.rows, generator=self.generator, device=device) + 0.5

    def _table(self, starts: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
        """The tile table as a dispatch writes it, with the rows that are padding."""
        table = tile_table(self.offs, self.rows)
        host = table.cpu()
        for record in host[1 : 1 + int(host[0, 0])]:
            expert, first, rows, band = record.tolist()
            left = int(filled[expert]) - (first - int(starts[expert]))
            record[3] = max(min(left, rows), 0) * 65536 + band % 65536
        return host.to(table.device)

    def _normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return made.normal_(0, scale, generator=self.generator)

    def _rows(self, columns: int) -> torch.Tensor:
        return self._normal(self.rows, columns).mul_(self.in_use.unsqueeze(1))


# --- variants ---------------------------------------------------------------------------------------------------


def patched(module: Any, values: dict[str, Any], call: Callable[[], Any]) -> Callable[[], Any]:
    """The call with other constants in a module."""

    def run() -> Any:
        with contextlib.ExitStack() as stack:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(module, name, value))
            return call()

    return run


def prepare(given: Operands) -> Iterator[Variant]:
    """Copies of weights: new ones, and updates after small changes and after no change."""
    for name, w in (("w13", given.w13), ("w2", given.w2)):
        kept = prepare_weights(w, "both")
        yield Variant(f"prepare {name}", "new copies", lambda w=w: prepare_weights(w, "both"))
        for tile, warps, registers, steps in PREPARED:
            values = {"PREPARED": tile, "PREPARED_WARPS": warps}
            values |= {"PREPARED_REGISTERS": registers, "PREPARED_STEPS": steps}
            again = patched(plans, values, lambda w=w, kept=kept: prepare_weights(w, "both", out=kept))
            how = f"{tile[0]}x{tile[1]} {warps}w r{registers} s{steps}"
            yield Variant(f"prepare {name}", f"up to date, {how}", again)
        for use in ("fprop", "dgrad"):
            out = (kept[0], None) if use == "fprop" else (None, kept[1])
            call = lambda w=w, out=out, use=use: prepare_weights(w, use, out=out)  # noqa: E731
            yield Variant(f"prepare {name}, {use}", "up to date", call)
    moved = torch.empty_like(given.w2).normal_(0, 1e-3, generator=given.generator).add_(1).mul_(given.w2)
    kept, turn = prepare_weights(given.w2, "both"), [given.w2, moved]

    def step() -> Any:
        turn.reverse()
        return prepare_weights(turn[0], "both", out=kept)

    yield Variant("prepare w2, every weight 0.1 % off", "up to date", step)


def passes(given: Operands) -> Iterator[Variant]:
    """Conversions of rows to and from one scale per row."""
    for name, x in (("dpre", given.dpre), ("x", given.x)):
        for blocks in (128, 64, 256, 512, 0):
            values = {"LEAST_BLOCKS": blocks} if blocks else {"QUANTIZED_BLOCKS": 0}
            call = patched(plans, values, lambda x=x: quantize_to_rows(x, given.offs))
            yield Variant(f"quantize_to_rows {name}", f"{32 * blocks} values" if blocks else "read twice", call)
    # Rows of MXFP8 as a caller has them, and the activation of a layer.
    for name, x, offs in (("256 rows per expert", given.x[: given.rows // 6], None), ("act", given.act, given.offs)):
        parts = quantize_rows(x)
        for blocks in (256, 128, 512, 0):
            values = {"REBASED_BLOCKS": blocks} if blocks else {"QUANTIZED_BLOCKS": 0}
            call = patched(plans, values, lambda parts=parts, offs=offs: rebase_rows(*parts, offs))
            yield Variant(f"rebase_rows {name}", f"{32 * blocks} values" if blocks else "by steps", call)
    rows = quantize_to_rows(given.x, given.offs)
    for number, columns in ((1, 8192), (2, 4096), (4, 1024), (8, 1024)):
        tile = {"ROWS": number, "BLOCK_K": columns}
        call = partial(dequantize_rows_in_use, rows, given.offs)
        from triton_ep.ops import row_scales

        shown = f"{number} rows x {columns}"
        yield Variant("dequantize", shown, patched(row_scales, {"row_tile": lambda *_, t=tile: t}, call))


def products(given: Operands, fp8: bool) -> Iterator[Variant]:
    """All products of rows and weights, in FP8 or in bf16."""
    kind, tiles = ("fp8", FP8) if fp8 else ("bf16", BF16)
    tiles = {"in use": None} if INTERPRETING else tiles
    x, act, dpre, dy = given.x, given.act, given.dpre, given.dy
    w13, w2, w13_t, w2_t = given.w13, given.w2, given.w13.transpose(1, 2), given.w2
    if fp8:
        x, act, dpre, dy = (quantize_to_rows(each, given.offs) for each in (x, act, dpre, dy))
        (w13, w13_t), (w2, w2_t) = (prepare_weights(w, "both") for w in (given.w13, given.w2))
    out = "mx" if fp8 else "bf16"
    for keep in (True, False):
        for how, tile in tiles.items():
            yield Variant(
                f"{kind} gate_up{', product kept' if keep else ''}", how,
                lambda tile=tile, keep=keep: launch_gate_up(
                    x, w13, given.offs, given.tiles, given.weights, None, Activation(), keep, out, False,
                    tile=tile and tile.halved(),
                )[0],
            )  # fmt: skip
    result = torch.empty(given.rows, given.hidden, dtype=torch.bfloat16, device=given.device)
    for name, a, w in (("down", act, w2), ("dx", dpre, w13_t)):
        for how, tile in tiles.items():

            def product(a: Any = a, w: Any = w, tile: Any = tile) -> torch.Tensor:
                launch_rows_product(a, w, given.offs, result, given.tiles, None, None, False, True, tile=tile)
                return result

            yield Variant(f"{kind} {name}", how, product)
    for how, tile in tiles.items():
        call = partial(down_dgrad, dy, w2_t, given.pre, given.offs, row_weights=given.weights, tiles=given.tiles)
        patch = {} if tile is None else {"down_tile": lambda *_, tile=tile: tile}
        yield Variant(f"{kind} down_dgrad", how, patched(backward_plans, patch, lambda call=call: call()[0]))


def few(given: Operands) -> Iterator[Variant]:
    """Decoding: 128 and 2048 assignments to random experts, in segments without padding."""
    e, h, f = given.experts, given.hidden, given.ffn
    w13, w2 = (prepare_weights(w, "fprop")[0] for w in (given.w13, given.w2))
    for copies, base in ((128, plans.product_tile("rows", "fp8", 16, "sm_90", True)),
                         (2048, plans.product_tile("rows", "fp8", 32, "sm_90", True))):  # fmt: skip
        drawn = torch.randint(e, (copies,), generator=torch.Generator().manual_seed(1))
        ends = torch.bincount(drawn, minlength=e).cumsum(0)
        offs = torch.cat([ends.new_zeros(1), ends]).int().to(given.device)
        x, act = (quantize_to_rows(given._normal(copies, width)) for width in (h, f))
        weights, result = given.weights[:copies].contiguous(), given._normal(copies, h)
        tiles = {
            "in use": None,
            "s5": base._replace(stages=5),
            "1 per SM s6": base._replace(per_sm=1, stages=6),
            "1 per SM s8": base._replace(per_sm=1, stages=8),
            "256 columns, 1 per SM s4": base._replace(per_sm=1, n=2 * base.n, warps=8, stages=4),
            "128 rows": plans.product_tile("rows", "fp8", 128, "sm_90", True),
        }
        for how, tile in ({"in use": None} if INTERPRETING else tiles).items():

            def first(tile: Any = tile, x: Any = x, offs: Any = offs, weights: Any = weights) -> torch.Tensor:
                swiglu, half = Activation(), tile and tile.halved()
                found = launch_gate_up(x, w13, offs, None, weights, None, swiglu, False, "mx", False, tile=half)
                return found[0]

            def second(tile: Any = tile, act: Any = act, offs: Any = offs, out: Any = result) -> torch.Tensor:
                launch_rows_product(act, w2, offs, out, None, None, None, False, False, tile=tile)
                return out

            yield Variant(f"gate_up, {copies} rows", how, first)
            yield Variant(f"down, {copies} rows", how, second)


def wgrad(given: Operands) -> Iterator[Variant]:
    """Gradients of weights."""
    for name, left, right in (("wgrad13", given.dpre, given.x), ("wgrad2", given.dy, given.act)):
        for how, values in ({"in use": {}} if INTERPRETING else WGRAD).items():
            call = partial(weight_gradient, left, right, given.offs, aligned=True, filled=given.filled)
            yield Variant(name, how, patched(backward_plans, values, call))


def variants(group: str, given: Operands) -> Iterator[Variant]:
    """Variants of a group."""
    if group in ("fp8", "bf16"):
        return products(given, group == "fp8")
    return {"prepare": prepare, "passes": passes, "few": few, "wgrad": wgrad}[group](given)


# --- measuring --------------------------------------------------------------------------------------------------


def values_of(found: Any, given: Operands) -> torch.Tensor:
    """The compared part of a result: rows in use, or two experts' weights."""
    while isinstance(found, tuple):
        found = [each for each in found if each is not None][-1]
    if isinstance(found, RowScaled):
        found = found.qdata
    found = found[: given.rows][given.in_use] if found.shape[0] == given.rows else found[:2]
    return found.float()


def measure(group: str, given: Operands, iters: int) -> None:
    """Time the variants of a group and print a line per variant."""
    timer = Timer(given.device, 1, 0)
    alive: list[Variant] = []
    apart: dict[Variant, float] = {}
    first: dict[str, torch.Tensor] = {}
    for variant in variants(group, given):
        try:
            found = values_of(variant.call(), given)
        except Exception as error:  # a tile that does not fit is also a result
            print(f"{variant.kernel:34} {variant.how:32} {type(error).__name__}: {str(error)[:90]}", flush=True)
            continue
        base = first.setdefault(variant.kernel, found)
        apart[variant] = ((found - base).abs().max() / base.abs().max()).item()
        alive.append(variant)
    times: dict[Variant, list[float]] = {variant: [] for variant in alive}
    for _ in range(iters):
        for variant in alive:
            times[variant] += timer.times(lambda _, call=variant.call: call(), lambda: None)
    base_us: dict[str, float] = {}
    for variant, found_us in times.items():
        median = statistics.median(found_us)
        ratio = median / base_us.setdefault(variant.kernel, median)
        print(f"{variant.kernel:34} {variant.how:32} {median:9.1f} {ratio:6.3f}   {apart[variant]:.1e}", flush=True)


def warm(groups: Sequence[str], share: int, device: torch.device) -> None:
    """Compile one share of all variants, on little data."""
    given, number = Operands(True, device), 0
    for group in groups:
        for variant in variants(group, given):
            number += 1
            if number % WARMERS == share:
                with contextlib.suppress(Exception):
                    variant.call()


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--group", default=",".join(GROUPS), help=f"comma-separated, of {', '.join(GROUPS)}")
    parser.add_argument("--iters", type=int, default=20, metavar="N")
    parser.add_argument("--warm", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    groups = options.group.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(GROUPS)}")
    device = torch.device("cpu" if INTERPRETING else "cuda")
    if options.warm is not None:
        warm(groups, options.warm, device)
        return
    if not INTERPRETING:
        command = [sys.executable, __file__, "--group", options.group, "--warm"]
        for process in [subprocess.Popen([*command, str(share)]) for share in range(WARMERS)]:
            process.wait()
    given = Operands(INTERPRETING, device)
    for group in groups:
        measure(group, given, 1 if INTERPRETING else options.iters)


if __name__ == "__main__":
    main()
