"""docs/concepts/layout.svg: the rows of the example in docs/concepts/layout.md, before and after dispatch."""

from canvas import Canvas

EXPERTS = ((2, 3, 2), (2, 0))  # experts of the tokens of rank 0 and of rank 1
COLOURS = ("b", "b", "a", "c")  # by expert


def received(rank: int) -> list[tuple[int, int, int]]:
    """(expert, source rank, token) of the rows of a rank that owns experts 2 * rank and 2 * rank + 1, in order."""
    rows = [(expert, source, token) for source, ids in enumerate(EXPERTS) for token, expert in enumerate(ids)]
    return sorted(row for row in rows if row[0] // 2 == rank)


def _row(c: Canvas, x: float, y: float, words: str, colour: str) -> None:
    c.box(x, y, 200, 44, colour)
    c.text(x + 100, y + 30, words, 22, "on", "middle", bold=True)


def draw() -> Canvas:
    """Draw the tokens on the left and the received rows on the right, with arrows between them."""
    c = Canvas(480, "Tokens of two ranks before dispatch, and rows sorted by expert after it")
    c.text(130, 36, "tokens (x)", 24, "ink", "middle", bold=True)
    c.text(585, 36, "rows (recv_x)", 24, "ink", "middle", bold=True)
    places: dict[tuple[int, int, int], tuple[float, float]] = {}
    for rank, top in ((0, 60), (1, 268)):
        for left in (14, 470):
            c.box(left, top, 236, 196, "frame", "line")
            c.text(left + 118, top + 26, f"rank {rank}", 22, "soft", "middle")
    for rank, (y, _) in enumerate(((100, 0), (308, 0))):
        for expert, source, token in received(rank):
            places[expert, source, token] = (488, y)
            y += 37
    for rank, top in ((0, 100), (1, 308)):
        for token, expert in enumerate(EXPERTS[rank]):
            y = top + 48 * token
            _row(c, 32, y, f"{rank}.{token} to expert {expert}", COLOURS[expert])
            x2, y2 = places[expert, rank, token]
            c.arrow([(236, y + 22), (x2 - 6, y2 + 17)], COLOURS[expert])
    for (expert, source, token), (x, y) in places.items():
        height = 33
        c.box(x, y, 200, height, COLOURS[expert])
        c.text(x + 100, y + height - 9, f"expert {expert}: {source}.{token}", 22, "on", "middle", bold=True)
    return c
