"""Pictures: times from stored rows, tokens between ranks, kernels of a call. Needs matplotlib."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from triton_ep.bench import rows as bench_rows
from triton_ep.bench.settings import check_routing
from triton_ep.bench.timing import Span
from triton_ep.errors import ConfigError, EPError, InputError
from triton_ep.runtime.files import cannot_write, check_writable

_OPS = ("dispatch", "combine", "roundtrip", "low_latency")
_SETTING = ("gpu", "ranks", "nodes", "hidden", "topk", "experts", "routing")
_CONFIGURATION = ("op", "provider", "mode", "payload", "tokens", *_SETTING)
_FLOORS = {"floor, bf16": ":", "floor, mxfp8": (0, (1, 4))}
_MOST_TOKENS = 1 << 20  # per rank, in a picture of a routing
_PANEL = (4.6, 3.2)  # inches
_PROGRAMS = re.compile(r"-sm(\d+)")


def main(arguments: argparse.Namespace) -> None:
    """`triton-ep bench plot`.

    Raises:
        ConfigError: neither rows nor a routing were named, or both.
    """
    out = Path(arguments.out)
    if (arguments.rows is None) == (arguments.routing is None):
        raise ConfigError("bench plot draws the rows of a CSV file, or --routing: name one of them.")
    if arguments.routing is not None:
        draw_routing(arguments, out)
        return
    wanted = [_condition(text) for text in arguments.where]
    rows = bench_rows.read_rows(Path(arguments.rows))
    kept = [row for row in rows if all(row[name] in values for name, values in wanted)]
    named = arguments.lines.split(",") if arguments.lines else [""]
    drawn = [row for row in kept if any(part in series_of(row) for part in named)]
    if rows and not drawn:
        raise InputError(
            f"of the {len(rows)} rows of {arguments.rows} --where leaves {len(kept)}, and --lines none of these. Their "
            f"lines are {', '.join(sorted({series_of(row) for row in kept or rows}))}."
        )
    draw_times(drawn, out)


def check_picture(out: Path) -> None:
    """Raise if the picture cannot be drawn: EPError without matplotlib, ConfigError for another file type, InputError
    for a path that cannot be written."""
    if importlib.util.find_spec("matplotlib") is None:
        raise EPError("pictures need matplotlib, which is not installed: pip install 'triton-ep[bench]'.")
    if out.suffix not in (".png", ".svg"):
        raise ConfigError(f"{out} is no supported picture file: name a .png or .svg file.")
    check_writable(out)


def newest(rows: Sequence[bench_rows.Row]) -> list[bench_rows.Row]:
    """The last row of each configuration, without skipped rows."""
    kept = {tuple(row[name] for name in _CONFIGURATION): row for row in rows if row["median_us"]}
    return list(kept.values())


def series_of(row: bench_rows.Row) -> str:
    """Name of the line to which a row belongs: provider, mode without programs, payload."""
    return " ".join([row["provider"], _PROGRAMS.sub("", row["mode"]), row["payload"]])


def programs_of(row: bench_rows.Row) -> int | None:
    """Programs of the exchange, from the mode; None if the mode names none."""
    found = _PROGRAMS.search(row["mode"])
    return int(found[1]) if found else None


def draw_times(rows: Sequence[bench_rows.Row], out: Path) -> None:
    """Median times by programs and by tokens: a row of panels per machine and shape, a line per provider and mode.

    The last of several rows of one configuration counts. The floor is the link bound of the layer's bytes.

    Raises:
        InputError: no row has a time of dispatch, combine or both.
        EPError: matplotlib is missing.
    """
    settings: dict[tuple[str, ...], list[bench_rows.Row]] = defaultdict(list)
    for row in newest(rows):
        if row["op"] in _OPS:
            settings[tuple(row[name] for name in _SETTING)].append(row)
    if not settings:
        raise InputError("there is no measured row of dispatch, combine, roundtrip or low-latency to draw.")
    lines = [(setting, by, found) for setting, rows in settings.items() for by, found in _lines(rows)]
    columns = max(len(found) for _, _, found in lines)
    with _figure(out, columns * _PANEL[0] + 2.6, len(lines) * (_PANEL[1] + 0.3)) as figure:
        grid = figure.subplots(len(lines), columns, squeeze=False)
        handles: dict[str, Any] = {}
        for line, (setting, by, found) in zip(grid, lines, strict=True):
            for axes in line[len(found) :]:
                axes.remove()
            for axes, (op, points) in zip(line, found.items(), strict=False):
                _draw_panel(axes, by, points, handles)
                fixed = "best number of programs" if by == "tokens" else f"{points[0]['tokens']} tokens per rank"
                axes.set_title(f"{op.replace('_', ' ')}, {fixed}", fontsize=9)
            names = dict(zip(_SETTING, setting, strict=True))
            nodes = "" if names["nodes"] == "1" else f" as {names['nodes']} nodes"
            line[0].set_ylabel(
                f"median us\n{names['ranks']} x {names['gpu']}{nodes}, hidden {names['hidden']},\n"
                f"top-{names['topk']} of {names['experts']}, {names['routing']}",
                fontsize=8,
            )
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=7)


def _lines(rows: Sequence[bench_rows.Row]) -> Iterator[tuple[str, dict[str, list[bench_rows.Row]]]]:
    """Per line of panels of a setting: the quantity on the axis, and the rows of each op."""
    by_op = {op: [row for row in rows if row["op"] == op] for op in _OPS}
    by_op = {op: found for op, found in by_op.items() if found}
    tokens = {op: sorted({int(row["tokens"]) for row in found}) for op, found in by_op.items()}
    largest = {op: [row for row in found if int(row["tokens"]) == tokens[op][-1]] for op, found in by_op.items()}
    several = {op: found for op, found in by_op.items() if len(tokens[op]) > 1}
    swept = {op: found for op, found in largest.items() if len({programs_of(row) for row in found} - {None}) > 1}
    # Ops with neither tokens nor programs swept still get a panel here.
    if programs := {op: found for op, found in largest.items() if op in swept or op not in several}:
        yield "programs", programs
    if several:
        yield "tokens", several


def _draw_panel(axes: Any, by: str, rows: Sequence[bench_rows.Row], handles: dict[str, Any]) -> None:
    if by == "programs" and all(programs_of(row) is None for row in rows):
        _draw_bars(axes, rows, handles)
        return
    lines: dict[str, dict[int, float]] = defaultdict(dict)
    floors: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        programs, time = programs_of(row), float(row["median_us"])
        if by == "programs" and programs is None:
            _style(axes.axhline(time, linestyle="--"), series_of(row), handles)
            continue
        at = programs if by == "programs" and programs is not None else int(row["tokens"])
        points = lines[series_of(row)]
        points[at] = min(time, points.get(at, time))
        if row["floor_us"] and row["provider"] == "triton_ep":
            floors[f"floor, {row['payload']}"][at] = float(row["floor_us"])
    for name, points in lines.items():
        (line,) = axes.plot(*zip(*sorted(points.items()), strict=True), marker="o", markersize=4)
        _style(line, name, handles)
    for name, points in floors.items():
        (line,) = axes.plot(*zip(*sorted(points.items()), strict=True), linestyle=_FLOORS[name], color="black")
        handles.setdefault(name, line)
    if by == "tokens":
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens per rank" if by == "tokens" else "programs of the exchange (num_sm)")
    axes.grid(alpha=0.3)


def _draw_bars(axes: Any, rows: Sequence[bench_rows.Row], handles: dict[str, Any]) -> None:
    """A bar per line if no mode names programs, with its floor across it."""
    for place, row in enumerate(rows):
        (bar,) = axes.bar(place, float(row["median_us"]))
        _style(bar, series_of(row), handles)
        if row["floor_us"]:
            line = axes.hlines(float(row["floor_us"]), place - 0.4, place + 0.4, colors="black", linestyles=":")
            handles.setdefault("floor, bf16", line)
    axes.set_xticks([])
    axes.grid(alpha=0.3)


def _style(line: Any, name: str, handles: dict[str, Any]) -> None:
    """Give a name the same colour in all panels."""
    handles.setdefault(name, line)
    line.set_color(f"C{[known for known in handles if known not in _FLOORS].index(name) % 10}")


def draw_routing(arguments: argparse.Namespace, out: Path) -> None:
    """Draw the tokens from each rank to each rank, for the routing that --routing names.

    Raises:
        InputError, ConfigError: the routing cannot be drawn.
        EPError: matplotlib is missing.
    """
    from triton_ep.bench import routing
    from triton_ep.bench.settings import Shape

    check_picture(out)
    _check_routing(arguments)
    shape = Shape(arguments.tokens, 1, arguments.topk, arguments.experts, 1)
    idxs = routing.draw(arguments.routing, shape, arguments.ranks, 1, arguments.seed)[0]
    tokens = routing.Routing.of(idxs, shape.experts, arguments.ranks).tokens()
    size = 2.2 + 0.5 * arguments.ranks
    with _figure(out, size + 1.5, size) as figure:
        axes = figure.subplots()
        image = axes.imshow(tokens.numpy(), cmap="Blues", vmin=0)
        darkest = int(tokens.max())
        for source, line in enumerate(tokens.tolist()):
            for target, count in enumerate(line):
                colour = "white" if 2 * count > darkest else "black"
                axes.text(target, source, str(count), ha="center", va="center", color=colour, fontsize=7)
        axes.set(xlabel="to rank", ylabel="from rank", title=f"Tokens, {arguments.routing}")
        axes.set_xticks(range(arguments.ranks))
        axes.set_yticks(range(arguments.ranks))
        figure.colorbar(image, ax=axes, label=f"of {shape.tokens}, top-{shape.topk} of {shape.experts}")


def _check_routing(arguments: argparse.Namespace) -> None:
    """Raise ConfigError, naming the option, unless these sizes can be drawn."""
    for name, most in (("tokens", _MOST_TOKENS), ("topk", _MOST_TOKENS), ("experts", 65536), ("ranks", 128)):
        if not 1 <= getattr(arguments, name) <= most:
            raise ConfigError(f"--{name} is {getattr(arguments, name)}; it must be 1 to {most}.")
    if arguments.experts % arguments.ranks:
        raise ConfigError(f"--experts {arguments.experts} cannot be shared evenly by --ranks {arguments.ranks}.")
    if arguments.topk > arguments.experts:
        raise ConfigError(f"--topk {arguments.topk} exceeds the {arguments.experts} of --experts.")
    check_routing(arguments.routing, arguments.seed)


def draw_timelines(calls: Mapping[str, Sequence[Span]], out: Path) -> None:
    """Kernels of one call each, as bars over time, a line per stream: first the stream of the call, then others.

    Raises:
        InputError: nothing was recorded.
        EPError: matplotlib is missing.
    """
    drawn = {name: spans for name, spans in calls.items() if spans}
    if not drawn:
        raise InputError("no kernels were recorded, so there is no timeline to draw.")
    with _figure(out, 12, 1.2 + 1.9 * len(drawn)) as figure:
        grid = figure.subplots(len(drawn), 1, squeeze=False)
        handles: dict[str, Any] = {}
        for (axes,), (title, spans) in zip(grid, drawn.items(), strict=True):
            start = min(span.start_us for span in spans)
            streams = list(dict.fromkeys(span.stream for span in sorted(spans, key=lambda span: span.start_us)))
            for span in spans:
                name = re.sub(r"[(<].*", "", span.name)[:48]
                colour = f"C{list(handles).index(name) % 10}" if name in handles else f"C{len(handles) % 10}"
                bar = axes.barh(
                    streams.index(span.stream),
                    span.end_us - span.start_us,
                    left=span.start_us - start,
                    color=colour,
                    edgecolor="black",
                    linewidth=0.3,
                )
                handles.setdefault(name, bar)
            axes.set_yticks(range(len(streams)), ["stream of the call", *["second stream"] * (len(streams) - 1)])
            axes.invert_yaxis()
            axes.set_xlabel("us")
            axes.set_title(title, fontsize=9)
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=7)


def _condition(text: str) -> tuple[str, list[str]]:
    name, equals, value = text.partition("=")
    if not equals or name not in bench_rows.COLUMNS:
        raise ConfigError(f"--where {text} is not COLUMN=VALUE,..; columns are {', '.join(bench_rows.COLUMNS)}.")
    return name, value.split(",")


@contextlib.contextmanager
def _figure(out: Path, width: float, height: float) -> Iterator[Any]:
    """A figure that is written when the block ends; the same rows give the same file."""
    check_picture(out)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "triton_ep"}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(out, dpi=120, metadata={"Date": None} if out.suffix == ".svg" else None)
        except OSError as error:
            raise cannot_write(out, error) from error
