"""docs/pictures/losses.svg: losses of a small MoE transformer, trained in MXFP8 and from three seeds in bf16.

Every loss is a stored row of examples/04_train_step.py (docs/benchmarks/results/losses.csv).
"""

import csv
from math import log
from pathlib import Path

from canvas import Canvas

LOSSES = Path(__file__).resolve().parents[1] / "benchmarks/results/losses.csv"
MXFP8 = "MXFP8"
STEPS, LAST = 300, 50  # steps of a run, and the last ones, whose mean loss is compared
# Entropy of the chain that draws the tokens, a lower bound of the loss (SUCCESSORS in examples/04_train_step.py).
ENTROPY = -sum(share * log(share) for share in (0.5, 0.25, 0.15, 0.1))

LEFT, WIDTH, HEIGHT = 76, 616, 250  # of a panel, without the numbers next to it
# Upper edge, first and last step, lowest and highest loss, steps and losses written at the edges.
PANELS = (
    (198, (1, STEPS), (1.0, 4.5), (1, 100, 200, STEPS), (1.0, 2.0, 3.0, 4.0)),
    (504, (100, STEPS), (1.15, 1.35), (100, 200, STEPS), (1.15, 1.2, 1.25, 1.3, 1.35)),
)


def runs() -> dict[str, list[float]]:
    """Losses of each run, step by step: columns of the file whose names begin with a number format."""
    with LOSSES.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0] if name.startswith(("bf16", MXFP8))}


def _panel(
    c: Canvas, panel: tuple[float, tuple[int, int], tuple[float, float], tuple[int, ...], tuple[float, ...]]
) -> None:
    """Draw a frame with numbers at its edges, and in it the losses of all runs, MXFP8 on top."""
    top, (first, last), (low, high), steps, losses = panel

    def at(step: int, loss: float) -> tuple[float, float]:
        x = LEFT + WIDTH * (step - first) / (last - first)
        return round(x, 1), round(top + HEIGHT * (high - loss) / (high - low), 1)

    c.box(LEFT, top, WIDTH, HEIGHT, "frame", "line", radius=0)
    for loss in losses:
        c.text(LEFT - 10, at(first, loss)[1] + 8, f"{loss:.2f}", 22, "soft", "end")
    for step in steps:
        c.text(at(step, low)[0], top + HEIGHT + 28, str(step), 22, "soft", "middle")
    c.line([at(first, ENTROPY), at(last, ENTROPY)], "ink", 2, dashed=True)
    for name, values in runs().items():
        colour, width = ("b", 2.5) if name == MXFP8 else ("a", 1.5)
        c.line([at(step, values[step - 1]) for step in range(first, last + 1)], colour, width)


def draw() -> Canvas:
    """Draw all steps, and below them the later ones on a finer scale."""
    ends = {name: sum(losses[-LAST:]) / LAST for name, losses in runs().items()}
    bf16 = ", ".join(f"{end:.4f}" for name, end in ends.items() if name != MXFP8)
    c = Canvas(824, f"Loss of a small MoE transformer over {STEPS} steps, three seeds in bf16 and one in MXFP8")
    c.text(24, 44, "Loss of a small MoE transformer", 28, "ink", bold=True)
    c.text(24, 78, f"Mean of the last {LAST} of {STEPS} steps, 2 x H200", 22, "soft")
    c.text(24, 108, f"bf16, three seeds: {bf16}", 22, "a", bold=True)
    c.text(24, 138, f"MXFP8, one seed: {ends[MXFP8]:.4f}", 22, "b", bold=True)
    c.text(24, 168, f"dashed: entropy of the data, {ENTROPY:.4f}", 22, "soft")
    for panel in PANELS:
        _panel(c, panel)
    c.text(LEFT + WIDTH, 814, "step", 22, "soft", "end")
    return c
