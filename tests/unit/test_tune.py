"""Tuned tables: reading, writing, errors with line numbers, the choices of layers, and the search for faster ones."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from triton_ep.bench import rows, run, tune
from triton_ep.bench.settings import TUNED, Settings, parse_programs
from triton_ep.cli import bench, doctor, main
from triton_ep.cli import tune as cli
from triton_ep.config import EPConfig
from triton_ep.context import choice as choose
from triton_ep.errors import ConfigError
from triton_ep.kernels.device.codes import LANDING_WORDS, WORDS
from triton_ep.layer import EPAll2AllLayer
from triton_ep.runtime.machine import inspect_machine, judge
from triton_ep.runtime.plans import Plan, exchange
from triton_ep.runtime.tuned.table import (
    KernelChoice,
    Key,
    TunedEntry,
    format_table,
    look_up,
    merged,
    parse_table,
    read_table,
    tables,
)

pytestmark = pytest.mark.plain

ROOT = Path(__file__).resolve().parents[2]
ENTRY = TunedEntry(
    key=Key("cpu", 2, 1, "bf16", 32, 8),
    num_sm=1,
    topk=2,
    experts=4,
    local_combine=True,
    dispatch_us=10.5,
    combine_us=20.0,
    commit='abc "quoted" \\ 1234',
    date="2026-11-21",
    push=KernelChoice(2, 16),
    expand=KernelChoice(1, 2),
    reduce=KernelChoice(2, 32),
    pull=KernelChoice(1, 8),
)
TEXT = format_table([ENTRY])


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Every key survives, with and without kernels; entries are sorted; a new entry replaces the old one."""
    plain = replace(ENTRY, key=replace(ENTRY.key, tokens=16), push=None, expand=None, reduce=None, pull=None)
    path = tmp_path / "tuned.toml"
    path.write_text(format_table([plain, ENTRY]))
    assert read_table(path) == [replace(entry, source=str(path)) for entry in (ENTRY, plain)]
    assert merged([ENTRY, plain], [replace(ENTRY, num_sm=7)]) == [replace(ENTRY, num_sm=7), plain]


@pytest.mark.parametrize(
    ("old", "new", "line", "what"),
    [
        ("num_sm = 1\n", "num_sm = 1\nwarps = 4\n", 12, "no key 'warps'"),
        ("num_sm = 1\n", "", 4, "'num_sm' is missing"),
        ("num_sm = 1\n", 'num_sm = "1"\n', 11, "num_sm is '1', where an integer is needed"),
        ("num_sm = 1\n", "num_sm = true\n", 11, "num_sm is True, where an integer"),
        ("num_sm = 1\n", "num_sm = 0\n", 11, "num_sm is 0; it must be above 0"),
        ("num_sm = 1\n", "num_sm = 2000\n", 11, "at most 1024"),
        ("num_sm = 1\n", "num_sm = = 1\n", 11, "no TOML"),
        ("num_sm = 1\n", "num_sm = 1\nnum_sm = 2\n", 12, "no TOML"),
        ("local_combine = true\n", "local_combine = 1\n", 14, "local_combine is 1, where true or false"),
        ('payload = "bf16"', 'payload = "fp8"', 8, "payload is 'fp8', none of bf16, mxfp8"),
        ("tokens = 8\n", "tokens = 9\n", 10, "tokens is 9, no power of two"),
        ("push = { rows = 2, warps = 16 }", "push = 2", 19, "push is 2, where { rows"),
        ("push = { rows = 2, warps = 16 }", "push = { rows = 2 }", 19, "push is {'rows': 2}"),
        ("push = { rows = 2, warps = 16 }", "push = { rows = 3, warps = 16 }", 19, "rows of push is 3"),
        ("push = { rows = 2, warps = 16 }", "push = { rows = 2, warps = 64 }", 19, "power of two up to 32"),
        ("format = 1\n", "", 1, "'format' is missing"),
        ("format = 1\n", "format = 2\n", 2, "format is 2; this version reads 1"),
        ("format = 1\n", "format = 1\nversion = 3\n", 3, "no key 'version'"),
        ("[[entry]]", "[entry]", 1, r"written as \[\[entry\]\]"),
    ],
)
def test_a_malformed_table_is_refused(tmp_path: Path, old: str, new: str, line: int, what: str) -> None:
    """A malformed table raises a ConfigError that names file and line."""
    assert TEXT.count(old) == 1
    path = tmp_path / "tuned.toml"
    path.write_text(TEXT.replace(old, new))
    with pytest.raises(ConfigError, match=what) as error:
        read_table(path)
    assert str(error.value).startswith(f"{path}:{line}: ")


