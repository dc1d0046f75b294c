"""The benchmark of a job's start: every step has a row."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.bench import bench_start as bench

SIZES = ("--ranks", "2", "--tokens", "4", "--hidden", "32", "--experts", "4", "--topk", "2")


def test_a_row_per_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    bench.main([*SIZES, "--repeats", "1", "--commit", "abc1234", "--csv", str(path)])
    with path.open(newline="") as file:
        rows = {row["op"]: row for row in csv.DictReader(file)}
    assert tuple(rows) == bench.STEPS
    assert {row["mode"] for row in rows.values()} == {"interpreted-exact-host"}
    steps = [float(rows[op]["median_us"]) for op in bench.STEPS[:-1]]
    assert max(steps) <= float(rows["start"]["median_us"]) <= 1.001 * sum(steps) + 1
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split()[-1] == "ms" and line.split()[0] == "host"
