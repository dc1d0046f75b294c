"""docs/concepts/architecture.svg: the path of one token through dispatch, grouped GEMM and combine."""

from canvas import Canvas

COLUMNS = [20, 192, 384, 558]  # left edges of the four ranks
W, H = 144, 44  # size of a buffer


def _ranks(c: Canvas) -> None:
    for node, (left, width) in enumerate(((12, 332), (376, 332))):
        c.box(left, 52, width, 1176, "frame", "line")
        c.text(left + width / 2, 84, f"node {node}", 24, "soft", "middle", bold=True)
    for rank, x in enumerate(COLUMNS):
        c.text(x + W / 2, 118, f"rank {rank}", 24, "ink", "middle", bold=True)


def _buffer(c: Canvas, rank: int, y: float, name: str, colour: str = "line", symmetric: bool = True) -> None:
    x = COLUMNS[rank]
    c.box(x, y, W, H, "box", colour, dashed=not symmetric)
    c.text(x + W / 2, y + 29, name, 22, "ink", "middle")


def _middle(rank: int) -> float:
    return COLUMNS[rank] + W / 2


def _stage(c: Canvas, y: float, words: str, colour: str) -> None:
    c.box(12, y, 696, 40, colour, radius=0)
    c.text(360, y + 28, words, 24, "on", "middle", bold=True)


def _down(c: Canvas, ranks: tuple[int, ...], start: float, stop: float, colour: str) -> None:
    for rank in ranks:
        c.arrow([(_middle(rank), start), (_middle(rank), stop)], colour)


def draw() -> Canvas:
    """Draw a token of rank 0 whose three experts are on ranks 1, 2 and 3."""
    c = Canvas(1330, "One token through dispatch, grouped GEMM and combine on two nodes of two ranks")
    c.text(360, 34, "One token of rank 0, experts on ranks 1, 2, 3", 25, "ink", "middle", bold=True)
    _ranks(c)

    _stage(c, 136, "dispatch", "a")
    _buffer(c, 0, 196, "x", "a", symmetric=False)
    c.arrow([(COLUMNS[0] + W, 218), (_middle(2), 218), (_middle(2), 276)], "c")
    c.text(470, 206, "send: network,", 22, "c")
    c.text(470, 232, "once per node", 22, "c")
    _buffer(c, 2, 280, "token_recv", "c")
    c.arrow([(_middle(0), 240), (_middle(0), 392), (COLUMNS[1] - 4, 392)], "a")
    c.text(102, 354, "push: NVLink,", 22, "a")
    _down(c, (2,), 324, 366, "a")
    c.arrow([(COLUMNS[2] + W, 302), (_middle(3), 302), (_middle(3), 366)], "a")
    c.text(560, 288, "forward", 22, "a")
    for rank in (1, 2, 3):
        _buffer(c, rank, 370, "stage_x", "a")
        _buffer(c, rank, 466, "recv_x", "b", symmetric=False)
    _down(c, (1, 2, 3), 414, 462, "a")
    c.text(182, 496, "expand", 22, "a", "end")
    c.text(182, 430, "once per rank", 22, "a", "end")

    _stage(c, 536, "experts: grouped GEMM", "b")
    for rank in (1, 2, 3):
        c.arrow([(_middle(rank), 576), (_middle(rank), 622)], "b")
        _buffer(c, rank, 626, "y", "b", symmetric=False)

    _stage(c, 696, "combine", "a")
    for rank in (1, 2, 3):
        c.arrow([(_middle(rank), 736), (_middle(rank), 776)], "a")
        _buffer(c, rank, 780, "combine_x", "a")
    c.text(182, 770, "stage", 22, "a", "end")
    c.arrow([(_middle(3), 824), (_middle(3), 906), (COLUMNS[2] + W + 4, 906)], "a")
    _down(c, (2,), 824, 880, "a")
    _buffer(c, 2, 884, "partial_send", "c")
    c.text(702, 952, "partial: one sum", 22, "a", "end")
    c.text(702, 978, "per token", 22, "a", "end")
    c.arrow([(_middle(2), 928), (_middle(2), 1006), (COLUMNS[0] + W + 4, 1006)], "c")
    c.text(368, 996, "network", 22, "c", "end")
    _buffer(c, 0, 984, "partial_recv", "c")
    c.arrow([(_middle(1), 824), (_middle(1), 1104), (COLUMNS[0] + W + 4, 1104)], "a")
    c.text(200, 1136, "pull: NVLink", 22, "a")
    _down(c, (0,), 1028, 1078, "a")
    _buffer(c, 0, 1082, "sum over k", "b", symmetric=False)
    _down(c, (0,), 1126, 1166, "b")
    _buffer(c, 0, 1170, "combined", "b", symmetric=False)

    c.box(26, 1254, 40, 28, "box", "line")
    c.text(76, 1276, "symmetric buffer: all ranks can address it", 22, "soft")
    c.box(26, 1290, 40, 28, "box", "line", dashed=True)
    c.text(76, 1312, "ordinary tensor of one rank", 22, "soft")
    return c
