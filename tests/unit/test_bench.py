"""The benchmark works on CPU ranks as on GPUs: it checks, times, and stores rows of the documented form."""

from __future__ import annotations

import argparse
import csv
import importlib.machinery
import json
import os
import re
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import triton_ep
from tests.bench import link_bytes
from tests.programs import run_program
from triton_ep import distributed as ep_distributed
from triton_ep.bench import by_source, exchange, host, plot, providers, routing, rows, run, tables, timing
from triton_ep.bench.job import Job, Place, WrongResult, join
from triton_ep.bench.origins import coded_rows, first_difference
from triton_ep.bench.settings import COMPACT, Case, Settings, Shape, origin_of_kernels
from triton_ep.cli import bench as cli
from triton_ep.distributed import current_heap
from triton_ep.errors import ConfigError, EPError, InputError
from triton_ep.integrations import deep_ep as door
from triton_ep.ops import floor
from triton_ep.runtime import launch

pytestmark = pytest.mark.plain

HEADER = (
    "op,provider,mode,payload,nodes,ranks,tokens,hidden,topk,experts,routing,median_us,p20_us,p80_us,skew_pct,"
    "bytes_out,gbps,gpu,driver,torch,triton,nvshmem,commit,date,skip_reason,host_us,kernel_us,floor_us,floor_ratio,iters,"
    "peak_mib,error_db"
)
TINY = ["--ranks", "2", "--tokens", "6", "--hidden", "32", "--topk", "2", "--experts", "4", "--commit", "abc1234"]
TINY += ["--iters", "2", "--warmup", "0"]
BESIDE = ["dispatch_beside", "combine_beside", "roundtrip_beside"]


