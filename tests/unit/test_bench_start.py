"""The benchmark of a job's start: every step has a row."""

from __future__ import annotations

import csv
from pathlib import Path

from tests.bench import bench_start as bench
from tests.programs import environment_of_programs, run_program

SIZES = ("--ranks", "2", "--tokens", "4", "--hidden", "32", "--experts", "4", "--topk", "2")


def test_a_row_per_step(tmp_path: Path) -> None:
    """Each step has a row, and the whole start is their sum."""
    path = tmp_path / "rows.csv"
    words = [*SIZES, "--repeats", "1", "--commit", "abc1234", "--csv", path]
    done = run_program([bench.__file__, *words], environment_of_programs(), imported=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    with path.open(newline="") as file:
        rows = {row["op"]: row for row in csv.DictReader(file)}
    assert tuple(rows) == bench.STEPS
    assert {row["mode"] for row in rows.values()} == {"interpreted-exact-host"}
    steps = [float(rows[op]["median_us"]) for op in bench.STEPS[:-1]]
    assert max(steps) <= float(rows["start"]["median_us"]) <= 1.001 * sum(steps) + 1
    heading, line = done.stdout.splitlines()
    assert heading.split()[-1] == "ms" and line.split()[0] == "host"