def test_texts_and_numbers_of_anybody(tmp_path: Path) -> None:
    """Control characters, quotes and backslashes survive; invalid numbers are refused with their line."""
    odd = replace(ENTRY, commit='a"b\\c\n\x00\x1f\x7f\u00e9', date="\t")
    (read,) = parse_table(format_table([odd]), "x")
    assert (read.commit, read.date) == (odd.commit, odd.date)
    for value in ("1" + "0" * 400, "inf", "1e300"):
        with pytest.raises(ConfigError, match=r"^x:\d+: dispatch_us is"):
            parse_table(re.sub(r"dispatch_us = .*", f"dispatch_us = {value}", TEXT), "x")
    with pytest.raises(ConfigError, match=r"^x: this is no table"):
        parse_table("x = " + "[" * 5000, "x")


def test_the_second_entry_is_named_by_its_own_line() -> None:
    """An error names the line of its own entry, also if two entries have the same key."""
    second = format_table([ENTRY]).split("\n\n")[1]
    with pytest.raises(ConfigError, match=r"^x:24: .* there already, in line 4"):
        parse_table(TEXT + "\n" + second, "x")
    with pytest.raises(ConfigError, match=r"^x:31: num_sm is -1"):
        parse_table(TEXT + "\n" + second.replace("num_sm = 1", "num_sm = -1"), "x")


