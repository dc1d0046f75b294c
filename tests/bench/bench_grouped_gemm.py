"""Time of the grouped GEMM and its gradients on one GPU, against torch._grouped_mm.

    python tests/bench/bench_grouped_gemm.py --csv docs/benchmarks/results/grouped_gemm.csv
    python tests/bench/bench_grouped_gemm.py --shape deepseek-v3-up --rows 8,128 --op fprop

Without a GPU it runs in the interpreter, to try it with --shape tiny; its times say nothing about GPUs.
Method and columns: docs/benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from triton_ep.bench import rows as bench_rows
from triton_ep.bench.settings import origin_of_kernels
from triton_ep.bench.timing import Timer, Timing, summarize
from triton_ep.errors import EPError
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops import grouped_gemm as ops
from triton_ep.reference import grouped_gemm as oracle
from triton_ep.runtime.launch import INTERPRETING

SHAPES = {
    "deepseek-v3-up": (32, 4096, 7168),
    "deepseek-v3-down": (32, 7168, 2048),
    "qwen3-235b-up": (16, 3072, 4096),
    "qwen3-235b-down": (16, 4096, 1536),
    "tiny": (2, 64, 96),
}
"""Experts on one GPU of 8, outputs N, terms K."""

PATHS = {
    "fprop": ("bf16", "a-mx", "ab-mx", "fp8"),
    "dgrad": ("bf16", "a-mx"),
    "wgrad": ("bf16", "a-mx"),
}
"""MXFP8 operands that the measured time includes dequantising: none; rows; rows and weights. fp8: scales of weights are
equalised beforehand, scales of rows in the measured time."""

MOST_ROWS_FP8 = 256
SEED = 0


Product = tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class WrongResult(Exception):
    """A result is wrong, so it is not timed."""


@dataclass(frozen=True)
class Case:
    """One product: shape, rows per expert ("128", or "ragged128" for an average), op, provider and path."""

    shape: str
    rows: str
    op: str
    provider: str
    path: str

    def sizes(self) -> list[int]:
        """Rows of each expert; ragged ones are multiples of 16, which torch._grouped_mm needs in wgrad."""
        experts = SHAPES[self.shape][0]
        if not self.rows.startswith("ragged"):
            return [int(self.rows)] * experts
        total = int(self.rows.removeprefix("ragged")) * experts // 16
        shares = torch.rand(experts, generator=torch.Generator().manual_seed(SEED)) ** 2
        shares[0] = 0.0
        bounds = (shares.cumsum(0) / shares.sum() * total).round().long() * 16
        return torch.diff(bounds, prepend=bounds.new_zeros(1)).tolist()

    def row(self, environment: bench_rows.Row, values: dict[str, object]) -> bench_rows.Row:
        """The case as a row; `hidden` is the number of terms K, `tokens` the rows of all experts."""
        experts, n, k = SHAPES[self.shape]
        mode = "torch" if self.provider == "torch" else origin_of_kernels(INTERPRETING)
        columns: dict[str, object] = {"op": f"grouped_gemm_{self.op}", "provider": self.provider}
        columns |= {"mode": f"{mode}-{self.path}-n{n}", "payload": "bf16" if self.path == "bf16" else "mxfp8"}
        columns |= {"nodes": 1, "ranks": 1, "tokens": sum(self.sizes()), "hidden": k, "experts": experts}
        kind = f"ragged:{SEED}" if self.rows.startswith("ragged") else "equal"
        return bench_rows.make_row({**environment, **columns, "routing": kind, **values})


class Operands:
    """Weights of a shape in every form, and rows for them; created once per shape."""

    def __init__(self, shape: str, most_rows: int, device: torch.device) -> None:
        experts, n, k = SHAPES[shape]
        generator = torch.Generator(device).manual_seed(SEED)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

        self.w, self.a, self.dy = normal(experts, n, k), normal(most_rows, k), normal(most_rows, n)
        self.w_mx = MXTensor.to_mx(self.w).transpose(-2, -1)
        self.prepared = ops.equal_scales(self.w_mx)


def product(case: Case, given: Operands, ends: torch.Tensor) -> Product:
    """The call to time, and the values of its two operands; weights are [E, ., .] in the order of the product."""
    num_rows = int(ends[-1])
    a, dy, w = given.a[:num_rows], given.dy[:num_rows], given.w
    w_t = w.transpose(-2, -1)
    if case.provider == "torch":
        torch_mm = torch._grouped_mm
        if case.op == "fprop":
            return lambda: torch_mm(a, w_t, offs=ends), (a, w_t)
        if case.op == "dgrad":
            return lambda: torch_mm(dy, w, offs=ends), (dy, w)
        return lambda: torch_mm(dy.t(), a, offs=ends), (dy, a)
    left = a if case.op == "fprop" else dy
    if case.path != "bf16":
        left_mx = MXTensor.to_mx(left)
        left, values = left_mx, left_mx.dequantize()
    else:
        values = left
    if case.op == "wgrad":
        return lambda: ops.grouped_gemm_wgrad(left, a, ends, len(w)), (values, a)
    if case.op == "dgrad":
        return lambda: ops.grouped_gemm_dgrad(left, w_t, ends), (values, w)
    if case.path == "fp8":
        return lambda: ops.grouped_gemm(left, given.prepared, ends, path="fp8"), (values, given.w_mx.dequantize())
    if case.path == "ab-mx":
        return lambda: ops.grouped_gemm(left, given.w_mx, ends), (values, given.w_mx.dequantize())
    return lambda: ops.grouped_gemm(left, w_t, ends), (values, w_t)


def check(case: Case, out: torch.Tensor, operands: tuple[torch.Tensor, torch.Tensor], ends: torch.Tensor) -> None:
    """Check the first and the last group with rows against float64.

    Raises:
        WrongResult: a group differs.
    """
    left, right = operands
    filled = [(expert, rows) for expert, rows in oracle.groups(ends) if rows.stop > rows.start]
    for expert, rows in {filled[0][0]: filled[0][1], filled[-1][0]: filled[-1][1]}.items():
        if case.op == "wgrad":
            got, exact = out[expert].double(), left[rows].double().T @ right[rows].double()
        else:
            got, exact = out[rows].double(), left[rows].double() @ right[expert].double()
        error = ((got - exact).norm() / exact.norm()).item()
        if not error < 4e-3:  # rounding to bf16 alone gives 1.7e-3
            raise WrongResult(f"{case}: group {expert} is off by {error:.2e} of its norm")


def attempt(case: Case, given: Operands, timer: Timer) -> Timing | str:
    """Check a case, then time it; or return the reason why it cannot run."""
    ends = torch.tensor(case.sizes()).cumsum(0).to(torch.int32).to(timer.device)
    if case.provider == "torch" and INTERPRETING:
        return "torch._grouped_mm is measured on GPUs only"
    if case.path == "fp8" and sum(case.sizes()) > MOST_ROWS_FP8 * len(case.sizes()):
        return f"meant for few rows: at most {MOST_ROWS_FP8} per expert"
    try:
        call, operands = product(case, given, ends)
        check(case, call(), operands, ends)
        del operands
        return summarize([timer.times(lambda _: call(), lambda: None)])
    except (EPError, torch.OutOfMemoryError) as error:
        reason: Exception = error
    except RuntimeError as error:
        if case.provider != "torch":
            raise
        reason = error  # an op that torch does not support is no failure of this package
    return f"{type(reason).__name__}: {' '.join(str(reason).split())[:200]}"


def table(cases: Sequence[Case], results: Sequence[Timing | str]) -> str:
    """Results as text; rates count every product once, and bf16 or fp8 bytes of the weights once."""
    lines = [("shape", "rows", "op", "provider", "path", "median_us", "p20_us", "p80_us", "TFLOP/s", "weights_TB/s")]
    for case, result in zip(cases, results, strict=True):
        name = (case.shape, case.rows, case.op, case.provider, case.path)
        if isinstance(result, str):
            lines.append((*name, "-", "-", "-", "-", result[:60]))
            continue
        _, n, k = SHAPES[case.shape]
        flops = 2 * sum(case.sizes()) * n * k / result.median_us / 1e6
        size = 1 if case.path in ("ab-mx", "fp8") else 2
        rate = sum(s > 0 or case.op == "wgrad" for s in case.sizes()) * n * k * size / result.median_us / 1e6
        times = (f"{t:.1f}" for t in (result.median_us, result.p20_us, result.p80_us))
        lines.append((*name, *times, f"{flops:.1f}", f"{rate:.2f}"))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def run(options: argparse.Namespace) -> None:
    """Measure all cases, shape by shape, and print the results."""
    device = torch.device("cpu" if INTERPRETING else "cuda")
    environment = bench_rows.environment(options.commit, gpus=not INTERPRETING)
    timer = Timer(device, options.iters, options.warmup)
    done: list[Case] = []
    results: list[Timing | str] = []
    for shape in options.shape:
        cases = [
            Case(shape, rows, op, provider, path)
            for rows in options.rows
            for op in options.op
            for provider in options.provider
            for path in (PATHS[op] if provider == "triton_ep" else ("bf16",))
        ]
        given = Operands(shape, max(sum(case.sizes()) for case in cases), device)
        new: list[bench_rows.Row] = []
        for case in cases:
            result = attempt(case, given, timer)
            values: dict[str, object] = {"skip_reason": result}
            if isinstance(result, Timing):
                values = {name: f"{value:.1f}" for name, value in dataclasses.asdict(result).items()}
            new.append(case.row(environment, values))
            done.append(case)
            results.append(result)
        if options.csv:
            bench_rows.append_rows(Path(options.csv), new)
        print(f"{shape}: {len(cases)} cases", file=sys.stderr, flush=True)
    print(table(done, results), flush=True)


def _list(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        values = tuple(text.split(","))
        if unknown := set(values) - set(allowed):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose from {', '.join(allowed)}")
        return values

    return parse


def _rows(text: str) -> tuple[str, ...]:
    for part in text.split(","):
        if not part.removeprefix("ragged").isdigit() or int(part.removeprefix("ragged")) < 1:
            raise argparse.ArgumentTypeError(f"{part!r} is neither a number of rows nor ragged and their mean")
    return tuple(text.split(","))


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    providers = ("triton_ep", "torch")
    shapes = tuple(name for name in SHAPES if name != "tiny")
    parser.add_argument("--shape", type=_list(tuple(SHAPES)), default=("tiny",) if INTERPRETING else shapes)
    parser.add_argument(
        "--rows", type=_rows, default="8,64,128,256,1024,ragged256", metavar="N,raggedN,..", help="per expert"
    )
    parser.add_argument("--op", type=_list(tuple(PATHS)), default=tuple(PATHS))
    parser.add_argument("--provider", type=_list(providers), default=providers)
    parser.add_argument("--iters", type=int, default=20, metavar="N")
    parser.add_argument("--warmup", type=int, default=5, metavar="N")
    parser.add_argument("--csv", metavar="PATH", help="append rows to this file")
    parser.add_argument("--commit", help="commit of this checkout (default: from git)")
    options = parser.parse_args(argv)
    if options.iters < 1 or options.warmup < 0:
        parser.error("--iters must be at least 1, --warmup at least 0")
    options.commit = options.commit or bench_rows.commit_of_checkout()
    if not options.commit:
        parser.error("no git here: name the commit with --commit")
    run(options)


if __name__ == "__main__":
    main()
