"""docs/pictures/speed.svg: dispatch, combine and a MoE layer beside NCCL, from stored rows."""

import csv
from pathlib import Path

from canvas import Canvas

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results"
_MODEL = {"nodes": "1", "tokens": "4096", "hidden": "7168", "topk": "8", "routing": "uniform:0"}
_LAYER = {"provider": "triton_ep", "mode": "jit-static-sm20-local-a128"}
_NCCL = {"provider": "nccl", "mode": "torch-exact-a128"}
_MOE = {"provider": "triton_ep", "mode": "jit-static-sm24-local-a128-ffn2048"}
_MOE_NCCL = {"provider": "nccl", "mode": "torch-exact-ffn2048"}
# Heading, file, op and what rows of all bars share; then a bar each: label, colour, the row's own columns.
GROUPS = (
    (
        "dispatch",
        "dispatch_combine.csv",
        {"op": "dispatch", "ranks": "4", "experts": "256"},
        (
            ("NCCL", "other", _NCCL | {"payload": "bf16", "commit": "a7519e2"}),
            ("bf16", "a", _LAYER | {"payload": "bf16", "commit": "a7519e2"}),
            ("MXFP8", "b", _LAYER | {"payload": "mxfp8", "commit": "a7519e2"}),
        ),
    ),
    (
        "combine",
        "dispatch_combine.csv",
        {"op": "combine", "ranks": "4", "experts": "256", "payload": "bf16"},
        (
            ("NCCL", "other", _NCCL | {"commit": "a7519e2"}),
            ("bf16", "a", _LAYER | {"commit": "4278c9a"}),
        ),
    ),
    (
        "MoE layer, forward",
        "moe_layer.csv",
        {"op": "moe_layer_fwd", "ranks": "2", "experts": "128", "commit": "ef3782a"},
        (
            ("NCCL", "other", _MOE_NCCL),
            ("bf16", "a", _MOE | {"payload": "bf16"}),
            ("MXFP8", "b", _MOE | {"payload": "mxfp8"}),
        ),
    ),
    (
        "MoE layer, forward + backward",
        "moe_layer.csv",
        {"op": "moe_layer_step", "ranks": "2", "experts": "128", "commit": "ef3782a"},
        (
            ("NCCL", "other", _MOE_NCCL),
            ("bf16", "a", _MOE | {"payload": "bf16"}),
            ("MXFP8", "b", _MOE | {"payload": "mxfp8"}),
        ),
    ),
)


def median_us(file: str, wanted: dict[str, str]) -> float:
    """Median of the one stored row, or of the last of several, that has the wanted values.

    Raises:
        LookupError: no row has them.
    """
    with (RESULTS / file).open(newline="") as rows:
        found = [row for row in csv.DictReader(rows) if all(row[name] == value for name, value in wanted.items())]
    if not found:
        raise LookupError(f"{file} has no row with {wanted}")
    return float(found[-1]["median_us"])


def draw() -> Canvas:
    """Bars with their values; each group has a scale of its own, that of its NCCL bar."""
    c = Canvas(774, "Time of dispatch, combine and a MoE layer: NCCL, triton_ep in bf16 and in MXFP8")
    c.text(24, 44, "Microseconds, less is better", 28, "ink", bold=True)
    c.text(24, 76, "4096 tokens per GPU, hidden 7168, top-8, H200, one node", 22, "soft")
    c.text(24, 106, "NCCL: grey. triton_ep: bf16 blue, MXFP8 green", 22, "soft")
    y = 148
    for heading, file, shared, bars in GROUPS:
        gpus = shared["ranks"]
        c.text(24, y + 8, heading, 24, "ink", bold=True)
        c.text(696, y + 8, f"{gpus} GPUs, {shared['experts']} experts", 22, "soft", "end")
        y += 22
        times = [median_us(file, _MODEL | shared | own) for _, _, own in bars]
        for (label, colour, _), time in zip(bars, times, strict=True):
            width = 440 * time / max(times)
            c.text(110, y + 25, label, 22, "ink", "end")
            c.box(122, y + 4, width, 30, colour, radius=3)
            c.text(122 + width + 10, y + 27, f"{time:,.0f}", 22, "ink", bold=colour != "other")
            y += 38
        y += 34
    return c
