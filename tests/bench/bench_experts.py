"""Time and error of the experts' kernels on one GPU, forward and backward, against torch's products.

    python tests/bench/bench_experts.py --csv docs/benchmarks/results/experts.csv
    python tests/bench/bench_experts.py --part forward --rows ragged512
    python tests/bench/bench_experts.py --part errors       # also without a GPU: roundings of operands only

Parts: "forward" (gate and up with the activation, down, and the torch products and passes they replace), "backward",
"passes" (row scales, prepared weights, the tile table), "few" (few rows per expert), "errors" (four kinds of data).
Without a GPU it runs in the interpreter, to try it with --shape tiny; its times say nothing about GPUs.
Columns: docs/benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from triton_ep.bench import rows as bench_rows
from triton_ep.bench.settings import origin_of_kernels
from triton_ep.bench.timing import Timer, Timing, summarize
from triton_ep.errors import EPError
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops.experts import gate_up, rows_product
from triton_ep.ops.grouped_gemm import grouped_gemm
from triton_ep.ops.prepare import prepare_weights
from triton_ep.ops.row_scales import RowScaled, dequantize_rows_in_use, quantize_to_rows, rebase_rows
from triton_ep.ops.tiles import tile_table
from triton_ep.runtime.launch import INTERPRETING

SHAPES = {
    "deepseek-v3-4": (64, 7168, 2048),
    "deepseek-v3-8": (32, 7168, 2048),
    "qwen3-235b-8": (16, 4096, 1536),
    "tiny": (3, 128, 64),
}
"""Experts on one GPU of 4 or 8, H, F."""
FEW = {"deepseek-v3-8": (32, 4096, 7168), "tiny": (3, 64, 128)}
"""Experts, N, K of the products with few rows."""
PARTS = ("forward", "backward", "passes", "few", "errors")
KINDS = ("normal", "outlier channels", "shifted", "one sign")
SEED = 0
_ROUNDS = 3
"""How often the implementations of a result take turns."""

Operand = torch.Tensor | RowScaled


class WrongResult(Exception):
    """A result is wrong, so it is not timed."""


@dataclass(frozen=True)
class Case:
    """One call to time.

    Attributes:
        part: part of the table. what: the result computed. how: implementation and arithmetic.
        call: the timed call; the first of its results is checked.
        exact: rows of the result and their exact values, in float64; None: nothing is checked.
        flops: operations of one call; 0: negligible.
        limit: largest error, as a share of the norm.
    """

    part: str
    what: str
    how: str
    call: Callable[[], Any]
    exact: Callable[[Any], Iterator[tuple[torch.Tensor, torch.Tensor]]] | None = None
    flops: int = 0
    limit: float = 4e-3  # rounding to bf16 alone gives 1.7e-3


Measured = tuple[Case, Timing | str, float | None]
"""A case, its time or the reason why it cannot run, and its error."""


# --- operands -------------------------------------------------------------------------------------------------


def sizes_of(text: str, experts: int) -> list[int]:
    """Rows of each expert: "512": that many each; "ragged512": that many on average, in multiples of 128, none for the
    first expert; "odd512": the same with any numbers."""
    mean = int(text.removeprefix("ragged").removeprefix("odd"))
    if text[0].isdigit():
        return [mean] * experts
    step = 128 if text.startswith("ragged") else 1
    shares = torch.rand(experts, generator=torch.Generator().manual_seed(SEED)) ** 2
    shares[0] = 0.0
    bounds = (shares.cumsum(0) / shares.sum() * (mean * experts / step)).round().long() * step
    return torch.diff(bounds, prepend=bounds.new_zeros(1)).tolist()


def offsets(sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """[E + 1] int32."""
    return torch.tensor([0, *sizes]).cumsum(0).int().to(device)


def some_segments(offs: torch.Tensor, most: int = 256) -> Iterator[tuple[int, slice]]:
    """(expert, rows) of the first and the last segment with rows, at most `most` rows each."""
    bounds = offs.tolist()
    filled = [(e, slice(a, min(b, a + most))) for e, (a, b) in enumerate(pairwise(bounds)) if b > a]
    yield filled[0]
    yield filled[-1]


def values(x: Any) -> torch.Tensor:
    """Float64 values of an operand or of a part of it."""
    if isinstance(x, RowScaled):
        return x.qdata.double() * x.scale.double().unsqueeze(-1)
    return x.double()


def part_of(x: Operand, which: Any) -> torch.Tensor:
    """Float64 values of selected rows, or of an expert's matrix."""
    return values(
        RowScaled(x.qdata[which].contiguous(), x.scale[which].contiguous()) if isinstance(x, RowScaled) else x[which]
    )