def test_tables_are_asked_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of TRITON_EP_TUNED is searched first, then those of the package."""
    packaged = tables()
    assert [name for name, _ in packaged] == ["triton_ep/runtime/tuned/h200.toml"]
    known = packaged[0][1][0]
    path = tmp_path / "mine.toml"
    path.write_text(format_table([replace(known, num_sm=known.num_sm + 8), ENTRY]))
    monkeypatch.setenv("TRITON_EP_TUNED", str(path))
    assert [name for name, _ in tables()] == [str(path), "triton_ep/runtime/tuned/h200.toml"]
    found = look_up(known.key)
    assert found is not None and (found.num_sm, found.source) == (known.num_sm + 8, str(path))
    assert look_up(packaged[0][1][-1].key) == packaged[0][1][-1]
    assert look_up(replace(known.key, gpu="another")) is None
    monkeypatch.setenv("TRITON_EP_TUNED", str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        tables()


def test_packaged_entries_were_measured() -> None:
    """Times in packaged tables not written by `triton-ep tune` are among the stored rows of their commit."""
    stored = rows.read_rows(ROOT / "docs/benchmarks/results/dispatch_combine.csv")
    times = {(row["commit"], row["op"], row["median_us"]) for row in stored}
    commits = {commit for commit, _, _ in times}
    for _, entries in tables():
        for entry in entries:
            assert entry.key.gpu.startswith("NVIDIA ")
            if "until `triton-ep tune` has run" in (ROOT / entry.source).read_text():
                assert entry.commit in commits
                assert (entry.commit, "dispatch", f"{entry.dispatch_us}") in times
                assert (entry.commit, "combine", f"{entry.combine_us}") in times


def test_formula() -> None:
    """24 programs on an H200, more for faster links, at most a quarter of the multiprocessors, two if interpreted."""
    assert choose.programs_for(343, 132) == 24
    assert choose.programs_for(686, 148) == 37
    assert choose.programs_for(230, 108) == 16
    assert choose.programs_for(343, 2) == 1
    assert choose.default_num_sm(torch.device("cpu")) == 2


def _config(**changes: Any) -> EPConfig:
    sizes = {"max_tokens": 5, "hidden": 32, "topk": 2, "num_experts": 4, "rank": 0, "world_size": 2}
    return EPConfig(**{**sizes, "local_world_size": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, Key("cpu", 2, 1, "bf16", 32, 8)),
        ({"max_tokens": 8, "token_dtype": torch.float16}, Key("cpu", 2, 1, "bf16", 32, 8)),
        ({"max_tokens": 9, "payload": "mxfp8"}, Key("cpu", 2, 1, "mxfp8", 32, 16)),
        ({"max_tokens": 1, "local_world_size": 1}, Key("cpu", 1, 2, "bf16", 32, 1)),
        ({"token_dtype": torch.float32}, Key("cpu", 2, 1, "float32", 32, 8)),
    ],
)
def test_key_of_a_layer(changes: dict[str, Any], key: Key) -> None:
    """Tokens are rounded up to a power of two; all 16-bit rows share a key; float32 rows have a key of no table."""
    assert choose.key_of(_config(**changes), torch.device("cpu")) == key


def test_kernels_take_what_the_entry_says() -> None:
    """On a GPU: rows and warps, with registers limited so that push and expand fit together. Interpreted: no effect."""
    config = _config(tuned=ENTRY, enable_local_combine=True, hidden=256)

    def plans_of(config: EPConfig, interpreted: bool) -> list[Plan]:
        s = config.shape(interpreted=interpreted)
        push, expand = exchange.push(s, WORDS, 8), exchange.expand(s, LANDING_WORDS, False, False, 8)
        return [push, expand, exchange.reduce(s, False), exchange.pull(s, False, True)]

    found = plans_of(config, interpreted=False)
    assert [plan.constexprs["ROWS"] for plan in found] == [2, 1, 2, 1]
    assert [(plan.num_warps, plan.maxnreg) for plan in found] == [(16, 64), (2, 255), (32, 64), (8, 64)]
    for interpreted in (True, False):
        built_in = plans_of(replace(config, tuned=None), interpreted)
        assert [(plan.num_warps, plan.maxnreg) for plan in built_in] == [(16, 64), (4, 128), (16, 64), (8, 64)]
    assert plans_of(config, interpreted=True) == plans_of(replace(config, tuned=None), interpreted=True)


def _layer(rank: int, ranks_per_node: int, **options: Any) -> EPAll2AllLayer:
    return EPAll2AllLayer(dist.group.WORLD, 5, 32, 2, rank, 4, ranks_per_node, dist.get_world_size(), **options)


def _check_choices(rank: int, _nodes: int, ranks_per_node: int, folder: str) -> None:
    """Layers by formula, by an entry, by TRITON_EP_TUNED; and ranks that find different choices."""
    with _layer(rank, ranks_per_node, num_sm=None) as layer:
        assert (layer.config.num_sm, layer.config.tuned) == (2, None)
    with pytest.raises(ConfigError, match=r"num_sm=20 and a tuned entry with 1"):
        _layer(rank, ranks_per_node, tuned=ENTRY)
    with _layer(rank, ranks_per_node, num_sm=None, tuned=ENTRY) as layer:
        assert (layer.config.num_sm, layer.config.tuned) == (1, ENTRY)
    try:
        os.environ["TRITON_EP_TUNED"] = f"{folder}/tuned.toml"
        with _layer(rank, ranks_per_node, num_sm=None) as layer:
            assert (layer.config.num_sm, layer.config.tuned) == (1, read_table(Path(f"{folder}/tuned.toml"))[0])
            x = torch.full((5, 32), rank + 1.0, dtype=torch.bfloat16)
            idx = torch.tensor([[0, 3]] * 5, dtype=torch.int32)
            recv_x, _, desc = layer.dispatch(x, idx)
            assert torch.equal(layer.combine(recv_x, desc), 2 * x)
        with _layer(rank, ranks_per_node) as layer:  # an explicit number needs no look-up
            assert (layer.config.num_sm, layer.config.tuned) == (20, None)
        if rank == 1:
            del os.environ["TRITON_EP_TUNED"]
        with pytest.raises(ConfigError, match=r"num_sm=[12] .*rank [01] with [12]"):
            _layer(rank, ranks_per_node, num_sm=None)
        if rank == 1:
            os.environ["TRITON_EP_TUNED"] = f"{folder}/none.toml"
        with pytest.raises(
            ConfigError, match="none.toml cannot be read" if rank else "rank 1 cannot choose num_sm: .*none"
        ):
            _layer(rank, ranks_per_node, num_sm=None)
    finally:
        os.environ.pop("TRITON_EP_TUNED", None)


def test_layers_take_what_they_find(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """With num_sm=None layers take the entry or the formula, shown in `config`; if ranks differ, all raise an error."""
    (tmp_path / "tuned.toml").write_text(TEXT)
    run_ranks(_check_choices, 1, 2, str(tmp_path))


def _request(*words: str, interpreting: bool = True, ranks: int = 2) -> tune.Request:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    sizes = ["--tokens", "6", "--hidden", "32", "--topk", "2", "--experts", "4", "--commit", "abc1234"]
    return cli.request_of(parser.parse_args([*sizes, *words]), ranks, interpreting=interpreting)


def _tune(_rank: int, _nodes: int, _ranks_per_node: int, request: tune.Request) -> list[list[tune.Trial]]:
    """Run `triton-ep tune` in existing ranks."""
    return tune.tune_all(request)


def test_tune_on_cpu_ranks(run_ranks: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every candidate is timed; the table has the chosen one under the layer's key; old entries stay."""
    path = tmp_path / "new" / "tuned.toml"
    request = _request("--out", str(path), "--iters", "1", "--payload", "mxfp8", "--json")
    all_trials = run_ranks(_tune, 1, 2, request)
    assert all_trials[0] == all_trials[1]
    (trials,) = all_trials[0]
    assert [trial.entry.num_sm for trial in trials[:2]] == [1, 2] and len(trials) == request.measurements() == 3
    path.parent.mkdir()
    path.write_text(TEXT)
    tune.finish(request, all_trials[0])
    told = json.loads(capsys.readouterr().out)
    assert len(told["trials"][0]) == 3 and told["entries"][0]["key"]["payload"] == "mxfp8"
    new = next(entry for entry in read_table(path) if entry.key.payload == "mxfp8")
    assert new.key == choose.key_of(_config(max_tokens=6, payload="mxfp8"), torch.device("cpu"))
    assert (new.commit, new.topk, new.experts, new.local_combine, new.push) == ("abc1234", 2, 4, True, None)
    assert new.dispatch_us > 0 and new.combine_us > 0 and len(read_table(path)) == 2