def _run(*words: str, heap: str | None = None) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    environment.pop("TRITON_EP_HEAP_SIZE", None)
    if heap:
        environment["TRITON_EP_HEAP_SIZE"] = heap
    done = run_program(["-m", "triton_ep.cli", "bench", *words, *TINY], environment, imported=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def _settings(*words: str, last: Sequence[str] = ()) -> Settings:
    """Settings that `triton-ep bench` derives from these words on the CPU."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.settings_of(parser.parse_args([*words, *TINY, *last]), 2, interpreting=True)


def _read(path: Path) -> list[dict[str, str]]:
    assert path.read_text().splitlines()[0] == HEADER
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_of_a_run(tmp_path: Path) -> None:
    """A row per op and provider, all columns sane, floors first; pictures of the times and kernels."""
    path = tmp_path / "results" / "rows.csv"
    pictures = ("--plot", str(tmp_path / "times.svg"), "--timeline", str(tmp_path / "kernels.png"))
    out = _run("roundtrip", "--csv", str(path), "--nodes", "2", "--stages", *pictures)
    found = _read(path)
    assert [(row["op"], row["provider"]) for row in found] == [
        ("floor", "copy_engine"),
        ("floor", "push"),
        *((op, provider) for provider in ("triton_ep", "gloo") for op in ("dispatch", "combine", "roundtrip")),
    ]
    rates = [int(row["bytes_out"]) / float(row["median_us"]) for row in found[:2]]
    for row in found:
        assert 0 < float(row["p20_us"]) <= float(row["median_us"]) <= float(row["p80_us"])
        assert 0 <= float(row["skew_pct"]) < 100 and int(row["bytes_out"]) > 0
        assert (row["nodes"], row["ranks"], row["gpu"], row["commit"]) == ("2", "2", "cpu", "abc1234")
        assert row["torch"] == torch.__version__ and re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
        assert row["skip_reason"] == "" and row["host_us"] == ""
    for row in found[2:]:
        assert int(row["bytes_out"]) <= 2 * 6 * 2 * 32 * 4 and row["iters"] == "2"
        floor_us = float(row["floor_us"])
        assert floor_us >= int(row["bytes_out"]) / max(rates) - 0.1
        assert (row["kernel_us"] == "") == (row["provider"] == "gloo")
    assert "internode_send_kernel" in out and "combine_pull_kernel" in out
    assert tables.CPU_NOTE in out and "nodes 2, ranks 2, tokens 6, hidden 32, topk 2, experts 4" in out
    shown = out.split(tables.CPU_NOTE)[1]
    assert not any(word in shown for word in ("speed is", "GB/s", "bound", "copy_engine", "CUPTI"))
    assert len(re.findall(r"^(dispatch|combine|roundtrip) +(triton_ep|gloo) .* [mu]?s\b", shown, re.MULTILINE)) == 6
    assert "<svg" in (tmp_path / "times.svg").read_text() and (tmp_path / "kernels.png").stat().st_size > 1000


def _gpu_row(**values: object) -> rows.Row:
    shape = {"payload": "bf16", "nodes": 1, "ranks": 4, "tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256}
    return rows.make_row({"op": "dispatch", "mode": "jit-sm24", "gpu": "H200", **shape, **values})


def test_tables_have_units_and_say_once_what_rows_share() -> None:
    """Shared sizes stand above, times have suitable units, one line compares providers; link floors are rows."""
    found = [
        rows.make_row(
            {"op": "floor", "provider": "push", "mode": "jit-sm20", "ranks": 4, "gpu": "H200", "gbps": 370.1}
        ),
        _gpu_row(provider="triton_ep", median_us=585.14, floor_ratio=1.23, gbps=301.2),
        _gpu_row(provider="nccl", median_us=3397.2, gbps=51.9),
    ]
    lines = tables.table(found).splitlines()
    assert lines[0] == "payload bf16, nodes 1, ranks 4, tokens 4096, hidden 7168, topk 8, experts 256"
    assert lines[1].split() == ["op", "provider", "mode", "median", "x", "bound", "GB/s"]
    assert lines[3].split()[:5] == ["dispatch", "triton_ep", "jit-sm24", "585.1", "us"]
    assert lines[4].split()[3:5] == ["3.397", "ms"] and lines[2].split() == ["floor", "push", "jit-sm20", "370.1"]
    (line,) = tables.compared(found)
    assert line.endswith("585.1 us (jit-sm24); speed is 5.81 x that of nccl")


def test_an_exchange_adds_to_products() -> None:
    """The added time is that of both minus that of the products alone, per measured row; none for CPU ranks."""
    told = {"op": "dispatch_beside", "mode": "jit-static-sm20-budget24"}
    found = [_gpu_row(provider="triton_ep", median_us=1470.2, floor_us=1280.0, **told)]
    (line,) = tables.added([*found, _gpu_row(provider="deep_ep", skip_reason="not here", **told)])
    assert line == (
        "dispatch of triton_ep (jit-static-sm20-budget24, bf16) adds 190.2 us to products that take 1.28 ms alone"
    )
    assert tables.added([{**found[0], "gpu": "cpu"}]) == []


def test_tables_fit_the_terminal() -> None:
    """The least important columns are dropped first and named; op, provider, mode and time always stay."""
    found = [
        _gpu_row(provider="triton_ep", median_us=us, host_us=40.0, skew_pct=2.5, p80_us=us + 1, tokens=tokens)
        for us, tokens in ((585.1, 4096), (77.0, 16))
    ]
    whole = tables.table(found)
    assert tables.table(found, width=500) == whole and "Left out" not in whole
    lines = tables.table(found, width=60).splitlines()
    assert max(map(len, lines[1:-1])) <= 60 and lines[-1].startswith("Left out for want of width: host, skew %")
    narrow = tables.table(found, width=10).splitlines()
    assert narrow[1].split() == ["op", "provider", "mode", "median"]


@pytest.mark.parametrize(
    ("us", "text"),
    [(0.5, "0.5 us"), (585.14, "585.1 us"), (1000, "1 ms"), (821127.8, "821.1 ms"), (3834354.1, "3.834 s")],
)
def test_times_have_the_unit_that_suits_them(us: float, text: str) -> None:
    """Times have four digits and the largest unit that keeps them at 1 or above."""
    assert tables.time_text(us) == text


def _measure(_rank: int, _nodes: int, _ranks_per_node: int, settings: Settings) -> list[dict[str, str]]:
    """Rows of a run in existing ranks."""
    return run.measure_all(settings).rows


def test_sweep_into_a_file(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """Lists give a case per value, in both payloads and with skewed routing; rows are appended to existing ones."""
    path = tmp_path / "rows.csv"
    rows.append_rows(path, [rows.make_row({"op": "dispatch"})])
    sweep = ["--num-sm", "1,2", "--payload", "mxfp8,bf16", "--provider", "triton_ep,vdev,deep_ep"]
    words = ["--capacity", "static", "--routing", "zipf:1.5", "--alignment", "16", "--csv", str(path)]
    found = run_ranks(_measure, 1, 2, _settings("dispatch", *sweep, *words, last=["--iters", "1"]))[0]
    assert _read(path)[1:] == found
    found = [row for row in found if row["op"] == "dispatch"]
    modes = [f"interpreted-static-sm{n}-a16" for n in (1, 2)]
    assert [(row["payload"], row["mode"]) for row in found[:2]] == [("mxfp8", m) for m in modes]
    assert [(row["payload"], row["mode"]) for row in found[4:6]] == [("bf16", m) for m in modes]
    assert [(row["provider"], row["skip_reason"]) for row in found[2:4] + found[6:]] == [
        *[("deep_ep", "deep_ep is not installed.")] * 2,
        ("vdev", "torch's symmetric memory needs GPUs."),
        *[("deep_ep", "deep_ep is not installed.")] * 2,
    ]
    assert {row["routing"] for row in found} == {"zipf:1.5:0"}


@pytest.mark.parametrize(
    ("words", "ops"),
    [
        (["combine", "--routing", "one-hot", "--payload", "mxfp8"], ["combine"] * 2),
        (
            ["roundtrip", "--provider", "nccl_dedup", "--payload", "bf16,mxfp8"],
            ["dispatch", "combine", "roundtrip"] * 2,
        ),
        (["beside-gemm", "--sm-budget", "2", "--capacity", "static"], BESIDE * 2),
        (["beside-gemm", "--copy-engines", "--provider", COMPACT], BESIDE),
        (["host", "--stages", "--provider", "triton_ep"], ["dispatch_host", "combine_host"]),
        (["host", "--low-latency"], ["dispatch_host", "combine_host"] * 2),
        (["dispatch", "--sm-budget", "1", "--provider", "triton_ep"], ["dispatch"]),
        (["low-latency", "--payload", "mxfp8", "--provider", "triton_ep"], ["low_latency"]),
        (["barrier"], ["barrier"] * 2),
        (["quantise"], ["quantise"]),
    ],
    ids=lambda value: value[0] if value[0] != "beside-gemm" else "-".join(value[:2]),
)
def test_every_command_runs(run_ranks: Callable[..., Any], words: list[str], ops: list[str]) -> None:
    """Each command checks and times the ops of its name."""
    settings = _settings(*words, last=["--iters", "1", "--alignment", "8"])
    found = [row for row in run_ranks(_measure, 1, 2, settings)[0] if row["op"] != "floor"]
    assert [row["op"] for row in found] == ops
    assert all(float(row["median_us"]) > 0 and not row["skip_reason"] for row in found)


def _measure_peer(_rank: int, _nodes: int, _ranks_per_node: int, settings: Settings) -> list[dict[str, str]]:
    """Use this package's own integration in place of deep_ep: it has the same interface."""
    module = types.ModuleType("deep_ep")
    module.__spec__ = importlib.machinery.ModuleSpec("deep_ep", None)
    module.Buffer, module.Config = door.Buffer, door.Config  # type: ignore[attr-defined]
    sys.modules["deep_ep"] = module
    before = door.Buffer.num_sms
    try:
        return run.measure_all(settings).rows
    finally:
        del sys.modules["deep_ep"]
        door.Buffer.num_sms, door.Buffer.budgeted = before, False
        door.release()


@pytest.mark.parametrize(
    ("words", "modes"),
    [
        ("dispatch --num-sm 2,3", ["exact-sm2-unpermuted", ""]),
        pytest.param("roundtrip --capacity static", ["nosync-sm20-unpermuted"] * 3, marks=pytest.mark.on_gpus),
        (
            "roundtrip --hidden 128 --payload mxfp8 --capacity static",
            ["nosync-sm20-unpermuted-quantised-before-fp8"] * 3,
        ),
        ("low-latency --hidden 128 --payload bf16,mxfp8", ["ll-slabs", "ll-slabs-fp8"]),
        ("dispatch --payload mxfp8", [""]),
        ("beside-gemm", ["exact-sm20-unpermuted"] * 3),
        pytest.param("host", ["exact-sm20-unpermuted"] * 2, marks=pytest.mark.on_gpus),
    ],
)
def test_deep_ep_as_a_provider(run_ranks: Callable[..., Any], words: str, modes: list[str]) -> None:
    """Normal kernels in both modes, with FP8, and low-latency kernels are checked, and the mode says how they differ; a
    case that cannot run has a row with the reason."""
    settings = _settings(*words.split(), "--provider", "deep_ep", last=["--iters", "1", *words.split()[1:]])
    found = [row for row in run_ranks(_measure_peer, 1, 2, settings)[0] if row["op"] != "floor"]
    assert [row["mode"] if not row["skip_reason"] else "" for row in found] == modes
    assert all(row["skip_reason"] or float(row["median_us"]) > 0 for row in found)
    reasons = {row["skip_reason"] for row in found} - {""}
    assert all("even number of SMs, not 3" in text or "multiples of 128 values, not 32" in text for text in reasons)


@pytest.mark.parametrize(
    ("words", "modes"),
    [
        ("roundtrip --sm-budget 4", ["interpreted-exact-sm20-budget4-unpermuted"] * 3),
        (
            "roundtrip --hidden 128 --payload mxfp8 --capacity static",
            ["interpreted-static-sm20-unpermuted-quantised-before-fp8"] * 3,
        ),
        ("beside-gemm --capacity static", ["interpreted-static-sm20-unpermuted"] * 3),
        ("roundtrip --copy-engines --capacity static", ["interpreted-static-sm20-engines-unpermuted"] * 3),
        ("dispatch --payload mxfp8 --hidden 96", [""]),
    ],
)
def test_compact_rows_as_a_provider(run_ranks: Callable[..., Any], words: str, modes: list[str]) -> None:
    """The layer's compact rows are checked, with and without a number of rows, and in FP8."""
    settings = _settings(*words.split(), "--provider", COMPACT, last=["--iters", "1", *words.split()[1:]])
    found = [row for row in run_ranks(_measure, 1, 2, settings)[0] if row["op"] != "floor"]
    assert [row["mode"] if not row["skip_reason"] else "" for row in found] == modes
    assert all(
        row["skip_reason"] == "FP8 rows are multiples of 128 values, not 96." or float(row["median_us"]) > 0
        for row in found
    )


def test_compact_rows_need_a_command_that_has_them() -> None:
    """Low latency has no compact rows."""
    with pytest.raises(ConfigError, match="triton_ep_compact sends rows as dispatch_compact does; low-latency has no"):
        _settings("low-latency", "--provider", COMPACT)


def test_a_profile_of_the_host_leaves_the_interpreter_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile names functions of the call, not of interpreted kernels, and restores the interpreter."""

    seen = []

    def interpreted(number: int, *rest: Any) -> None:
        seen.append(sum(range(number)))

    def a_call_of_the_layer() -> None:
        launch._interpret(1000, 1, [], {})

    monkeypatch.setattr(launch, "_interpret", interpreted)
    job = types.SimpleNamespace(settings=types.SimpleNamespace(interpreting=True, iters=2), device=torch.device("cpu"))
    text = host._profile(job, a_call_of_the_layer, lambda: None)  # type: ignore[arg-type]
    assert "1.0 x  test_bench.py" in text and "a_call_of_the_layer" in text
    assert "interpreted" not in text and "sum" not in text
    assert len(seen) == 2 and launch._interpret is interpreted


def test_what_is_unequal_stands_with_the_ratio() -> None:
    """The comparison names the work that another provider leaves out, from its mode."""
    ours = _gpu_row(provider="triton_ep", median_us=400.0, payload="mxfp8")
    peer = _gpu_row(provider="deep_ep", median_us=300.0, payload="mxfp8", mode="nosync-sm20-unpermuted-fp8")
    (line,) = tables.compared([ours, peer])
    assert "speed is 0.75 x that of deep_ep; not the same work: deep_ep leaves rows by source rank" in line
    assert line.endswith("deep_ep has one scale per 128 values")


def test_case_without_memory_is_a_row_with_its_reason(tmp_path: Path) -> None:
    """A layer that does not fit is skipped with HeapError's text; the other provider is still measured."""
    path = tmp_path / "rows.csv"
    _run("dispatch", "--csv", str(path), heap="8K")
    found = _read(path)
    assert [bool(row["skip_reason"]) for row in found] == [True, False]
    assert "HeapError" in found[0]["skip_reason"] and found[0]["median_us"] == found[0]["bytes_out"] == ""
    assert found[0]["commit"] == "abc1234" and found[1]["floor_us"] == ""


def test_too_few_gpus_is_a_row_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bare start with more ranks than GPUs says so in each row."""
    settings = _settings("roundtrip", "--csv", str(tmp_path / "rows.csv"), "--num-sm", "8,16", "--json")
    run.skip_all(settings, "needs 2 GPUs, there are 1")
    found = _read(tmp_path / "rows.csv")
    assert len(found) == 9 and {row["skip_reason"] for row in found} == {"needs 2 GPUs, there are 1"}
    assert json.loads(capsys.readouterr().out)["rows"] == found


def test_a_file_of_other_columns_is_refused(tmp_path: Path) -> None:
    """Rows are never appended under another header."""
    path = tmp_path / "rows.csv"
    path.write_text("op,median_us\n")
    with pytest.raises(InputError, match="columns"):
        rows.append_rows(path, [rows.make_row({"op": "dispatch"})])
    assert path.read_text() == "op,median_us\n"
    with pytest.raises(KeyError, match="speed"):
        rows.make_row({"speed": 1})


def test_a_file_of_an_earlier_version_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old rows get the columns that they lack; if the new file cannot be written, the old one stays."""
    path = tmp_path / "rows.csv"
    before = rows.COLUMNS[: rows.COLUMNS.index("peak_mib")]
    old = ",".join(before) + "\n" + ",".join("dispatch" if name == "op" else "" for name in before) + "\n"
    path.write_text(old)
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError("no space left")

        patch.setattr(rows, "write_complete", full)
        with pytest.raises(InputError, match="cannot be written"):
            rows.append_rows(path, [rows.make_row({"op": "combine"})])
    assert path.read_text() == old
    rows.append_rows(path, [rows.make_row({"op": "combine"})])
    assert [row["op"] for row in _read(path)] == ["dispatch", "combine"]


def _no_ranks(*_: object) -> None:
    raise AssertionError("ranks started")


@pytest.mark.parametrize("option", ["--csv", "--plot", "--timeline"])
def test_a_file_that_cannot_be_written_is_refused_early(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that cannot be written is refused by name before any rank starts."""
    if option != "--csv":
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(ep_distributed, "run_ranks", _no_ranks)
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "rows.svg"
    with pytest.raises(InputError, match=f"{path} cannot be written.*Name another path"):
        cli.run(parser.parse_args(["roundtrip", *TINY, option, str(path)]))
    folder = tmp_path / "folder.svg"
    folder.mkdir()
    with pytest.raises(InputError, match=f"{folder} cannot be written"):
        cli.run(parser.parse_args(["roundtrip", *TINY, option, str(folder)]))
    good = tmp_path / "new" / "rows.svg"
    with pytest.raises(AssertionError, match="ranks started"):
        cli.run(parser.parse_args(["roundtrip", *TINY, option, str(good)]))
    assert not good.parent.exists(), "the check leaves nothing behind"


def test_rows_of_other_columns_are_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A --csv file with other columns, or that is no text, is refused before any rank starts, and stays as it is."""
    monkeypatch.setattr(ep_distributed, "run_ranks", _no_ranks)
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    for contents, match in ((b"op,median_us\n", "has the columns"), (b"\xff\xfe\x00", "cannot be read as rows")):
        path = tmp_path / "rows.csv"
        path.write_bytes(contents)
        with pytest.raises(InputError, match=match):
            cli.run(parser.parse_args(["dispatch", *TINY, "--csv", str(path)]))
        assert path.read_bytes() == contents


@pytest.mark.parametrize(
    "words",
    [
        "--nodes 3",
        "--nodes 2 --local-world-size 1",
        "--topk 9",
        "--provider mpi",
        "--routing zipf:x",
        "--routing ring",
        "--graph",
        "--tokens 4,x",
        "--experts 4,5",
        "--ranks 0",
        "--warmup -1",
        "--ffn 0",
    ],
)
def test_settings_that_cannot_work_are_refused(words: str) -> None:
    """Invalid settings are refused before any rank starts."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    with pytest.raises(ConfigError):
        cli.settings_of(parser.parse_args(["dispatch", *TINY, *words.split()]), 2, interpreting=True)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("dispatch --experts 64 --topk 64", "topk 64 exceeds 32"),
        ("dispatch --topk 64", "--topk 64 exceeds the 4 experts"),
        ("roundtrip --num-sm 8,2000", "num_sm 2000 exceeds 1024"),
        ("dispatch --tokens 2000000000", "2147483647 can be numbered"),
        ("low-latency --alignment 1 --tokens 16,2000", "max_tokens up to 1024, got 2000"),
        ("host --alignment 1 --low-latency --experts 4096", "num_experts up to 2048, got 4096"),
        ("moe-layer --tokens 2000 --low-latency", "max_tokens up to 1024, got 2000"),
    ],
)
def test_shapes_of_no_layer_are_refused(words: str, match: str) -> None:
    """What a layer refuses is refused before ranks start; providers without a layer still take it."""
    command, *options = words.split()
    with pytest.raises(ConfigError, match=match):
        _settings(command, last=options)
    if command == "dispatch" and "--experts" in options:
        assert _settings(command, last=[*options, "--provider", "nccl"]).shapes[0].topk == 64


def test_a_routing_that_cannot_be_read_is_refused_early(tmp_path: Path) -> None:
    """A missing file, and ids that do not fit a shape, are refused before any rank starts, unless no rank routes."""
    missing = f"file:{tmp_path / 'nope.pt'}"
    with pytest.raises(InputError, match=r"nope.pt names no .pt or .npy file"):
        _settings("dispatch", "--routing", missing)
    assert _settings("barrier", "--routing", missing).routing == missing
    torch.save(torch.zeros(12, 2, dtype=torch.int32), tmp_path / "idx.pt")
    found = f"file:{tmp_path / 'idx.pt'}"
    assert _settings("dispatch", "--routing", found).routing == found
    with pytest.raises(InputError, match="2 ranks with 5 tokens and top-2 need"):
        _settings("dispatch", "--routing", found, last=["--tokens", "6,5"])


@pytest.mark.parametrize("command", ["beside-gemm", "host"])
def test_a_row_says_graph_only_where_there_is_one(command: str) -> None:
    """Commands that launch their calls anew refuse --graph."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    words = [command, *TINY, "--capacity", "static", "--graph"]
    with pytest.raises(ConfigError, match=f"{command} launches them anew"):
        cli.settings_of(parser.parse_args(words), 2, interpreting=False)


def test_time_slices_are_not_measured(monkeypatch) -> None:
    """Benchmarks refuse ranks that may share a GPU."""
    monkeypatch.setenv("TRITON_EP_RANKS_PER_GPU", "2")
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    settings = cli.settings_of(parser.parse_args(["barrier", "--commit", "a"]), 8, interpreting=False)
    with pytest.raises(ConfigError, match="TRITON_EP_RANKS_PER_GPU=2 is for tests"):
        join(settings)


def test_presets_and_defaults() -> None:
    """A model sets the sizes, and an option overrides one; a low-latency run is static and in a graph."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    words = ["dispatch", "--model", "qwen3-235b", "--tokens", "16,128", "--topk", "4", "--commit", "a"]
    found = cli.settings_of(parser.parse_args(words), 8, interpreting=False)
    assert found.shapes == (Shape(16, 4096, 4, 128, 1536), Shape(128, 4096, 4, 128, 1536))
    assert (found.iters, found.alignment, found.capacity, found.graph) == (50, 128, "exact", False)
    found = cli.settings_of(parser.parse_args(["low-latency", "--commit", "a"]), 8, interpreting=False)
    assert (found.shapes[0].tokens, found.capacity, found.graph, found.inputs) == (128, "static", True, 10)


def test_routings() -> None:
    """Experts of a token are distinct, equal on every draw, different per input; skew and one-hot are as named."""
    shape = Shape(200, 1, 3, 16, 1)
    for spec in ("uniform", "zipf:1.5", "one-hot"):
        first, second = routing.draw(spec, shape, 4, 2, 7), routing.draw(spec, shape, 4, 2, 7)
        assert all(torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))
        assert not torch.equal(first[0][1], first[1][1])
        ids = first[0][1].sort(1).values
        assert bool((ids.diff(dim=1) > 0).all()) and ids.min() >= 0 and ids.max() < 16

    def largest(spec: str) -> int:
        return int(torch.bincount(torch.cat(routing.draw(spec, shape, 4, 1, 7)[0]).flatten()).max())

    assert largest("uniform") < 200 < 500 < largest("zipf:1.5") < largest("one-hot") == 800


def test_routing_from_a_file(tmp_path: Path) -> None:
    """Reads [W * T, K] and [W, T, K], .pt and .npy, and several routings in a file; refuses other shapes."""
    shape = Shape(5, 1, 2, 8, 1)
    ids = torch.randint(-1, 8, (2, 3, 5, 2), generator=torch.Generator().manual_seed(0))
    torch.save(ids, tmp_path / "ids.pt")
    found = routing.draw(f"file:{tmp_path / 'ids.pt'}", shape, 3, 4, 0)
    assert [torch.equal(found[n][r].long(), ids[n % 2, r]) for n in range(4) for r in range(3)] == [True] * 12
    import numpy

    numpy.save(tmp_path / "ids.npy", ids[1].reshape(15, 2).numpy())
    assert torch.equal(routing.read_idx(str(tmp_path / "ids.npy"), shape, 3)[0][2].long(), ids[1, 2])
    for other in (Shape(4, 1, 2, 8, 1), Shape(5, 1, 3, 8, 1), Shape(5, 1, 2, 6, 1)):
        with pytest.raises(InputError):
            routing.read_idx(str(tmp_path / "ids.pt"), other, 3)
    with pytest.raises(InputError, match="names no"):
        routing.read_idx(str(tmp_path / "none.pt"), shape, 3)
    torch.save([ids[0], ids[1]], tmp_path / "list.pt")
    assert torch.equal(routing.read_idx(str(tmp_path / "list.pt"), shape, 3)[1][2].long(), ids[1, 2])
    for other, text in (({"ids": ids}, "holds dict"), (ids.float(), "torch.float32 of shape"), ([ids, 3], "be read")):
        torch.save(other, tmp_path / "ids.pt")
        with pytest.raises(InputError, match=text):
            routing.read_idx(str(tmp_path / "ids.pt"), shape, 3)
    (tmp_path / "ids.npy").write_text("no array")
    with pytest.raises(InputError, match="cannot be read"):
        routing.read_idx(str(tmp_path / "ids.npy"), shape, 3)


def test_routings_of_any_file_are_refused_by_name(tmp_path: Path) -> None:
    """Ids may be uint16 or uint64; a file without a table of ids is refused by name, whatever its header claims."""
    import numpy

    shape, ids = Shape(5, 1, 2, 8, 1), numpy.arange(30).reshape(15, 2) % 8
    path = str(tmp_path / "ids.npy")
    for dtype in (numpy.uint16, numpy.uint64, numpy.int8):
        numpy.save(path, ids.astype(dtype))
        assert torch.cat(routing.read_idx(path, shape, 3)[0]).tolist() == ids.tolist()
    far = ids.astype(numpy.uint64)
    far[3, 1] = 2**64 - 1
    numpy.save(path, far)
    with pytest.raises(InputError, match="there are 8 experts"):
        routing.read_idx(path, shape, 3)
    for wrong in (ids.astype(numpy.float16), ids.astype(str), ids > 3, ids.astype("datetime64[s]")):
        numpy.save(path, wrong)
        with pytest.raises(InputError, match="ids are integers"):
            routing.read_idx(path, shape, 3)
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000, 2), }"
    (tmp_path / "ids.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(InputError, match="cannot be read"):
        routing.read_idx(path, shape, 3)
    for wrong in (torch.from_numpy(ids).to_sparse(), torch.from_numpy(ids).to("meta"), torch.ones(15, 2) > 0):
        torch.save(wrong, tmp_path / "ids.pt")
        with pytest.raises(InputError):
            routing.read_idx(str(tmp_path / "ids.pt"), shape, 3)


def test_an_installed_package_measures_and_stores_with_a_commit_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkout printed rows name the release; stored ones need --commit."""
    monkeypatch.setattr(rows, "commit_of_checkout", lambda: None)
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)

    def commit(*words: str) -> str:
        return cli.settings_of(parser.parse_args(["barrier", *words]), 2, interpreting=True).commit

    assert commit() == f"release {triton_ep.__version__}"
    assert commit("--csv", "rows.csv", "--commit", "abc") == "abc"
    with pytest.raises(ConfigError, match="--commit"):
        commit("--csv", "rows.csv")


def test_picture_of_stored_rows(tmp_path: Path) -> None:
    """`bench plot`: a panel per op, the last row of each configuration, filtered by --where and --lines."""
    columns = {"provider": "triton_ep", "payload": "bf16", "nodes": 1, "ranks": 4, "tokens": 8, "gpu": "H200"}
    path, out = tmp_path / "rows.csv", tmp_path / "times.svg"
    stored = [
        rows.make_row({**columns, "op": op, "mode": f"jit-{capacity}-sm{n}", "median_us": us, "floor_us": 5})
        for capacity in ("exact", "static")
        for op in ("dispatch", "combine", "roundtrip")
        for n, us in ((8, 30), (16, 20), (16, 10))
    ]
    stored.append(rows.make_row({**columns, "op": "dispatch", "mode": "jit-exact-sm8", "skip_reason": "no memory"}))
    rows.append_rows(path, stored)
    assert [row["median_us"] for row in plot.newest(stored)] == ["30", "10"] * 6
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    words = ["plot", str(path), "--where", "op=dispatch,combine", "--lines", "static,nccl", "--out", str(out)]
    assert cli.run(parser.parse_args(words)) == 0
    text = out.read_text()
    assert "dispatch, 8 tokens" in text and "combine, 8 tokens" in text and "roundtrip" not in text
    assert "triton_ep jit-static bf16" in text and "jit-exact" not in text and "floor, bf16" in text
    for wrong in (["--where", "speed=1"], ["--where", "op"], ["--routing", "uniform"]):
        with pytest.raises(ConfigError):
            cli.run(parser.parse_args([*words, *wrong]))
    with pytest.raises(InputError, match=r"of the 19 rows .* --where leaves 0"):
        cli.run(parser.parse_args([*words, "--where", "ranks=8"]))


def test_pictures_that_cannot_be_drawn_are_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is measured: another file type, or no matplotlib; the message says what to install."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    with pytest.raises(ConfigError, match="draws exchanges"):
        cli.run(parser.parse_args(["barrier", *TINY, "--plot", "times.svg"]))
    with pytest.raises(ConfigError, match="--stages"):
        cli.run(parser.parse_args(["host", *TINY, "--timeline", "kernels.svg"]))
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        cli.run(parser.parse_args(["dispatch", *TINY, "--plot", "times.pdf"]))
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EPError, match=r"pip install 'triton-ep\[bench\]'"):
        cli.run(parser.parse_args(["dispatch", *TINY, "--timeline", "kernels.svg"]))