def matrix_of(w: Operand, expert: int) -> torch.Tensor:
    """[N, K] float64."""
    return part_of(w, slice(expert, expert + 1)).squeeze(0)


def product_of(a: Operand, w: Operand, offs: torch.Tensor) -> Any:
    """`Case.exact` for rows times weights."""

    def exact(out: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for expert, rows in some_segments(offs):
            yield out[rows].double(), part_of(a, rows) @ matrix_of(w, expert).T

    return exact


def act_of(x: Operand, w13: Operand, offs: torch.Tensor, weights: torch.Tensor | None) -> Any:
    """`Case.exact` for the activation."""

    def exact(out: Operand) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for expert, rows in some_segments(offs):
            g, u = (part_of(x, rows) @ matrix_of(w13, expert).T).chunk(2, 1)
            value = torch.nn.functional.silu(g) * u
            yield part_of(out, rows), value if weights is None else value * weights[rows, None].double()

    return exact


class Operands:
    """Weights of a shape, and rows for them."""

    def __init__(self, shape: str, sizes: Sequence[int], device: torch.device) -> None:
        self.experts, self.hidden, self.ffn = SHAPES[shape]
        e, h, f, rows = self.experts, self.hidden, self.ffn, sum(sizes)
        self.generator = torch.Generator(device).manual_seed(SEED)
        self.device, self.num_rows = device, rows
        self.offs = offsets(sizes, device)
        self.tiles = tile_table(self.offs, rows)
        self.aligned = all(size % 128 == 0 for size in sizes)
        self.w13, self.w2 = self.normal(e, 2 * f, h, scale=h**-0.5), self.normal(e, h, f, scale=f**-0.5)
        self.x, self.dy = self.normal(rows, h), self.normal(rows, h)
        self.weights = torch.rand(rows, generator=self.generator, device=device) + 0.5
        self.flops = 2 * rows * f * h  # of one product of rows, F and H

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normally distributed bf16 values."""
        made = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return made.normal_(0, scale, generator=self.generator)


# --- cases ------------------------------------------------------------------------------------------------------


def forward(given: Operands) -> Iterator[Case]:
    """Forward products: gate and up, down."""
    offs, f, flops, rows = given.offs, given.ffn, given.flops, given.num_rows
    torch_mm, silu = torch._grouped_mm, torch.nn.functional.silu
    ends, w1, w3 = offs[1:], given.w13[:, :f].transpose(1, 2), given.w13[:, f:].transpose(1, 2)
    plain, weighted = (act_of(given.x, given.w13, offs, weights) for weights in (None, given.weights))
    yield Case(
        "forward", "gate_up", "torch bf16: 2 products, silu * up",
        lambda: silu(torch_mm(given.x, w1, offs=ends)) * torch_mm(given.x, w3, offs=ends), plain, 2 * flops, 6e-3,
    )  # fmt: skip
    common: dict[str, Any] = {"row_weights": given.weights, "tiles": given.tiles}
    for name, pre in (("bf16", False), ("bf16, pre kept", True)):
        yield Case(
            "forward", "gate_up", name,
            lambda pre=pre: gate_up(given.x, given.w13, offs, keep_pre=pre, **common)[0], weighted, 2 * flops,
        )  # fmt: skip
    x, (w13, _), (w2, _) = quantize_to_rows(given.x), *(prepare_weights(w, "fprop") for w in (given.w13, given.w2))
    assert w13 is not None and w2 is not None
    quantised = act_of(x, w13, offs, given.weights)
    for fast in (False, True):
        kind = "fp8 fast" if fast else "fp8"
        for name, act, pre in (("bf16 out", "bf16", False), ("mx out", "mx", False), ("mx out, pre kept", "mx", True)):
            yield Case(
                "forward", "gate_up", f"{kind}, {name}",
                lambda fast=fast, act=act, pre=pre: gate_up(
                    x, w13, offs, act=act, keep_pre=pre, fast=fast, **common
                )[0],
                quantised, 2 * flops, 4e-2 if act == "mx" else 6e-3,
            )  # fmt: skip
    a = given.normal(rows, f)
    yield Case(
        "forward", "down", "torch bf16", lambda: torch_mm(a, given.w2.transpose(1, 2), offs=ends),
        product_of(a, given.w2, offs), flops,
    )  # fmt: skip
    a8 = quantize_to_rows(a)
    yield from rows_products("forward", "down", given, (a, given.w2), (a8, w2))


def rows_products(part: str, what: str, given: Operands, bf16: Any, fp8: Any) -> Iterator[Case]:
    """This package's products of rows with weights, in every arithmetic."""
    offs = given.offs
    flops = 2 * given.num_rows * bf16[1].shape[1] * bf16[1].shape[2]
    for how, (a, w), fast in (("bf16", bf16, False), ("fp8", fp8, False), ("fp8 fast", fp8, True)):
        yield Case(
            part, what, how,
            lambda a=a, w=w, fast=fast: rows_product(
                a, w, offs, fast=fast, tiles=given.tiles, aligned=given.aligned
            ),
            product_of(a, w, offs), flops, 6e-3 if fast else 4e-3,
        )  # fmt: skip


def backward(given: Operands) -> Iterator[Case]:
    """Gradients of rows and of weights."""
    from triton_ep.ops.experts_backward import down_dgrad, weight_gradient
    from triton_ep.ops.weighted_rows import weighted_rows_backward

    offs, f, h, flops, rows = given.offs, given.ffn, given.hidden, given.flops, given.num_rows
    torch_mm, ends = torch._grouped_mm, offs[1:]
    pre, dpre = given.normal(rows, 2 * f), given.normal(rows, 2 * f)
    (_, w13), (_, w2) = (prepare_weights(w, "dgrad") for w in (given.w13, given.w2))
    assert w13 is not None and w2 is not None
    yield Case(
        "backward", "dx", "torch bf16", lambda: torch_mm(dpre, given.w13, offs=ends),
        product_of(dpre, given.w13.transpose(1, 2), offs), 2 * flops,
    )  # fmt: skip
    dpre8, dy8 = quantize_to_rows(dpre), quantize_to_rows(given.dy)
    yield from rows_products("backward", "dx", given, (dpre, given.w13.transpose(1, 2)), (dpre8, w13))

    def torch_down_dgrad() -> torch.Tensor:
        g, u = pre.chunk(2, 1)
        da = torch_mm(given.dy, given.w2, offs=ends)
        sigmoid = g.sigmoid()
        return torch.cat([da * u * sigmoid * (1 + g * (1 - sigmoid)), da * g * sigmoid], 1)

    yield Case("backward", "down_dgrad", "torch bf16: product, eager gradient", torch_down_dgrad, None, flops)
    for how, dy, w, fast in (
        ("bf16", given.dy, given.w2, False),
        ("fp8", dy8, w2, False),
        ("fp8 fast", dy8, w2, True),
    ):
        yield Case(
            "backward", "down_dgrad", how,
            lambda dy=dy, w=w, fast=fast: down_dgrad(
                dy, w, pre, offs, row_weights=given.weights, tiles=given.tiles, fast=fast
            ),
            None, flops,
        )  # fmt: skip
    a = given.normal(rows, f)
    for what, left, right in (("wgrad13", dpre, given.x), ("wgrad2", given.dy, a)):
        size = 2 * rows * left.shape[1] * right.shape[1]

        def exact(
            out: torch.Tensor, left: torch.Tensor = left, right: torch.Tensor = right
        ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for expert, which in some_segments(offs, rows):
                yield out[expert].double(), left[which].double().T @ right[which].double()

        yield Case(
            "backward", what, "torch bf16",
            lambda left=left, right=right: torch_mm(left.t(), right, offs=ends), exact, size,
        )  # fmt: skip
        yield Case(
            "backward", what, "bf16",
            lambda left=left, right=right: weight_gradient(left, right, offs, aligned=given.aligned), exact, size,
        )  # fmt: skip
        main = torch.zeros(given.experts, left.shape[1], right.shape[1], device=given.device)
        yield Case(
            "backward", what, "bf16, added to fp32",
            lambda left=left, right=right, main=main: weight_gradient(
                left, right, offs, out=main, accumulate=True, aligned=given.aligned
            ),
            None, size,
        )  # fmt: skip
        del main
    y = given.normal(rows, h)
    yield Case(
        "backward", "weighted_rows_backward", "bf16",
        lambda: weighted_rows_backward(given.dy, y, given.weights, offs)[0],
        lambda out: ((out[r].double(), given.dy[r].double() * given.weights[r, None].double())
                     for _, r in some_segments(offs)),
    )  # fmt: skip


def passes(given: Operands) -> Iterator[Case]:
    """Passes between the products, and before the first one."""
    offs, mx = given.offs, MXTensor.to_mx(given.x)
    rows = quantize_to_rows(given.x, offs)
    yield Case("passes", "tile_table", "", lambda: tile_table(offs, given.num_rows))
    yield Case("passes", "quantize_to_rows", "[R, H]", lambda: quantize_to_rows(given.x, offs))
    yield Case("passes", "rebase_rows", "[R, H]", lambda: rebase_rows(mx.qdata, mx.scale, offs))
    yield Case("passes", "dequantize_rows_in_use", "[R, H]", lambda: dequantize_rows_in_use(rows, offs))
    for uses in ("fprop", "dgrad", "both"):
        kept = prepare_weights(given.w13, uses)
        yield Case(
            "passes", "prepare_weights", f"w13, {uses}, up to date",
            lambda uses=uses, kept=kept: prepare_weights(given.w13, uses, out=kept),
        )  # fmt: skip


def few(shape: str, rows_per_expert: int, device: torch.device) -> Iterator[Case]:
    """Few rows per expert: products with N columns and K terms, and gate and up."""
    experts, n, k = FEW[shape]
    generator = torch.Generator(device).manual_seed(SEED)
    rows = rows_per_expert * experts
    x = torch.empty(rows, k, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    w = torch.empty(experts, n, k, dtype=torch.bfloat16, device=device).normal_(0, k**-0.5, generator=generator)
    offs = offsets([rows_per_expert] * experts, device)
    w_t, mx, x8, (w8, _) = w.transpose(1, 2), MXTensor.to_mx(x), quantize_to_rows(x), prepare_weights(w, "fprop")
    assert w8 is not None
    exact, exact8, flops = product_of(x, w, offs), product_of(x8, w8, offs), 2 * rows * n * k
    torch_mm, silu, half = torch._grouped_mm, torch.nn.functional.silu, n // 2
    what = f"product, {rows_per_expert} rows"
    yield Case("few", what, "torch bf16", lambda: torch_mm(x, w_t, offs=offs[1:]), exact, flops)
    yield Case("few", what, "bf16", lambda: rows_product(x, w, offs), exact, flops)
    yield Case("few", what, "fp8", lambda: rows_product(x8, w8, offs), exact8, flops)
    yield Case("few", what, "fp8, rows of MXTensor", lambda: grouped_gemm(mx, w8, offs), exact8, flops)
    what = f"gate_up, {rows_per_expert} rows"
    act, act8 = act_of(x, w, offs, None), act_of(x8, w8, offs, None)
    first, second = w_t[:, :, :half], w_t[:, :, half:]
    yield Case(
        "few", what, "torch bf16: 2 products, silu * up",
        lambda: silu(torch_mm(x, first, offs=offs[1:])) * torch_mm(x, second, offs=offs[1:]), act, flops, 6e-3,
    )  # fmt: skip
    yield Case("few", what, "bf16", lambda: gate_up(x, w, offs)[0], act, flops)
    yield Case("few", what, "fp8, bf16 out", lambda: gate_up(x8, w8, offs)[0], act8, flops, 6e-3)


# --- errors of four kinds of data ---------------------------------------------------------------------------------


def data(kind: str, rows: int, n: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [R, K] and weights [1, N, K]: normal; one channel in 256 fifty times as large; both shifted by half a
    standard deviation; magnitudes."""
    generator = torch.Generator().manual_seed(SEED)
    x, w = torch.randn(rows, k, generator=generator), torch.randn(1, n, k, generator=generator) * k**-0.5
    if kind == "outlier channels":
        x[:, torch.randperm(k, generator=generator)[: max(k // 256, 1)]] *= 50
    elif kind == "shifted":
        x, w = x + 0.5, w + 0.5 * k**-0.5
    elif kind == "one sign":
        x, w = x.abs(), w.abs()
    return x.bfloat16().to(device), w.bfloat16().to(device)


def relative(out: torch.Tensor, exact: torch.Tensor) -> float:
    """Error as a share of the norm."""
    return ((out.double() - exact).norm() / exact.norm()).item()


def error_table(rows: int, n: int, k: int, device: torch.device) -> str:
    """Errors of the products of one expert, as lines of a table."""
    lines = [("data", "MXFP8 itself", "row scales", "exact", "default", "fast", "bf16")]
    offs = offsets([rows], device)
    for kind in KINDS:
        x, w = data(kind, rows, n, k, device)
        truth = x.double() @ w[0].double().T
        mx_x, mx_w = (MXTensor.to_mx(each).dequantize(torch.bfloat16) for each in (x, w))
        of_mx = mx_x.double() @ mx_w[0].double().T
        (w8, _), x8 = prepare_weights(w, "fprop"), quantize_to_rows(x)
        assert w8 is not None
        outs = [
            rows_product(mx_x, mx_w, offs),
            rows_product(x8, w8, offs),
            rows_product(x8, w8, offs, fast=True),
        ]
        of_bf16 = relative(rows_product(x, w, offs), truth)
        moved = relative(values(x8) @ values(w8)[0].T, of_mx)
        shown = (relative(of_mx, truth), moved, *(relative(out, of_mx) for out in outs), of_bf16)
        lines.append((kind, *(f"{error:.2e}" for error in shown)))
    return _columns(lines)


# --- measuring ------------------------------------------------------------------------------------------------------


def check(case: Case) -> tuple[str | None, float | None]:
    """Run a case once. Returns the reason why it cannot run, or None; and the error of its result.

    Raises:
        WrongResult: the result is wrong.
    """
    if case.how.startswith("torch") and INTERPRETING:
        return "torch._grouped_mm is measured on GPUs only", None
    try:
        error = None
        result = case.call()
        if case.exact is not None:
            error = max(relative(got, exact) for got, exact in case.exact(result))
            if not error < case.limit:
                raise WrongResult(
                    f"{case.what}, {case.how}: off by {error:.2e} of the norm, {case.limit:.0e} is allowed"
                )
        return None, error
    except (EPError, torch.OutOfMemoryError) as failure:
        reason: Exception = failure
    except RuntimeError as failure:
        if not case.how.startswith("torch"):
            raise
        reason = failure  # an op that torch does not support is no failure of this package
    return f"{type(reason).__name__}: {' '.join(str(reason).split())[:200]}", None


def measure(cases: Sequence[Case], device: torch.device, iters: int, warmup: int) -> list[Measured]:
    """Check cases of one result, then time them in `_ROUNDS` rounds, each with a burst of every case.

    A GPU at its power limit changes its clocks within milliseconds: a burst of calls has the clocks that its kernel
    leads to, which a single call after another kernel has not; rounds spread slower changes over all cases. A burst
    is `warmup` calls that are not counted, then a share of `iters` calls.

    Raises:
        WrongResult: a result is wrong.
    """
    checked = [check(case) for case in cases]
    timer = Timer(device, -(-iters // _ROUNDS), warmup)
    times: list[list[float]] = [[] for _ in cases]
    for _ in range(min(_ROUNDS, iters)):
        for case, (reason, _), found in zip(cases, checked, times, strict=True):
            if reason is None:
                found += timer.times(lambda _, case=case: case.call(), lambda: None)
    return [
        (case, summarize([found]) if reason is None else reason, error)
        for case, (reason, error), found in zip(cases, checked, times, strict=True)
    ]


def row(
    case: Case, shape: str, segments: str, sizes: tuple[int, int, int], environment: Any, result: Timing | str
) -> Any:
    """A row of the table of results. sizes: rows, terms, experts."""
    mode = "torch" if case.how.startswith("torch") else origin_of_kernels(INTERPRETING)
    how = case.how.partition(":")[0].replace("torch ", "").replace(", ", "-").replace(" ", "-") or "all"
    given: dict[str, object] = {"skip_reason": result}
    if isinstance(result, Timing):
        given = {name: f"{value:.1f}" for name, value in dataclasses.asdict(result).items()}
    columns: dict[str, object] = {
        "op": f"experts_{case.what.partition(',')[0]}",
        "provider": "torch" if mode == "torch" else "triton_ep",
        "mode": f"{mode}-{how}-{shape}",
        "payload": "mxfp8" if "fp8" in case.how else "bf16",
        "nodes": 1,
        "ranks": 1,
        "tokens": sizes[0],
        "hidden": sizes[1],
        "experts": sizes[2],
        "routing": segments,
    }
    return bench_rows.make_row({**environment, **columns, **given})


def _columns(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def table(done: Sequence[tuple[str, Case, Timing | str, float | None]]) -> str:
    """Results as text; ratios are to the torch line of the same result."""
    lines = [("rows", "what", "how", "median_us", "p80_us", "TFLOP/s", "of torch", "error")]
    torch_us = {
        (segments, case.what): result.median_us
        for segments, case, result, _ in done
        if case.how.startswith("torch") and isinstance(result, Timing)
    }
    for segments, case, result, error in done:
        name = (segments, case.what, case.how)
        if isinstance(result, str):
            lines.append((*name, "-", "-", "-", "-", result[:50]))
            continue
        rate = f"{case.flops / result.median_us / 1e6:.0f}" if case.flops else "-"
        base = torch_us.get((segments, case.what))
        ratio = f"{result.median_us / base:.2f}" if base else "-"
        shown = "-" if error is None else f"{error:.2e}"
        lines.append((*name, f"{result.median_us:.1f}", f"{result.p80_us:.1f}", rate, ratio, shown))
    return _columns(lines)


def run(options: argparse.Namespace) -> None:
    """Measure all cases, shape by shape, and print the results."""
    device = torch.device("cpu" if INTERPRETING else "cuda")
    environment = bench_rows.environment(options.commit, gpus=not INTERPRETING)
    done: list[tuple[str, Case, Timing | str, float | None]] = []
    new: list[bench_rows.Row] = []

    def take(cases: Iterator[Case], shape: str, segments: str, sizes: tuple[int, int, int]) -> None:
        for _, of_one in groupby(cases, key=lambda case: case.what):
            for case, result, error in measure(list(of_one), device, options.iters, options.warmup):
                done.append((segments, case, result, error))
                new.append(row(case, shape, segments, sizes, environment, result))

    for shape in options.shape:
        for segments in options.rows:
            sizes = sizes_of(segments, SHAPES[shape][0])
            of_rows = [part for part in (forward, backward, passes) if part.__name__ in options.part]
            if of_rows:
                given = Operands(shape, sizes, device)
                for make in of_rows:
                    take(make(given), shape, segments, (sum(sizes), given.hidden, given.experts))
                del given
        if "few" in options.part and shape in FEW:
            experts, _, k = FEW[shape]
            for rows in (3,) if shape == "tiny" else (8, 128, 256):
                take(few(shape, rows, device), shape, str(rows), (rows * experts, k, experts))
        print(f"{shape}: {len(done)} cases so far", file=sys.stderr, flush=True)
    if options.csv:
        bench_rows.append_rows(Path(options.csv), new)
    if done:
        print(table(done), flush=True)
    if "errors" in options.part:
        print("\nerror of a product, as a share of its norm. MXFP8 itself and bf16: of the product of what is given;")
        print("the others: of the exact product of their MXFP8; row scales: what the moved elements alone make of it")
        print(error_table(128, 128, options.terms, device), flush=True)


def _list(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        if unknown := set(chosen) - set(allowed):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose from {', '.join(allowed)}")
        return chosen

    return parse


def _rows(text: str) -> tuple[str, ...]:
    for part in text.split(","):
        number = part.removeprefix("ragged").removeprefix("odd")
        if not number.isdigit() or int(number) < 1:
            raise argparse.ArgumentTypeError(f"{part!r} is neither a number of rows nor ragged or odd and their mean")
    return tuple(text.split(","))


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    shapes = ("tiny",) if INTERPRETING else ("deepseek-v3-8",)
    parser.add_argument("--shape", type=_list(tuple(SHAPES)), default=shapes)
    rows = ("ragged128",) if INTERPRETING else ("1024", "ragged1024")
    parser.add_argument("--rows", type=_rows, default=rows, metavar="N,raggedN,oddN,..", help="per expert")
    parser.add_argument("--part", type=_list(PARTS), default=PARTS)
    parser.add_argument("--terms", type=int, default=7168, metavar="K", help="terms of the products of part errors")
    parser.add_argument("--iters", type=int, default=10, metavar="N")
    parser.add_argument("--warmup", type=int, default=3, metavar="N")
    parser.add_argument("--csv", metavar="PATH", help="append rows to this file")
    parser.add_argument("--commit", help="commit of this checkout (default: from git)")
    options = parser.parse_args(argv)
    if options.iters < 1 or options.warmup < 0:
        parser.error("--iters must be at least 1, --warmup at least 0")
    if options.terms < 32 or options.terms % 32:
        parser.error("--terms must be a multiple of 32")
    options.commit = options.commit or bench_rows.commit_of_checkout()
    if not options.commit:
        parser.error("no git here: name the commit with --commit")
    run(options)


if __name__ == "__main__":
    main()