def _bench(_rank: int, _nodes: int, _ranks_per_node: int, settings: Settings, table: str) -> list[dict[str, str]]:
    """Rows of a benchmark in existing ranks, with a table in TRITON_EP_TUNED."""
    os.environ["TRITON_EP_TUNED"] = table
    try:
        return run.measure_all(settings).rows
    finally:
        del os.environ["TRITON_EP_TUNED"]


def test_benchmark_by_the_tables(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """`triton-ep bench --num-sm auto` measures a layer with num_sm=None; its rows say so."""
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    words = [
        "dispatch",
        "--num-sm",
        "auto",
        "--provider",
        "triton_ep",
        "--alignment",
        "1",
        "--iters",
        "1",
        "--warmup",
        "0",
        "--commit",
        "abc",
    ]
    words += ["--tokens", "6", "--hidden", "32", "--topk", "2", "--experts", "4"]
    settings = bench.settings_of(parser.parse_args(words), 2, interpreting=True)
    (tmp_path / "tuned.toml").write_text(TEXT)
    found = run_ranks(_bench, 1, 2, settings, str(tmp_path / "tuned.toml"))[0]
    assert [row["mode"] for row in found if row["op"] == "dispatch"] == ["interpreted-exact-tuned"]
    both = replace(settings, num_sm=(4, TUNED), providers=("deep_ep", "triton_ep"))
    modes = [case.mode for case in both.cases()]
    assert modes == ["exact-sm4-unpermuted", "interpreted-exact-sm4", "interpreted-exact-tuned"]


@pytest.mark.parametrize("text", ["-1", "0", "4,-2", "auto,x", "automatic"])
def test_programs_are_numbers_or_auto(text: str) -> None:
    """Anything else is refused with the option's name."""
    assert parse_programs("auto,8", "--num-sm") == (TUNED, 8)
    with pytest.raises(ConfigError, match="--num-sm"):
        parse_programs(text, "--num-sm")


def _search(monkeypatch: pytest.MonkeyPatch, request: tune.Request, cost: Callable[[TunedEntry, str], float]) -> Any:
    """Run a search whose measured times come from `cost`."""
    search = tune._Search(request, SimpleNamespace(shape=request.settings.shapes[0]), "bf16", lambda _: None)  # type: ignore[arg-type]

    def measured(entry: TunedEntry, *ops: str) -> tune.Trial:
        times = {f"{op}_us": cost(entry, op) if op in ops else None for op in ("dispatch", "combine")}
        search.trials.append(tune.Trial(entry, **times))
        return search.trials[-1]

    monkeypatch.setattr(search, "_try", measured)
    return search.run()


def test_search_keeps_what_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefers fewer programs if more gain little; changes a kernel only if that gains; searches kernels in turn."""

    def cost(entry: TunedEntry, op: str) -> float:
        found = 1000.0 if op == "dispatch" else 2000.0
        found *= {8: 2.0, 16: 1.5, 20: 1.1, 24: 1.01, 32: 1.0, 48: 1.0, 64: 0.995}[entry.num_sm]
        gains = {("push", 4, 8): 0.8, ("push", 1, 16): 0.9, ("expand", 1, 8): 0.995, ("pull", 2, 32): 0.5}
        for name in ("push", "expand") if op == "dispatch" else ("reduce", "pull"):
            choice = entry.kernel(name)
            found *= 1.0 if choice is None else gains.get((name, choice.rows, choice.warps), 1.2)
        return found

    request = _request(interpreting=False)
    trials = _search(monkeypatch, request, cost)
    assert len(trials) == request.measurements() and tuple(t.entry.num_sm for t in trials[:7]) == tune.NUM_SM
    entry = trials[-1].entry
    assert (entry.num_sm, entry.push, entry.expand, entry.reduce) == (24, KernelChoice(4, 8), None, None)
    assert entry.pull == KernelChoice(2, 32)
    assert (entry.dispatch_us, entry.combine_us) == (round(1010 * 0.8, 1), round(2020 * 0.5, 1))
    few = _request("--quick", "--no-local-combine", interpreting=False)
    assert few.measurements() == 10 and "reduce" not in few.kernels()
    assert _search(monkeypatch, few, cost)[-1].entry.local_combine is False


@pytest.mark.parametrize("kernel", tune._KERNELS)
@pytest.mark.parametrize("pairs", [tune._KERNELS, tune._QUICK_KERNELS])
def test_candidates_may_stand_in_a_table(kernel: str, pairs: dict[str, tuple[tuple[int, int], ...]]) -> None:
    """Every candidate of a search can be stored and read again."""
    for rows_of_program, warps in pairs[kernel]:
        entry = replace(ENTRY, **{kernel: KernelChoice(rows_of_program, warps)})
        assert parse_table(format_table([entry]), "")[0] == entry


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--experts", "3"], "3 experts cannot be shared evenly by 2"),
        (["--num-sm", "a"], "--num-sm a is no integer"),
        (["--payload", "fp8"], "--payload fp8"),
        (["--nodes", "3"], "cannot be shared evenly by 3 nodes"),
        (["--iters", "0"], "--iters is 0"),
        (["--num-sm", ""], "--num-sm  is no integer"),
    ],
)
def test_what_cannot_be_tuned_is_refused(words: list[str], match: str) -> None:
    """Refused before any rank starts."""
    with pytest.raises(ConfigError, match=match):
        _request(*words)


def test_an_unreadable_table_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If `--out` names a file that is no table, nothing is measured and nothing overwritten."""
    path = tmp_path / "notes.txt"
    path.write_text("not a table")
    assert main(["tune", "--out", str(path), "--commit", "abc"]) == 1
    assert f"{path}:1: this is no TOML" in capsys.readouterr().err and path.read_text() == "not a table"


def test_a_table_that_cannot_be_written_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If the path of `--out` cannot be written, nothing is measured."""
    (tmp_path / "file").write_text("")
    assert main(["tune", "--out", str(tmp_path / "file" / "tuned.toml"), "--commit", "abc"]) == 1
    assert f"{tmp_path}/file/tuned.toml cannot be written" in capsys.readouterr().err


def test_doctor_names_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor shows each table's number of entries for this machine; a malformed table is a problem."""
    path = tmp_path / "mine.toml"
    path.write_text(TEXT)
    monkeypatch.setenv("TRITON_EP_TUNED", str(path))
    machine = inspect_machine()
    plan = judge(machine)
    plan = replace(plan, backend="host")
    found = doctor._tuned_tables(plan)
    assert f"{path}: 1 entries, 1 for this machine" in doctor.page(machine, plan, None, "", found, {})
    keys = doctor.as_json(machine, plan, None, "", found)["tuned_tables"][0]["keys"]
    assert keys == ["cpu, 1 x 2 ranks, bf16, hidden 32, up to 8 tokens"]
    path.write_text("x = 1")
    assert doctor._tuned_tables(plan) == [] and "mine.toml:1: there is no key 'x'" in plan.problems[-1].what