def test_picture_of_a_routing(tmp_path: Path) -> None:
    """`bench plot --routing` shows tokens from rank to rank."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    out = tmp_path / "routing.svg"
    words = ["plot", "--routing", "one-hot", "--tokens", "97", "--topk", "2", "--experts", "8", "--ranks", "4"]
    assert cli.run(parser.parse_args([*words, "--out", str(out)])) == 0
    assert "one-hot" in out.read_text() and out.read_text().count(">97<") == 4


def test_timing_takes_the_slowest_rank_of_each_iteration() -> None:
    """The median over iterations of the maximum over ranks; the skew follows from the medians of the ranks."""
    found = timing.summarize([[10.0, 50.0, 10.0], [20.0, 20.0, 30.0]])
    assert found.median_us == 30.0
    assert found.p20_us < 30.0 < found.p80_us
    assert found.skew_pct == pytest.approx(50.0)


def _bytes_by_hand(idxs: list[torch.Tensor], experts: int, per: int, local: bool) -> tuple[list[int], list[int]]:
    """Bytes out of each rank in dispatch and combine, token by token: rows of 1 byte, partial sums of 100 bytes."""
    world = len(idxs)
    there, back = [0] * world, [0] * world
    for source, idx in enumerate(idxs):
        for token in idx.tolist():
            owners = [expert // (experts // world) for expert in token if expert >= 0]
            for node in {owner // per for owner in owners}:
                relay = node * per + source % per
                if relay != source:
                    there[source] += 1
                    back[relay] += 100
                here = [owner for owner in owners if owner // per == node and owner != relay]
                there[relay] += len(set(here))
                for owner in set(here) if local else here:
                    back[owner] += 1
    return there, back


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
@pytest.mark.parametrize("local", [False, True])
def test_bytes_are_those_of_the_protocol(ranks_per_node: int, local: bool) -> None:
    """Rows are deduplicated per rank inside a node and per node across; compared with a loop over tokens."""
    generator = torch.Generator().manual_seed(3)
    idxs = [torch.randint(-1, 12, (9, 5), generator=generator) for _ in range(4)]
    where = routing.Routing.of(idxs, 12, ranks_per_node)
    there, back = _bytes_by_hand(idxs, 12, ranks_per_node, local)
    assert routing.out_of(routing.dispatch_bytes(where, 1)) == there
    assert routing.out_of(routing.combine_bytes(where, 1, 100, local_combine=local)) == back
    sent = [sum(int(((idx >= 0) & (idx // 3 != rank)).sum()) for idx in idxs[rank : rank + 1]) for rank in range(4)]
    assert routing.out_of(routing.plain_bytes(where, 1)) == sent


def test_kernel_times_are_read_from_the_profiler() -> None:
    """Spans by name from a record of torch's profiler: of the CPU here, of the device on a GPU."""
    a = torch.randn(64, 64)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(3):
            torch.mm(a, a)
    spans = timing.spans_of(recorded.events(), DeviceType.CPU)
    found = {s.name: s for s in timing.stages_of([spans])}
    assert found["aten::mm"].per_call == 3 and found["aten::mm"].median_us > 0
    assert "aten::mm" in tables.stage_table(list(found.values()))


