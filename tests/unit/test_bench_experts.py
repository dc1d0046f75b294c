"""The benchmark of the experts works in the interpreter as on a GPU: it checks, times and stores rows."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from tests.bench import bench_experts as bench
from triton_ep.bench import rows
from triton_ep.bench.timing import Timing

CPU = torch.device("cpu")


def test_rows_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row per case with its shape, a reason if it has no times, then the tables."""
    path = tmp_path / "rows.csv"
    words = ["--rows", "odd9", "--terms", "64", "--iters", "1", "--warmup", "0", "--commit", "abc1234"]
    bench.main([*words, "--csv", str(path)])
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert list(found[0]) == rows.COLUMNS
    ops = [row["op"] for row in found]
    assert {"experts_gate_up", "experts_down", "experts_dx", "experts_down_dgrad", "experts_wgrad2"} <= set(ops)
    for row in found:
        assert (row["experts"], row["ranks"], row["commit"]) == ("3", "1", "abc1234")
        assert (row["provider"] == "torch") == ("GPU" in row["skip_reason"]) == (not row["median_us"])
    assert {"interpreted-fp8-mx-out-tiny", "interpreted-bf16-tiny"} <= {row["mode"] for row in found}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["rows", "what", "how"]
    assert [line.split("  ")[0] for line in lines[-4:]] == list(bench.KINDS)


def test_a_wrong_product_is_not_timed() -> None:
    """An error as large as the row itself, in the last segment, ends the run."""
    given = bench.Operands("tiny", [4, 0, 3], CPU)
    *_, case = bench.forward(given)
    assert case.exact is not None
    out = case.call()
    out[-1] += out[-1].abs().max()
    spoilt = bench.Case(case.part, case.what, case.how, lambda: out, case.exact)
    with pytest.raises(bench.WrongResult, match="down, fp8 fast: off by"):
        bench.measure([case, spoilt], CPU, 1, 0)


def test_cases_of_a_result_take_turns() -> None:
    """Each is called once to be checked, then bursts alternate; warm-up calls are not counted."""
    calls: list[str] = []
    cases = [bench.Case("forward", "down", how, lambda how=how: calls.append(how)) for how in ("one", "two")]
    found = bench.measure(cases, CPU, iters=6, warmup=1)
    assert calls == ["one", "two"] + (["one"] * 3 + ["two"] * 3) * 3
    assert [case.how for case, *_ in found] == ["one", "two"]
    assert all(isinstance(timing, Timing) for _, timing, _ in found)


def test_sizes() -> None:
    """The sizes have the named mean; ragged ones are multiples of 128."""
    assert bench.sizes_of("512", 3) == [512] * 3
    for text, step in (("ragged512", 128), ("odd512", 1)):
        sizes = bench.sizes_of(text, 8)
        assert sizes[0] == 0 and sum(sizes) == 512 * 8 and all(size % step == 0 for size in sizes)
