"""The model counts the bytes that the protocol sends, and its page shows its results."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from triton_ep.bench import model, rows, scaling
from triton_ep.bench.model import Machine, Workload
from triton_ep.bench.routing import Routing, combine_bytes, dispatch_bytes, draw
from triton_ep.bench.settings import Shape
from triton_ep.cli import main
from triton_ep.config import EPConfig
from triton_ep.context.layout import BUFFERS, Sizes
from triton_ep.errors import ConfigError, InputError

pytestmark = pytest.mark.plain

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/benchmarks/scaling.md"
RESULTS = ROOT / "docs/benchmarks/results/dispatch_combine.csv"
NODES = [(4, 4), (4, 2), (8, 4), (8, 1)]


@pytest.mark.parametrize(
    ("ranks", "per_node", "experts", "topk"), [(4, 2, 8, 3), (4, 4, 4, 4), (2, 1, 6, 1), (6, 3, 6, 2)]
)
def test_expected_ranks_and_nodes(ranks: int, per_node: int, experts: int, topk: int) -> None:
    """The closed form equals the mean over all choices of distinct experts."""
    each = experts // ranks
    choices = [{e // each for e in chosen} for chosen in itertools.combinations(range(experts), topk)]
    w = Workload(ranks=ranks, ranks_per_node=per_node, experts=experts, topk=topk)
    assert w.ranks_per_token == pytest.approx(sum(map(len, choices)) / len(choices))
    nodes = [len({rank // per_node for rank in chosen}) for chosen in choices]
    assert w.nodes_per_token == pytest.approx(sum(nodes) / len(nodes))


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(("ranks", "per_node"), NODES)
def test_bytes_are_those_of_drawn_routings(ranks: int, per_node: int, local: bool) -> None:
    """On average over ranks, bytes that the benchmark counts from expert ids equal the model's, within noise."""
    shape = Shape(tokens=2000, hidden=64, topk=4, experts=32, ffn=1)
    routing = Routing.of(draw("uniform", shape, ranks, 1, 0)[0], shape.experts, per_node)
    w = Workload(ranks=ranks, ranks_per_node=per_node, experts=32, tokens=2000, hidden=64, topk=4, local_combine=local)
    there = dispatch_bytes(routing, w.wire_bytes("mxfp8"))
    back = combine_bytes(routing, w.row_bytes, w.partial_bytes, local_combine=local)
    for between, found in ((there, model.dispatch_traffic(w, "mxfp8")), (back, model.combine_traffic(w))):
        inside = sum(
            int(between[a, b]) for a, b in itertools.product(range(ranks), repeat=2) if a // per_node == b // per_node
        )
        assert found.nvlink == pytest.approx(inside / ranks, rel=0.01)
        assert found.nic == pytest.approx((int(between.sum()) - inside) / ranks, rel=0.01)


def test_bytes_are_those_of_stored_rows() -> None:
    """The busiest rank of a measured row sends hardly more than the model's average."""
    checked = 0
    for row in rows.read_rows(RESULTS):
        uniform = row["provider"] == "triton_ep" and row["routing"].startswith("uniform") and row["bytes_out"]
        if not uniform or row["op"] not in ("dispatch", "combine"):
            continue
        ranks, nodes = int(row["ranks"]), int(row["nodes"])
        w = Workload(
            ranks=ranks,
            ranks_per_node=ranks // nodes,
            experts=int(row["experts"]),
            tokens=int(row["tokens"]),
            hidden=int(row["hidden"]),
            topk=int(row["topk"]),
            local_combine="-local" in row["mode"],
        )
        sent = model.dispatch_traffic(w, row["payload"]) if row["op"] == "dispatch" else model.combine_traffic(w)
        noise = 4 / w.tokens**0.5
        assert sent.nvlink + sent.nic <= int(row["bytes_out"]) * (1 + noise)
        assert int(row["bytes_out"]) <= (sent.nvlink + sent.nic) * (1 + noise)
        checked += 1
    assert checked >= 20


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(("topk", "hidden", "payload"), [(3, 96, "mxfp8"), (8, 7168, "bf16"), (2, 52, "bf16")])
def test_sizes_are_those_of_the_layout(topk: int, hidden: int, payload: str, local: bool) -> None:
    """Messages, counts and buffers between nodes have the sizes that the layer allocates."""
    w = Workload(ranks=8, ranks_per_node=2, experts=24, tokens=40, hidden=hidden, topk=topk, local_combine=local)
    config = EPConfig(
        max_tokens=40,
        hidden=hidden,
        topk=topk,
        num_experts=24,
        rank=0,
        world_size=8,
        local_world_size=2,
        enable_local_combine=local,
        payload="mxfp8" if payload == "mxfp8" else None,
    )
    sizes = Sizes(config, 1, 1)
    assert w.message_bytes(payload) == sizes.message_bytes
    assert w.counts_bytes == 4 * sizes.shape.row_length
    names = ("token_send_buf_rdma", "token_recv_buf_rdma", "partial_send_buf", "partial_recv_buf")
    buffers = [buffer for buffer in BUFFERS if buffer.name in names]
    assert len(buffers) == 4
    assert w.network_buffers(payload) == pytest.approx(sum(b.nbytes(sizes) for b in buffers), abs=4 * 256)