def test_calls_are_told_apart_by_marks() -> None:
    """A call has the spans between the second and third of its three marks; overlapping spans count once."""

    def span(name: str, start: float, end: float) -> timing.Span:
        return timing.Span(name, start, end)

    def mark(at: float) -> timing.Span:
        return span("spin_kernel(long)", at, at)

    spans = [mark(0), span("flush", 1, 2), span("meet", 2, 3), mark(4), span("a", 5, 9), span("b", 7, 8), mark(12)]
    spans += [mark(20), span("meet", 21, 22), mark(23), span("a", 24, 26), span("b", 30, 31), mark(32)]
    calls = timing.split_calls(spans, 2)
    assert [[s.name for s in call] for call in calls] == [["a", "b"], ["a", "b"]]
    assert [timing.busy_us(call) for call in calls] == [4, 3]
    assert timing.split_calls(spans[1:], 2) == []


def test_check_names_the_row_that_is_wrong() -> None:
    """Correct rows pass; a changed element fails, even in the last bit."""
    everyone = torch.cat([coded_rows(r, 5, 16, 0, torch.device("cpu")) for r in range(2)])
    assert everyone.unique(dim=0).shape[0] == 10
    source = torch.tensor([3, 9, 9, 0])
    assert first_difference(everyone[source], everyone, source) is None
    wrong = everyone[source].clone()
    wrong.view(torch.int16)[2, 15] ^= 1
    assert "row 2 should be row 9" in str(first_difference(wrong, everyone, source))


