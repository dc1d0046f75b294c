"""Tables of the model (model.py): `triton-ep bench model`, its page, and a comparison with stored rows."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from triton_ep.bench.model import Machine, Workload, predict_combine, predict_dispatch
from triton_ep.bench.settings import parse_numbers
from triton_ep.errors import ConfigError, InputError
from triton_ep.runtime.files import check_writable

_MOST_PER_HOST = 8  # a stored row of several nodes with at most this many ranks has virtual nodes
_RANKS = "2,4,8,16,32,64,128,256,512,1024,2048"
_MODE = re.compile(r"jit-(exact|static)-(sm\d+|tuned)(-local)?(?:-a(\d+))?")
_PAGE_BLOCK = re.compile(r"(```console\n\$ triton-ep bench model ?([^\n]*)\n)(.*?)(```)", re.DOTALL)


def experts_for(ranks: int, experts: int, per_rank: int | None) -> int:
    """Experts over all ranks: `per_rank` each if given; else `experts`, or one per rank if there are more ranks.

    Raises:
        ConfigError: experts cannot be shared evenly, or a number is below 1.
    """
    for name, number in (("--ranks", ranks), ("--experts", experts), ("--experts-per-rank", per_rank)):
        if number is not None and number < 1:
            raise ConfigError(f"{name} is {number}; at least 1 is needed.")
    if per_rank is not None:
        return ranks * per_rank
    if experts >= ranks and experts % ranks:
        raise ConfigError(f"--experts {experts} cannot be shared evenly by {ranks} ranks.")
    return max(experts, ranks)


def lines_of(rows: Sequence[dict[str, object]]) -> list[str]:
    """Dictionaries with the same keys as a text table, numbers aligned right."""
    names = list(rows[0])
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    right = [not isinstance(rows[0][name], str) for name in names]
    return [
        "  ".join(c.rjust(n) if r else c.ljust(n) for c, n, r in zip(line, widths, right, strict=True)).rstrip()
        for line in cells
    ]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return str(value)


def predicted_row(w: Workload, machine: Machine) -> dict[str, object]:
    """One line of the table."""
    there, back = predict_dispatch(w, machine), predict_combine(w, machine)
    mxfp8_us = predict_dispatch(w, machine, "mxfp8").us if w.hidden % 32 == 0 else math.nan
    return {
        "ranks": w.ranks,
        "nodes": w.nodes,
        "experts": w.experts,
        "tokens": w.tokens,
        "ranks/token": w.ranks_per_token,
        "nodes/token": w.nodes_per_token,
        "NVLink_MB": there.traffic.nvlink / 1e6,
        "NIC_MB": there.traffic.nic / 1e6,
        "fixed_us": there.fixed_us,
        "bf16_us": there.us,
        "mxfp8_us": mxfp8_us,
        "combine_us": back.us,
        "limit": there.limit,
        "buffers_GB": w.network_buffers("bf16") / 1e9,
    }


def compared_rows(rows: Iterable[dict[str, str]], machine: Machine) -> list[dict[str, object]]:
    """Compare measured dispatches and combines (GPUs, uniform routing, fastest `num_sm` of each kind) with the model.

    The last of several rows of one configuration counts. Rows of several nodes with up to 8 ranks count as virtual
    nodes, whose traffic all crosses NVLink.
    """
    last: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        known = row["provider"] == "triton_ep" and row["op"] in ("dispatch", "combine") and row["gpu"] != "cpu"
        if known and row["median_us"] and row["routing"].startswith("uniform") and _MODE.fullmatch(row["mode"]):
            shape = ("op", "payload", "nodes", "ranks", "tokens", "hidden", "topk", "experts", "mode")
            last[tuple(row[name] for name in shape)] = row
    best: dict[tuple[str, ...], dict[str, str]] = {}
    for key, row in last.items():
        kind = (*key[:-1], re.sub(r"sm\d+|tuned", "", key[-1]))
        best[kind] = min(best.get(kind, row), row, key=lambda row: float(row["median_us"]))
    return [_compared(row, machine) for row in best.values()]


def _compared(row: dict[str, str], machine: Machine) -> dict[str, object]:
    mode = _MODE.fullmatch(row["mode"])
    assert mode is not None, "rows of other modes were left out"
    ranks, nodes = int(row["ranks"]), int(row["nodes"])
    w = Workload(
        ranks=ranks,
        ranks_per_node=ranks // nodes,
        experts=int(row["experts"]),
        tokens=int(row["tokens"]),
        hidden=int(row["hidden"]),
        topk=int(row["topk"]),
        alignment=int(mode[4] or 1),
        local_combine=bool(mode[3]),
        virtual=nodes > 1 and ranks <= _MOST_PER_HOST,
    )
    found = predict_dispatch(w, machine, row["payload"]) if row["op"] == "dispatch" else predict_combine(w, machine)
    return {
        "op": row["op"],
        "payload": row["payload"],
        "mode": row["mode"],
        "nodes": nodes,
        "ranks": ranks,
        "tokens": w.tokens,
        "hidden": w.hidden,
        "predicted_us": f"{found.us:.1f}",
        "measured_us": row["median_us"],
        "measured/predicted": f"{float(row['median_us']) / found.us:.2f}",
        "commit": row["commit"],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `triton-ep bench model`."""
    many: dict[str, Any] = {"metavar": "N,N,.."}
    parser.add_argument("--ranks", default=_RANKS, help="of the whole job (default %(default)s)", **many)
    parser.add_argument("--local-world-size", type=int, default=8, metavar="N", help="ranks per node (default 8)")
    parser.add_argument("--tokens", default="4096", help="per rank (default %(default)s)", **many)
    parser.add_argument("--hidden", type=int, default=7168, metavar="N", help="default %(default)s")
    parser.add_argument("--topk", type=int, default=8, metavar="N", help="default %(default)s")
    experts = "over all ranks (default 256); where there are more ranks, one expert each"
    parser.add_argument("--experts", default="256", help=experts, **many)
    parser.add_argument("--experts-per-rank", type=int, metavar="N", help="the same number on every rank instead")
    parser.add_argument("--no-local-combine", action="store_true", help="combine brings back a row per assignment")
    for name, unit in (
        ("nvlink", "NVLink, default 343 on nodes of 8 and more, 305 on smaller ones"),
        ("nic", "network, default 50: 400 Gb/s per GPU"),
        ("memory", "rows within a GPU, default 2900"),
    ):
        parser.add_argument(f"--{name}-gbps", type=float, metavar="X", help=f"10^9 bytes per second of {unit}")
    parser.add_argument("--measured", metavar="CSV", help="compare with stored rows instead")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument("--update", metavar="PAGE", help="run the commands of a page's blocks again, in the page")