def test_times_by_hand() -> None:
    """With one node, rates of 1 GB/s and no fixed costs, microseconds are kilobytes, by the formula of the page."""
    machine = Machine(
        nvlink_gbps=1, nic_gbps=1, memory_gbps=1, program_gbps=1e9, kernel_us=0, flags_us=0, network_us=0, message_us=0
    )
    w = Workload(ranks=2, ranks_per_node=2, experts=2, tokens=2048, hidden=500, topk=2, alignment=1)
    there = model.predict_dispatch(w, machine)  # every token to both ranks: 2 MB out; 4 MB read, 4 MB written
    counts = w.counts_bytes / 1e3
    assert there.us == pytest.approx(8192 + 2048 * 20 / 64 + counts, rel=1e-6) and there.limit == "memory"
    # 4 MB read, 4 MB stored by all ranks, 4 MB read again, 2 MB written.
    assert model.predict_combine(w, machine).us == pytest.approx(14336 + 14336 * 2 / 64)
    slow = replace(machine, nvlink_gbps=0.1)
    assert model.predict_dispatch(w, slow).us == pytest.approx(20480 + 8192 / 64 + 10 * counts, rel=1e-2)
    assert model.predict_combine(w, slow).us == pytest.approx(20480 + 14336 * 2 / 64)
    assert model.push_steps(1024, 2) == (16 / 64, 6 / 64) and model.push_steps(100, 2) == (1, 1)
    assert model.push_steps(1024, 1) == (38 / 64, 2 / 64) and model.push_steps(2048, 1) == (20 / 64, 1 / 64)
    few = replace(w, tokens=512)
    assert model.predict_dispatch(few, machine).us == pytest.approx(512 + 2048 + counts, rel=1e-6)
    far = replace(w, ranks_per_node=1)
    assert model.predict_combine(far, machine).us == pytest.approx(14336 + 14336 * 2 / 64)
    messages = w.message_bytes("bf16") / w.row_bytes
    expected = max(2048 * messages + 4096 / 64, 2048 * messages * 6 / 64 + 4096) + 4096
    assert model.predict_dispatch(far, machine).us == pytest.approx(expected + 2 * counts, rel=1e-2)
    assert model.predict_dispatch(replace(far, virtual=True), machine).traffic == model.Traffic(0, 2048e3)


def test_more_is_not_faster() -> None:
    """Time grows with tokens, ranks and hidden, falls with the network's rate, and MXFP8 takes less."""

    def times(machine: Machine = Machine(), **changes: int) -> list[float]:  # noqa: B008
        w = Workload(**{"ranks": 64, "ranks_per_node": 8, "experts": 256, **changes})
        there = [model.predict_dispatch(w, machine, payload).us for payload in ("mxfp8", "bf16")]
        assert there[0] < there[1]
        return [*there, model.predict_combine(w, machine).us]

    steps = [times(), times(ranks=128), times(ranks=128, tokens=8192), times(ranks=128, tokens=8192, hidden=8192)]
    steps.append(times(Machine(nic_gbps=25), ranks=128, tokens=8192, hidden=8192))
    for before, after in itertools.pairwise(steps):
        assert all(a < b for a, b in zip(before, after, strict=True))


def test_page_shows_what_is_computed() -> None:
    """Every predicted table of the page equals the command's current output."""
    text = PAGE.read_text()
    blocks = re.findall(r"```console\n\$ triton-ep bench model ?([^\n]*)\n(.*?)```", text, re.DOTALL)
    again = re.findall(r"```console\n\$ triton-ep bench model ?([^\n]*)\n(.*?)```", scaling.updated(text), re.DOTALL)
    assert len(blocks) >= 5 and [words for words, _ in blocks] == [words for words, _ in again]
    for (words, shown), (_, computed) in zip(blocks, again, strict=True):
        if "--measured" not in words:
            assert shown == computed, "triton-ep bench model --update docs/benchmarks/scaling.md"