class _OneRank(providers._Permuted):
    """Dispatch and combine on one rank, with an optional fault."""

    experts_per_rank, alignment, device = 4, 16, torch.device("cpu")

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def dispatch(self, x: torch.Tensor, idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        want = self.arrivals([idx], 0)
        rows = torch.zeros(int(want.expert_offsets[-1]), x.shape[1], dtype=x.dtype)
        rows[want.place] = x[want.entry // idx.shape[1]]
        if self.fault == "swapped rows":
            rows[:2] = rows[[1, 0]]
        return rows, torch.stack([want.place, want.entry // idx.shape[1]])

    def combine(self, y: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(6, y.shape[1]).index_add_(0, state[1], y[state[0]].float())
        if self.fault == "lost copy":
            out[state[1, -1]] -= y[state[0, -1]].float()
        return (out * float("nan") if self.fault == "not a number" else out).to(y.dtype)


@pytest.mark.parametrize("fault", ["", "swapped rows", "lost copy", "not a number"])
def test_nothing_wrong_is_timed(fault: str) -> None:
    """The check before the timing accepts correct results and names the op of a wrong one."""
    settings = _settings("roundtrip", "--alignment", "16")
    shape = settings.shapes[0]
    job = Job(settings, shape, Place(0, 1, 1, torch.device("cpu"), {}))
    case, one = Case(settings, shape, "triton_ep", "bf16", 1, "exact"), _OneRank(fault)
    if not fault:
        assert set(exchange.checked_calls(job, case, one)) >= {"dispatch", "combine", "roundtrip"}
        return
    with pytest.raises(WrongResult, match="dispatch" if fault == "swapped rows" else "combine"):
        exchange.checked_calls(job, case, one)


def _push_and_copy(rank: int, _nodes: int, _ranks_per_node: int) -> tuple[list[int], list[int]]:
    """First word of each received row, for the push and for the copy."""
    heap, found = current_heap(), []
    target = heap.alloc((6, floor.ROW_BYTES // 8), torch.int64)
    source = (torch.arange(6).unsqueeze(1) + 10 * rank).expand(-1, floor.ROW_BYTES // 8).contiguous()
    neighbour = int(target.addrs[(rank + 1) % 4])
    for way in (lambda: floor.push(source, target.addrs, rank, 3), lambda: floor.copy(neighbour, source)):
        target.local.zero_()
        heap.barrier()
        way()
        heap.barrier()
        assert bool((target.local == target.local[:, :1]).all())
        found.append(target.local[:, 0].tolist())
        heap.barrier()
    heap.free(target)
    return found[0], found[1]


def test_floors_move_what_they_say(run_ranks: Callable[..., Any]) -> None:
    """The push sends every row once, to peers in turn; the copy sends everything to the next rank."""
    for rank, (pushed, copied) in enumerate(run_ranks(_push_and_copy, 1, 4)):
        assert pushed == [row + 10 * ((rank - 1 - row % 3) % 4) for row in range(6)]
        assert copied == [row + 10 * ((rank - 1) % 4) for row in range(6)]


def test_counters_of_nvlink_are_summed() -> None:
    """Counters are summed over links; another output of nvidia-smi is an error, not zero."""
    text = "GPU 0: NVIDIA H200\n\t Link 0: Data Tx: 12 KiB\n\t Link 0: Data Rx: 7 KiB\n\t Link 1: Data Tx: 30 KiB\n"
    assert link_bytes.sent_kib(text) == 42
    with pytest.raises(RuntimeError, match="does not show"):
        link_bytes.sent_kib("Unable to retrieve the counters")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--routing", "nope"], "--routing nope is none of"),
        (["--routing", "uniform:2"], "--routing uniform:2 is none of"),
        (["--routing", "zipf:"], "--routing zipf:S needs a positive number"),
        (["--routing", "zipf:abc"], "--routing zipf:S needs a positive number"),
        (["--routing", "zipf:inf"], "--routing zipf:S needs a positive number"),
        (["--routing", "uniform", "--seed", "-1"], "--seed is -1"),
        (["--routing", "uniform", "--seed", str(2**70)], "--seed is 1180591620717411303424"),
        (["--routing", "uniform", "--tokens", "0"], "--tokens is 0"),
        (["--routing", "uniform", "--tokens", "-5"], "--tokens is -5"),
        (["--routing", "uniform", "--topk", "999"], "--topk 999 exceeds the 256"),
        (["--routing", "uniform", "--experts", "0"], "--experts is 0"),
        (["--routing", "uniform", "--experts", "9"], "--experts 9 cannot be shared evenly by --ranks 8"),
        (["--routing", "uniform", "--ranks", "0"], "--ranks is 0"),
        (["--routing", "one-hot", "--ranks", "-1"], "--ranks is -1"),
        (["BINARY"], "binary.csv cannot be read as rows of a benchmark"),
        (["SHORT"], r"short.csv, line 2: a row has \d+ cells"),
        (["WORDS"], "words.csv, line 2: tokens is 'many'"),
    ],
)
def test_wrong_options_of_plot_are_named(words: list[str], match: str, tmp_path: Path) -> None:
    """Every mistake names its option, or its file and line, and nothing is drawn."""
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short.csv").write_text(f"{rows.HEADER}\ndispatch,triton_ep\n")
    row = rows.make_row({"op": "dispatch", "tokens": "many", "median_us": "3"})
    (tmp_path / "words.csv").write_text("\n".join([rows.HEADER, ",".join(row[name] for name in rows.COLUMNS)]))
    files = {"BINARY": "binary.csv", "SHORT": "short.csv", "WORDS": "words.csv"}
    given = [str(tmp_path / files[word]) if word in files else word for word in words]
    out = tmp_path / "out.svg"
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    with pytest.raises(EPError, match=match):
        cli.run(parser.parse_args(["plot", *given, "--out", str(out)]))
    assert not out.exists()


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """An output path with a file in place of a folder is refused by name."""
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    words = ["plot", "--routing", "uniform", "--tokens", "8", "--ranks", "2", "--experts", "8"]
    with pytest.raises(InputError, match="cannot be written"):
        cli.run(parser.parse_args([*words, "--out", str(tmp_path / "file" / "out.svg")]))


def test_a_wrong_sum_is_told_with_its_place() -> None:
    """The message says how many tokens are wrong and where the first one is; NaN is wrong, too."""
    x = torch.arange(1.0, 13.0, dtype=torch.bfloat16).view(3, 4)
    job: Any = types.SimpleNamespace(rank=2, inputs=[(x, torch.zeros(3, 1))])
    provider: Any = types.SimpleNamespace(copies=lambda idx: torch.tensor([1, 2, 1]), roundings=1)
    out = x * torch.tensor([[1], [2], [1]])
    exchange.check_combine(job, provider, 0, out, "bf16")
    out[1, 2:] += 3
    with pytest.raises(
        WrongResult, match=r"rank 2: off by 3.0 .* in 1 of 3 tokens; of the first, 1, in 2 columns from 2"
    ):
        exchange.check_combine(job, provider, 0, out, "bf16")
    out[0, 3] = torch.nan
    with pytest.raises(WrongResult, match=r"in 2 of 3 tokens; of the first, 0, in 1 columns from 3"):
        exchange.check_combine(job, provider, 0, out, "bf16")
    rows: Any = types.SimpleNamespace(job=job, fp8=False, roundings=1, copies=provider.copies)
    with pytest.raises(
        WrongResult, match=r"rank 2: off by nan .* in 2 of 3 tokens; of the first, 0, in 1 columns from 3"
    ):
        by_source.Checked.check_combine(rows, 0, out)


@pytest.mark.parametrize("value, origin", [(None, "jit"), ("0", "jit"), ("1", "aot"), ("prefer", "prefer-aot")])
def test_rows_say_where_kernels_come_from(monkeypatch: pytest.MonkeyPatch, value: str | None, origin: str) -> None:
    """Compiled kernels of a library are not called JIT's."""
    monkeypatch.delenv("TRITON_EP_AOT", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_EP_AOT", value)
    assert (origin_of_kernels(False), origin_of_kernels(True)) == (origin, "interpreted")
