"""Rows as tables for people, in units that suit the numbers, no wider than the terminal.

Values that all rows share stand once, above the table. Rows of interpreted kernels are not compared with links or other
providers: their times say nothing about GPUs.
"""

from __future__ import annotations

import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence

from triton_ep.bench.rows import Row
from triton_ep.bench.timing import Stage

CPU_NOTE = (
    "CPU ranks: kernels are interpreted. The rows show that all runs and is right; their times say nothing about GPUs."
)
_SHAPE = ("op", "payload", "nodes", "ranks", "tokens", "hidden", "topk", "experts", "routing")
_NAMES = ("op", "provider", "mode")
_SIZES = ("payload", "nodes", "ranks", "tokens", "hidden", "topk", "experts")
_HEADS = {
    "median_us": "median",
    "kernel_us": "kernels",
    "host_us": "host",
    "floor_us": "link bound",
    "floor_ratio": "x bound",
    "p20_us": "p20",
    "p80_us": "p80",
    "skew_pct": "skew %",
    "gbps": "GB/s",
    "peak_mib": "peak MiB",
    "error_db": "error dB",
    "skip_reason": "skipped",
}
_OF_LINKS = ("floor_us", "floor_ratio", "gbps")
_LEAST_WANTED = ("host_us", "skew_pct", "p20_us", "p80_us", "peak_mib", "kernel_us", "gbps", "floor_us", *_SIZES)
"""Columns in the order in which a narrow terminal drops them."""


_UNEQUAL = {
    "unpermuted": "leaves rows by source rank, one per token and rank",
    "slabs": "leaves rows in slabs with room for all tokens",
    "quantised-before": "gets rows that are quantised already",
    "fp8": "has one scale per 128 values",
}
"""By part of a mode: how the work of another provider differs from the layer's."""


def interpreted(rows: Sequence[Row]) -> bool:
    """Whether these rows come from CPU ranks."""
    return any(row["gpu"] == "cpu" for row in rows)


