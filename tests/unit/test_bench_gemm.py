"""The benchmark of the grouped GEMM works in the interpreter as on a GPU: it checks, times and stores rows."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
import torch

from tests.bench import bench_grouped_gemm as bench
from tests.programs import run_program
from triton_ep.bench import rows

SCRIPT = Path(bench.__file__)


def test_rows_of_a_run(tmp_path: Path) -> None:
    """A row per case with its shape, a reason if it has no times, and the table printed last."""
    path = tmp_path / "rows.csv"
    words = ["--shape", "tiny", "--rows", "4,ragged16", "--iters", "1", "--warmup", "0", "--commit", "abc1234"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    done = run_program([SCRIPT, *words, "--csv", str(path)], environment, imported=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert list(found[0]) == rows.COLUMNS
    assert [row["op"].removeprefix("grouped_gemm_") for row in found] == (
        ["fprop"] * 5 + ["dgrad"] * 3 + ["wgrad"] * 3
    ) * 2
    for row in found:
        assert (row["hidden"], row["experts"], row["ranks"], row["commit"]) == ("96", "2", "1", "abc1234")
        if row["provider"] == "torch":
            assert "GPU" in row["skip_reason"] and not row["median_us"]
        else:
            assert (
                0 < float(row["p20_us"]) <= float(row["median_us"]) <= float(row["p80_us"]) and not row["skip_reason"]
            )
    assert {row["mode"] for row in found if row["payload"] == "mxfp8"} == {
        f"interpreted-{path}-n64" for path in ("a-mx", "ab-mx", "fp8")
    }
    assert {row["routing"]: row["tokens"] for row in found} == {"equal": "8", "ragged:0": "32"}
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + len(found) and lines[0].split()[:2] == ["shape", "rows"]


@pytest.mark.parametrize("op", ["fprop", "wgrad"])
def test_a_wrong_product_is_not_timed(op: str) -> None:
    """An error as large as the row itself, in one group, ends the run."""
    case = bench.Case("tiny", "4", op, "triton_ep", "bf16")
    given = bench.Operands("tiny", 8, torch.device("cpu"))
    ends = torch.tensor([4, 8], dtype=torch.int32)
    call, operands = bench.product(case, given, ends)
    out = call()
    bench.check(case, out, operands, ends)
    out[-1, -1] += out.abs().max()
    with pytest.raises(bench.WrongResult, match="group 1"):
        bench.check(case, out, operands, ends)


def test_ragged_groups() -> None:
    """Ragged groups have the named mean, one is empty, and all are multiples of 16."""
    sizes = bench.Case("deepseek-v3-up", "ragged256", "fprop", "triton_ep", "bf16").sizes()
    assert len(sizes) == 32 and sum(sizes) == 32 * 256
    assert min(sizes) == 0 and max(sizes) > 512 and not any(size % 16 for size in sizes)


@pytest.mark.parametrize("words", [["--rows", "x"], ["--rows", "ragged"], ["--op", "sum"], ["--iters", "0"]])
def test_bad_options(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Bad options end the run with a message before anything is measured."""
    with pytest.raises(SystemExit):
        bench.main([*words, "--commit", "abc1234"])
    assert words[0] in capsys.readouterr().err
