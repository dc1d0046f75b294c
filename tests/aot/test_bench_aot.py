"""tests/bench/bench_aot.py without GPUs: ranks that fail, hang or write much; rows and table."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench import bench_aot as bench
from tests.patience import LIMIT_S

pytestmark = pytest.mark.plain

FIGURES = {"imported_s": 1.0, "joined_s": 2.0, "layer_s": 3.0, "first_dispatch_s": 4.5}
FIGURES |= {"host_us": 60.0, "host_p20_us": 55.0, "host_p80_us": 70.0}
ABOUT = {name: name for name in ("built_with", "gpu", "driver", "torch", "triton", "nvshmem", "commit", "date")}


def _measure(code: str, timeout_s: float = LIMIT_S, mode: str = "aot") -> dict[str, float]:
    def command(mode: str, batches: int) -> list[str]:
        return [sys.executable, "-S", "-c", f"import os, json, time; rank = int(os.environ['RANK']); {code}"]

    return bench.measure(mode, 2, "/library", "/cache", 5, timeout_s, command)


def test_figures_are_those_of_the_slowest_rank() -> None:
    """However much other output a rank writes."""
    told = f"print('x' * 200000); print('MEASURED', json.dumps({{**{FIGURES}, 'host_us': 60 + rank}}))"
    assert _measure(told) == {**FIGURES, "host_us": 61}


def test_modes_differ_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """JIT modes use no library, whatever the caller's environment says; PYTHONPATH is kept."""
    monkeypatch.setenv("TRITON_EP_AOT", "1")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    names = "[os.environ['TRITON_CACHE_DIR'] == '/cache', 'TRITON_EP_AOT' in os.environ, "
    names += "os.environ['PYTHONPATH'].endswith(':/mine')]"
    told = f"found = {names}; print('MEASURED', json.dumps(dict(zip('abc', map(float, found)))))"
    assert [list(_measure(told, mode=mode).values()) for mode in ("aot", "jit-cold")] == [[1, 1, 1], [1, 0, 1]]


def test_ranks_meet_where_somebody_listens_already() -> None:
    """Ranks meet at the launcher's store, which none of them has to open."""
    code = "import socket; from os import environ as e; "
    code += "socket.create_connection((e['MASTER_ADDR'], int(e['MASTER_PORT'])), timeout=60); "
    told = "print('MEASURED', json.dumps({'agent': float(e['TORCHELASTIC_USE_AGENT_STORE'] == 'True')}))"
    assert _measure(code + told) == {"agent": 1.0}


@pytest.mark.parametrize(
    ("code", "timeout_s", "text"),
    [
        (
            "print('waiting', flush=True); rank or time.sleep(100_000); os._exit(3)",
            LIMIT_S,
            "rank 1 failed.*rank 1 ended with 3.*waiting",
        ),
        ("print('stuck', flush=True); time.sleep(100_000)", 3.0, "not done after 3 s.*rank 0 still runs.*stuck"),
        ("print('nothing')", LIMIT_S, "measured nothing"),
    ],
)
def test_what_goes_wrong_is_shown(code: str, timeout_s: float, text: str) -> None:
    """The error names the rank and shows the output of all ranks; the test waits for nothing in vain."""
    with pytest.raises(RuntimeError, match=f"(?s)aot: .*{text}"):
        _measure(code, timeout_s)


def test_layers_beside_each_other_make_a_row_each() -> None:
    """Each row has the host times of its own layer, and no start-up time."""
    kinds = {"aot": 50.0, "jit": 60.0}
    told = {f"{kind} {name}": base for kind, base in kinds.items() for name in FIGURES if name.startswith("host")}
    rows = bench.rows_of(["beside"], 2, dict(ABOUT), lambda mode: {"imported_s": 1.0, **told})
    found = [(row["mode"], row["imported_s"], row["host_us"], row["host_p80_us"], row["built_with"]) for row in rows]
    assert found == [
        ("aot-beside", "", "50.0", "50.0", "built_with"),
        ("jit-beside", "", "60.0", "60.0", "triton"),
    ]
    assert all(list(row) == bench.COLUMNS for row in rows)


def test_rows_are_stored_with_where_they_are_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cold run fills a warm cache first; a file with other columns is refused."""
    ran: list[str] = []

    def run(mode: str) -> dict[str, Any]:
        ran.append(mode)
        return FIGURES

    rows = bench.rows_of(["aot", "jit-warm"], 4, dict(ABOUT), run)
    assert ran == ["aot", "jit-cold", "jit-warm"]
    assert [(row["mode"], row["built_with"], row["commit"]) for row in rows] == [
        ("aot", "built_with", "commit"),
        ("jit-warm", "triton", "commit"),
    ]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    shown = bench.table(rows).splitlines()
    assert shown[0].split()[:2] == ["mode", "gpus"] and "4.50" in shown[1] and len(shown) == 3
    ran.clear()
    bench.rows_of(["jit-cold", "jit-warm", "aot"], 4, dict(ABOUT), run)
    assert ran == ["jit-cold", "jit-warm", "aot"]
    path = tmp_path / "new" / "aot.csv"
    bench.store(path, rows)
    bench.store(path, rows)
    lines = path.read_text().splitlines()
    assert lines[0].split(",") == bench.COLUMNS and len(lines) == 5
    path.write_text("a,b\n")
    with pytest.raises(RuntimeError, match="has the columns"):
        bench.store(path, rows)
