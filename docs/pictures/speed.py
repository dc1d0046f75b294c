"""docs/pictures/speed.svg: a MoE layer of four models, and decoding, against NCCL; exchange.svg: dispatch and combine.

Every time is a stored row.
"""

import csv
from pathlib import Path

from canvas import Canvas

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results"

Row = dict[str, str]
_SHARED = {"nodes": "1", "routing": "uniform:0"}

# --- the layer ------------------------------------------------------------------------------------------

LAYERS = _SHARED | {"ranks": "2", "tokens": "4096", "commit": "cd86c5e"}
# Name, description, ffn, and columns of its rows. A GPU has as many experts as in a group twice as large.
MODELS = (
    ("DeepSeek-V3", "7168 x 2048, 64 experts", "2048", {"hidden": "7168", "topk": "8", "experts": "128"}),
    ("Qwen3-235B", "4096 x 1536, 32 experts", "1536", {"hidden": "4096", "topk": "8", "experts": "64"}),
    ("Mixtral", "4096 x 14336, 2 experts", "14336", {"hidden": "4096", "topk": "2", "experts": "4"}),
    ("gpt-oss", "2880 x 2880, 32 experts", "2880", {"hidden": "2880", "topk": "4", "experts": "64"}),
)
PASSES = (("forward", "moe_layer_fwd"), ("forward + backward", "moe_layer_step"))
DECODE = _SHARED | {"op": "moe_layer_decode", "ranks": "2", "hidden": "7168", "topk": "8", "experts": "128"}
DECODED_TOKENS = ("8", "32", "128")


def layer_rows(ffn: str) -> tuple[Row, Row, Row]:
    """Columns that distinguish the rows of NCCL, bf16 and MXFP8."""
    own = {"provider": "triton_ep", "mode": f"jit-static-sm24-local-a128-ffn{ffn}"}
    return {"provider": "nccl", "mode": f"torch-exact-ffn{ffn}"}, own | {"payload": "bf16"}, own | {"payload": "mxfp8"}


def decode_rows() -> tuple[Row, Row, Row]:
    """Columns that distinguish the rows of decoding."""
    own = {"provider": "triton_ep", "mode": "jit-static-ll-local-ffn2048-graph", "commit": "f961653"}
    return (
        {"provider": "nccl", "mode": "torch-exact-ffn2048", "commit": LAYERS["commit"]},
        own | {"payload": "bf16"},
        own | {"payload": "mxfp8"},
    )


# --- the exchange ---------------------------------------------------------------------------------------

EXCHANGE = _SHARED | {"ranks": "4", "tokens": "4096", "hidden": "7168", "topk": "8", "experts": "256"}
_LAYER = {"provider": "triton_ep", "mode": "jit-static-sm20-local-a128"}
_NCCL = {"provider": "nccl", "mode": "torch-exact-a128", "commit": "a7519e2"}
# Heading, then its bars: label, colour, columns of the row.
STEPS = (
    (
        "dispatch",
        (
            ("NCCL", "other", _NCCL | {"op": "dispatch", "payload": "bf16"}),
            ("bf16", "a", _LAYER | {"op": "dispatch", "payload": "bf16", "commit": "eaac519c"}),
            ("MXFP8", "b", _LAYER | {"op": "dispatch", "payload": "mxfp8", "commit": "c679be2"}),
        ),
    ),
    (
        "combine",
        (
            ("NCCL", "other", _NCCL | {"op": "combine", "payload": "bf16"}),
            ("bf16", "a", _LAYER | {"op": "combine", "payload": "bf16", "commit": "eaac519c"}),
        ),
    ),
)


def stored(file: str, wanted: Row) -> Row:
    """The last stored row that has the wanted values.

    Raises:
        LookupError: no row has them.
    """
    with (RESULTS / file).open(newline="") as rows:
        found = [row for row in csv.DictReader(rows) if all(row[name] == value for name, value in wanted.items())]
    if not found:
        raise LookupError(f"{file} has no row with {wanted}")
    return found[-1]