def main(arguments: argparse.Namespace) -> None:
    """Print the table, as text or JSON, or update a page.

    Raises:
        ConfigError, InputError: the arguments are invalid, or a file is missing or unreadable.
    """
    if arguments.update:
        page = Path(arguments.update)
        if not page.is_file():
            raise InputError(f"there is no page {page}.")
        try:
            text = page.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{page} cannot be read as text: {error}.") from error
        check_writable(page)
        page.write_text(updated(text), encoding="utf-8")
        return
    rows, notes = tables(arguments)
    if arguments.json:
        # JSON has no NaN: a time that does not exist is null.
        plain = [{name: None if value is math.nan else value for name, value in row.items()} for row in rows]
        found = {"machine": asdict(_machine(arguments)), "rows": plain, "notes": notes}
        print(json.dumps(found, indent=1, allow_nan=False))
    else:
        print("\n".join([*lines_of(rows), *notes]))


def tables(a: argparse.Namespace) -> tuple[list[dict[str, object]], list[str]]:
    """The requested rows, and notes about them."""
    machine = _machine(a)
    if a.measured:
        from triton_ep.bench.rows import read_rows

        rows = compared_rows(read_rows(Path(a.measured)), machine)
        if not rows:
            raise InputError(f"{a.measured} has no row of a dispatch or combine on GPUs with uniform routing.")
        return rows, []
    many = (
        parse_numbers(a.ranks, "--ranks"),
        parse_numbers(a.experts, "--experts"),
        parse_numbers(a.tokens, "--tokens"),
    )
    rows, notes = [], []
    for ranks, asked, tokens in itertools.product(*many):
        experts = experts_for(ranks, asked, a.experts_per_rank)
        w = Workload(
            ranks=ranks,
            ranks_per_node=min(a.local_world_size, ranks),
            experts=experts,
            tokens=tokens,
            hidden=a.hidden,
            topk=a.topk,
            local_combine=not a.no_local_combine,
        )
        rows.append(predicted_row(w, machine))
        if a.experts_per_rank is None and experts > asked:
            notes.append(f"{asked} experts make at most {asked} ranks: beyond, one expert per rank.")
    return rows, list(dict.fromkeys(notes))


def updated(text: str) -> str:
    """The page, with current output in the blocks that begin with `$ triton-ep bench model ..`."""

    def again(block: re.Match[str]) -> str:
        rows, notes = tables(parse(block[2].split()))
        return "\n".join([block[1].rstrip("\n"), *lines_of(rows), *notes, block[4]])

    return _PAGE_BLOCK.sub(again, text)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the words of a command line."""
    parser = argparse.ArgumentParser(prog="triton-ep bench model")
    add_arguments(parser)
    return parser.parse_args(list(words))


def _machine(a: argparse.Namespace) -> Machine:
    told = {name: getattr(a, name) for name in ("nvlink_gbps", "nic_gbps", "memory_gbps")}
    for name, value in told.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; a rate is a finite number above 0.")
    return Machine(**{name: value for name, value in told.items() if value is not None})