def test_page_quotes_measured_rows() -> None:
    """The table that compares with the model quotes stored rows, with right ratios; newer rows may exist."""
    block = re.search(r"\$ triton-ep bench model --measured [^\n]*\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block
    header, *lines = (re.split(r" {2,}", line) for line in block[1].splitlines())
    stored = {(r["op"], r["mode"], r["payload"], r["median_us"], r["commit"]) for r in rows.read_rows(RESULTS)}
    assert len(lines) >= 10
    for line in (dict(zip(header, line, strict=True)) for line in lines):
        assert (line["op"], line["mode"], line["payload"], line["measured_us"], line["commit"]) in stored
        predicted = float(line["predicted_us"])
        ratio = float(line["measured_us"]) / predicted
        # Both are rounded on the page, the prediction to a tenth.
        assert float(line["measured/predicted"]) == pytest.approx(ratio, abs=0.0051 + ratio * 0.05 / predicted)


def test_compared_rows(tmp_path: Path) -> None:
    """The last row of a configuration and the fastest number of programs; no CPU rows, skewed routing or graphs."""
    base = {"op": "combine", "provider": "triton_ep", "payload": "bf16", "nodes": 2, "ranks": 4, "tokens": 4096}
    base |= {"hidden": 7168, "topk": 8, "experts": 256, "routing": "uniform:0", "gpu": "H200", "commit": "abc"}
    new = [
        rows.make_row({**base, "mode": mode, "median_us": us, **more})
        for mode, us, more in (
            ("jit-static-sm20-local-a128", "900.0", {}),
            ("jit-static-sm20-local-a128", "1200.0", {}),
            ("jit-static-sm32-local-a128", "1100.0", {}),
            ("jit-static-sm32-local-a128-graph", "100.0", {}),
            ("jit-static-sm32-local-a128", "100.0", {"gpu": "cpu"}),
            ("jit-static-sm32-local-a128", "100.0", {"routing": "zipf:1:0"}),
        )
    ]
    found = scaling.compared_rows(new, Machine())
    assert [(line["measured_us"], line["mode"]) for line in found] == [("1100.0", "jit-static-sm32-local-a128")]
    w = Workload(ranks=4, ranks_per_node=2, experts=256, virtual=True)
    assert found[0]["predicted_us"] == f"{model.predict_combine(w, Machine()).us:.1f}"
    empty = tmp_path / "rows.csv"
    rows.append_rows(empty, new[3:])
    with pytest.raises(InputError, match="no row of a dispatch"):
        scaling.tables(scaling.parse(["--measured", str(empty)]))


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`triton-ep bench model` prints JSON with its inputs, notes added experts, and updates a page."""
    assert main(["bench", "model", "--json", "--ranks", "8,512", "--nic-gbps", "25"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["experts"] for row in found["rows"]] == [256, 512]
    assert found["machine"]["nic_gbps"] == 25 and "256 experts make at most 256 ranks" in found["notes"][0]
    assert main(["bench", "model", "--ranks", "16", "--experts-per-rank", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["16", "2", "64"]
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```console\n$ triton-ep bench model --ranks 2\nold\n```\nmore\n")
    assert main(["bench", "model", "--update", str(page)]) == 0
    assert (
        "old" not in page.read_text() and page.read_text().endswith("```\nmore\n") and "NVLink_MB" in page.read_text()
    )


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--ranks", "3"], "256 cannot be shared evenly by 3"),
        (["--ranks", "12", "--experts-per-rank", "2"], "12 ranks cannot be shared evenly by nodes of 8"),
        (["--ranks", "2", "--experts-per-rank", "2"], "top-8 exceeds the 4 experts"),
        (["--nic-gbps", "0"], "--nic-gbps is 0"),
        (["--tokens", "0"], "tokens is 0"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], match: str) -> None:
    """Impossible sizes raise a ConfigError that names them."""
    with pytest.raises(ConfigError, match=match):
        scaling.tables(scaling.parse(words))


def test_json_has_null_where_there_is_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of 33 elements have no MXFP8 time; JSON has no NaN."""
    assert main(["bench", "model", "--hidden", "33", "--ranks", "8", "--json"]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    (row,) = json.loads(capsys.readouterr().out, parse_constant=refuse)["rows"]
    assert row["mxfp8_us"] is None and row["bf16_us"] > 0


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--ranks", "0"], "--ranks is 0"),
        (["--ranks", "8", "--experts", "-8"], "--experts is -8"),
        (["--ranks", "8", "--experts-per-rank", "0"], "--experts-per-rank is 0"),
        (["--ranks", "8", "--hidden", "1" + "0" * 400], "hidden is 1000"),
        (["--ranks", "1" + "0" * 400], "--ranks 1000"),
        (["--nic-gbps", "inf"], "--nic-gbps is inf"),
        (["--update", "BINARY"], "cannot be read as text"),
        (["--measured", "BINARY"], "cannot be read as rows"),
    ],
)
def test_wrong_options_are_named(
    words: list[str], match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong option gives one line that names the option or the file, and exit code 1."""
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    assert main(["bench", "model", *(str(binary) if word == "BINARY" else word for word in words)]) == 1
    assert match in capsys.readouterr().err