def median_us(file: str, wanted: Row) -> float:
    """Median time of that row.

    Raises:
        LookupError: no row has the wanted values.
    """
    return float(stored(file, wanted)["median_us"])


def _bars(c: Canvas, x: float, y: float, times: list[float], longest: float, ratios: bool) -> None:
    """Draw bars of NCCL, bf16 and MXFP8 from (x, y) down, scaled to the longest."""
    for number, (label, colour, time) in enumerate(
        zip(("NCCL", "bf16", "MXFP8"), ("other", "a", "b"), times, strict=True)
    ):
        top, width = y + 34 * number, longest * time / max(times)
        c.text(x + 74, top + 21, label, 22, "ink", "end")
        c.box(x + 82, top, width, 26, colour, radius=3)
        said = f"{time:,.0f}" + (f" · {time / times[0]:.2f}" if ratios and number else "")
        c.text(x + 90 + width, top + 21, said, 22, "ink", bold=number > 0)


def draw() -> Canvas:
    """Draw two columns for each model and three for decoding, each column with a scale of its own."""
    c = Canvas(1044, "Time of a MoE layer of four models and of decoding: NCCL with torch, triton_ep in bf16 and MXFP8")
    c.text(24, 44, "A MoE layer, microseconds, less is better", 28, "ink", bold=True)
    c.text(24, 76, f"{LAYERS['ranks']} x H200 of one node, 4096 tokens each; in brackets", 22, "soft")
    c.text(24, 104, "hidden x ffn and experts per GPU. NCCL + torch: grey.", 22, "soft")
    c.text(24, 132, "triton_ep: bf16 blue, MXFP8 green, and its share of grey", 22, "soft")
    y = 178
    for name, sizes, ffn, columns in MODELS:
        c.text(24, y, f"{name} ({sizes})", 24, "ink", bold=True)
        for number, (heading, op) in enumerate(PASSES):
            times = [median_us("moe_layer.csv", LAYERS | columns | {"op": op} | own) for own in layer_rows(ffn)]
            c.text(24 + 352 * number, y + 28, heading, 22, "soft")
            _bars(c, 14 + 352 * number, y + 38, times, 110, True)
        y += 178
    c.text(24, y, "Decoding, DeepSeek-V3 (NCCL: no graph, another run)", 24, "ink", bold=True)
    for number, tokens in enumerate(DECODED_TOKENS):
        times = [median_us("decode.csv", DECODE | {"tokens": tokens} | own) for own in decode_rows()]
        c.text(24 + 232 * number, y + 28, f"{tokens} tokens per GPU", 22, "soft")
        _bars(c, 14 + 232 * number, y + 38, times, 72, False)
    return c


def draw_exchange() -> Canvas:
    """Draw bars with their values; each group is scaled to its longest bar."""
    c = Canvas(396, "Time of dispatch and combine: NCCL, triton_ep in bf16 and in MXFP8")
    c.text(24, 44, "Dispatch and combine, microseconds", 28, "ink", bold=True)
    c.text(24, 76, "4096 tokens per GPU, hidden 7168, top-8 of 256 experts,", 22, "soft")
    c.text(24, 106, "4 x H200 of one node. NCCL and MXFP8: earlier runs", 22, "soft")
    y = 148
    for heading, bars in STEPS:
        c.text(24, y, heading, 24, "ink", bold=True)
        times = [median_us("dispatch_combine.csv", EXCHANGE | own) for _, _, own in bars]
        for (label, colour, _), time in zip(bars, times, strict=True):
            width = 440 * time / max(times)
            c.text(110, y + 33, label, 22, "ink", "end")
            c.box(122, y + 12, width, 28, colour, radius=3)
            c.text(122 + width + 10, y + 34, f"{time:,.0f}", 22, "ink", bold=colour != "other")
            y += 36
        y += 42
    return c