def time_text(us: float) -> str:
    """A time in a suitable unit: "585.1 us", "3.397 ms", "1.203 s"."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.4g} {unit}"
    return f"{us:.4g} us"


def terminal_width() -> int | None:
    """Characters in a line of the terminal; None: standard output is no terminal, so any width fits."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def columns(lines: Sequence[Sequence[str]], left: int) -> list[str]:
    """Cells as lines of text; the first `left` columns and the last word of a line are aligned left, numbers right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = []
    for line in lines:
        cells = zip(line, widths, strict=True)
        text.append("  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(cells)).rstrip())
    return text


def _cell(name: str, value: str) -> str:
    return time_text(float(value)) if name.endswith("_us") and value else value


def table(rows: Sequence[Row], width: int | None = None) -> str:
    """The rows as text, with shared values above the table and without empty columns.

    width: characters of a line; the least important columns are dropped, and named, until lines fit. None: any width.
    """
    on_cpu = interpreted(rows)
    if on_cpu:
        rows = [row for row in rows if row["op"] != "floor"]
    if not rows:
        return "no rows"
    measured = [row for row in rows if row["op"] != "floor"] or rows
    shared = {name: measured[0][name] for name in _SIZES if len({row[name] for row in measured}) == 1}
    names = [
        name
        for name in (*_NAMES, *_SIZES, *_HEADS)
        if name not in shared and not (on_cpu and name in _OF_LINKS) and any(row[name] for row in rows)
    ]
    gone: list[str] = []
    while True:
        lines = [[_HEADS.get(name, name) for name in names], *([_cell(n, row[n]) for n in names] for row in rows)]
        text = columns(lines, len(_NAMES))
        spare = next((name for name in _LEAST_WANTED if name in names), None)
        if width is None or spare is None or max(map(len, text)) <= width:
            break
        names.remove(spare)
        gone.append(_HEADS.get(spare, spare))
    title = ", ".join(f"{name} {value}" for name, value in shared.items() if value)
    note = [f"Left out for want of width: {', '.join(gone)}; --csv and --json have them."] if gone else []
    return "\n".join([*([title] if title else []), *text, *note])


def compared(rows: Sequence[Row]) -> list[str]:
    """A line per op, payload and shape on GPUs: the layer's best time against the best of each other provider."""
    if interpreted(rows):
        return []
    best: dict[tuple[str, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row["median_us"] and row["op"] != "floor":
            of_shape = best[tuple(row[name] for name in _SHAPE)]
            known = of_shape.get(row["provider"], row)
            of_shape[row["provider"]] = min(known, row, key=lambda row: float(row["median_us"]))
    lines = []
    for found in best.values():
        ours = found.pop("triton_ep", None)
        if ours is None or not found:
            continue
        time = float(ours["median_us"])
        others = ", ".join(f"{float(r['median_us']) / time:.2f} x that of {p}" for p, r in sorted(found.items()))
        shape = f"{ours['tokens']} tokens, hidden {ours['hidden']}, top-{ours['topk']} of {ours['experts']}"
        what = ours["op"] if ours["op"] == "barrier" else f"{ours['op']} {ours['payload']}, {shape}"
        pairs = [(provider, row["mode"]) for provider, row in sorted(found.items())]
        unequal = [f"{who} {text}" for who, mode in pairs for word, text in _UNEQUAL.items() if word in mode]
        note = f"; not the same work: {', '.join(unequal)}" if unequal else ""
        lines.append(f"{what}: {time_text(time)} ({ours['mode']}); speed is {others}{note}")
    return lines


def added(rows: Sequence[Row]) -> list[str]:
    """Time that each exchange on GPUs adds to the products that it overlaps."""
    if interpreted(rows):
        return []
    return [
        f"{row['op'].removesuffix('_beside')} of {row['provider']} ({row['mode']}, {row['payload']}) adds "
        f"{time_text(float(row['median_us']) - float(row['floor_us']))} to products that take "
        f"{time_text(float(row['floor_us']))} alone"
        for row in rows
        if row["op"].endswith("_beside") and row["median_us"]
    ]


def moe_table(rows: Sequence[Row]) -> list[str]:
    """Rows of MoE layers as text: time, memory, error; on GPUs also ratios to collectives and products alone."""
    measured = [row for row in rows if row["op"].startswith("moe_layer") and row["median_us"]]
    if not measured:
        return []
    names = ("nccl", "gloo"), ("gemm-only",)
    base = {
        (*(row[name] for name in _SHAPE if name != "payload"), _ffn_of(row), column): float(row["median_us"])
        for row in measured
        for column, providers in enumerate(names)
        if row["provider"] in providers
    }
    on_cpu = interpreted(measured)
    if any(row["op"] == "moe_layer_decode" for row in measured):
        return _decode_table(measured, on_cpu)
    ratios = [] if on_cpu else ["x nccl", "x gemm-only"]
    lines = [["op", "provider", "mode", "payload", "time", *ratios, "peak MiB", "error dB"]]
    for row in measured:
        key = (row["op"].removesuffix("_refresh"), *(row[name] for name in _SHAPE[2:]), _ffn_of(row))
        us = float(row["median_us"])
        cells = [row[name] for name in ("op", "provider", "mode", "payload")]
        over = [f"{us / base[*key, column]:.3f}" if (*key, column) in base else "" for column in range(len(ratios))]
        lines.append([*cells, time_text(us), *over, row["peak_mib"], row["error_db"]])
    shapes = dict.fromkeys(
        tuple(row[name] for name in ("tokens", "hidden", "topk", "experts", "ranks")) for row in measured
    )
    title = "; ".join(f"{t} tokens per rank, hidden {h}, top-{k} of {e}, {w} ranks" for t, h, k, e, w in shapes)
    return ["", f"MoE layer, {title}:", *columns(lines, 4)]


def _decode_table(rows: Sequence[Row], on_cpu: bool) -> list[str]:
    """Rows of decoding layers; on GPUs with ratios to the bf16 layer, the collectives and the bound."""
    times = {(row["provider"], row["payload"], row["tokens"], row["hidden"]): float(row["median_us"]) for row in rows}
    ratios = [] if on_cpu else ["x bf16", "x nccl", "x bound"]
    lines = [["provider", "mode", "payload", "tokens", "time", *ratios, "error dB"]]
    for row in rows:
        us, sizes = float(row["median_us"]), (row["tokens"], row["hidden"])
        base = times.get((row["provider"], "bf16", *sizes)), times.get(("nccl", "bf16", *sizes))
        over = [f"{us / each:.3f}" if each else "" for each in base]
        cells = [row[name] for name in ("provider", "mode", "payload", "tokens")]
        lines.append([*cells, time_text(us), *([] if on_cpu else [*over, row["floor_ratio"]]), row["error_db"]])
    first = rows[0]
    title = ", ".join(f"{name} {first[name]}" for name in ("hidden", "topk", "experts", "ranks"))
    note = "bound: the pair of dispatch and combine, and the weights of experts with rows at 4 TB/s"
    return ["", f"Decoding MoE layer, {title} ({note}):", *columns(lines, 3)]


def _ffn_of(row: Row) -> str:
    """The part of a MoE layer's mode that names the width of its experts."""
    return next((part for part in row["mode"].split("-") if part.startswith("ffn")), "")


def stage_table(stages: Sequence[Stage]) -> str:
    """Kernels of a call with their times, and the sum."""
    width = max(len(stage.name[:60]) for stage in stages)
    lines = [
        f"  {s.name[:60]:{width}}  {s.per_call:6.2f} x {time_text(s.median_us):>8} = {time_text(s.us):>8}"
        for s in stages
    ]
    return "\n".join([*lines, f"  {'sum':{width}}  {'':6}   {'':8}   {time_text(sum(s.us for s in stages)):>8}"])
