"""docs/concepts/timeline.svg: order and overlap of the steps of a dispatch and a combine, on two ranks of one node."""

from canvas import Canvas

LANE, LEFT, SCALE = 56, 118, 24.0
# Heading, then lanes: name, and blocks of (start, length, words, colour) in arbitrary units of time.
PARTS = (
    (
        "dispatch",
        (
            ("rank 0", ((0, 4, "count", "other"), (4, 5, "splits", "c"), (9, 9, "push", "a"))),
            ("", ((11, 11, "expand, in steps", "b"),)),
            ("rank 1", ((1, 4, "count", "other"), (5, 4, "splits", "c"), (9, 11, "push", "a"))),
            ("", ((11, 13, "expand, in steps", "b"),)),
        ),
        "splits: every rank waits for the counts of all. expand: waits for rows, step by step",
    ),
    (
        "combine, with enable_local_combine",
        (
            ("rank 0", ((0, 11, "reduce, in steps", "b"),)),
            ("", ((2, 13, "pull and sum", "a"), (15, 4, "done", "c"))),
            ("rank 1", ((1, 11, "reduce, in steps", "b"),)),
            ("", ((3, 13, "pull and sum", "a"), (16, 4, "done", "c"))),
        ),
        "pull: waits for the steps of all ranks. done: their rows may be overwritten",
    ),
)


def draw() -> Canvas:
    """Draw two lanes per rank: the kernels of a call, and those that run beside them."""
    c = Canvas(700, "Steps of a dispatch and a combine over time on two ranks")
    y = 40.0
    for heading, lanes, words in PARTS:
        c.text(24, y, heading, 26, "ink", bold=True)
        y += 16
        for name, blocks in lanes:
            if name:
                c.text(24, y + 40, name, 22, "soft")
            for start, length, label, colour in blocks:
                x, width = LEFT + SCALE * start, SCALE * length
                c.box(x, y + 10, width - 4, LANE - 14, colour, radius=4)
                c.text(x + width / 2 - 2, y + 39, label, 22, "on", "middle")
            y += LANE
        first, second = words.split(". ")
        c.text(24, y + 24, first, 22, "soft")
        c.text(24, y + 52, second, 22, "soft")
        y += 104
    return c
