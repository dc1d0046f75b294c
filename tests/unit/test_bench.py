"""The benchmark does on CPU ranks what it does on GPUs: it checks, times, and stores rows of the agreed form."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests.bench import bench_dispatch_combine as bench
from tests.bench import link_bytes, rows, stages, timing, traffic
from tests.layer.origins import coded_rows, first_difference

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/bench/bench_dispatch_combine.py"
HEADER = (
    "op,provider,mode,payload,nodes,ranks,tokens,hidden,topk,experts,routing,median_us,p20_us,p80_us,skew_pct,"
    "bytes_out,gbps,gpu,driver,torch,triton,nvshmem,commit,date,skip_reason"
)
TINY = ["--ranks", "2", "--tokens", "6", "--hidden", "32", "--topk", "2", "--experts", "4", "--commit", "abc1234"]
TINY += ["--iters", "2", "--warmup", "1"]


def _run(*words: str, heap: str | None = None) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    environment.pop("TRITON_EP_HEAP_SIZE", None)
    if heap:
        environment["TRITON_EP_HEAP_SIZE"] = heap
    done = subprocess.run(
        [sys.executable, SCRIPT, *TINY, *words], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def _read(path: Path) -> list[dict[str, str]]:
    assert path.read_text().splitlines()[0] == HEADER
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_of_a_run(tmp_path: Path) -> None:
    """One row per op and provider, all columns sane; a second run appends below the same header."""
    path = tmp_path / "results" / "rows.csv"
    out = _run("--csv", str(path), "--nodes", "2", "--stages")
    found = _read(path)
    assert [(row["op"], row["provider"]) for row in found] == [
        ("dispatch", "triton_ep"),
        ("combine", "triton_ep"),
        ("dispatch", "gloo"),
        ("combine", "gloo"),
    ]
    for row in found:
        assert 0 < float(row["p20_us"]) <= float(row["median_us"]) <= float(row["p80_us"])
        assert 0 <= float(row["skew_pct"]) < 100
        assert 0 < int(row["bytes_out"]) <= 6 * 2 * 32 * 4
        assert (row["nodes"], row["ranks"], row["gpu"], row["commit"]) == ("2", "2", "cpu", "abc1234")
        assert row["torch"] == torch.__version__ and re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
        assert row["skip_reason"] == ""
    assert "internode_send_kernel" in out and "combine_pull_kernel" in out
    printed = json.loads(
        _run("--csv", str(path), "--provider", "triton_ep", "--capacity", "static", "--num-sm", "1,2", "--json")
    )
    again = _read(path)
    assert again[4:] == printed["rows"]
    assert [row["mode"] for row in again[4:]] == [f"interpreted-static-sm{n}" for n in (1, 1, 2, 2)]


def test_case_without_memory_is_a_row_with_its_reason(tmp_path: Path) -> None:
    """A layer that does not fit is skipped with HeapError's text; the other provider is still measured."""
    path = tmp_path / "rows.csv"
    _run("--csv", str(path), heap="8K")
    found = _read(path)
    assert [bool(row["skip_reason"]) for row in found] == [True, True, False, False]
    assert "HeapError" in found[0]["skip_reason"] and found[0]["median_us"] == found[0]["bytes_out"] == ""
    assert found[0]["commit"] == "abc1234"


def test_too_few_gpus_is_a_row_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bare start that asks for more ranks than there are GPUs says so in each row."""
    settings = bench.parse([*TINY, "--csv", str(tmp_path / "rows.csv"), "--num-sm", "8,16"], 4)
    assert bench.too_few(settings, 0) is None and bench.too_few(settings, 2) is None
    reason = bench.too_few(settings, 1)
    assert reason == "needs 2 GPUs, there are 1"
    bench.skip_all(settings, reason)
    found = _read(tmp_path / "rows.csv")
    assert len(found) == 6 and {row["skip_reason"] for row in found} == {reason}
    assert reason in capsys.readouterr().out


def test_a_file_of_other_columns_is_refused(tmp_path: Path) -> None:
    """Rows never land below a header that is not theirs."""
    path = tmp_path / "rows.csv"
    path.write_text("op,median_us\n")
    with pytest.raises(ValueError, match="columns"):
        rows.append_rows(path, [rows.make_row({"op": "dispatch"})])
    assert path.read_text() == "op,median_us\n"
    with pytest.raises(KeyError, match="speed"):
        rows.make_row({"speed": 1})


@pytest.mark.parametrize(
    "words",
    [["--nodes", "3"], ["--nodes", "2", "--local-world-size", "1"], ["--topk", "9"], ["--provider", "mpi"]],
    ids=" ".join,
)
def test_settings_that_cannot_work_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Before any rank starts."""
    with pytest.raises(SystemExit):
        bench.parse([*TINY, *words], 4)
    assert "error:" in capsys.readouterr().err


def test_timing_takes_the_slowest_rank_of_each_iteration() -> None:
    """Median over iterations of the maximum over ranks; skew from the medians of the ranks."""
    found = timing.summarize([[10.0, 50.0, 10.0], [20.0, 20.0, 30.0]])
    assert found.median_us == 30.0
    assert found.p20_us < 30.0 < found.p80_us
    assert found.skew_pct == pytest.approx(50.0)


def _bytes_by_hand(idxs: list[torch.Tensor], experts: int, per: int, local: bool) -> tuple[list[int], list[int]]:
    """Rows of 1 byte and partial sums of 100 bytes, token by token."""
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
    """De-duplicated per rank inside a node and per node across; compared with a loop over tokens."""
    generator = torch.Generator().manual_seed(3)
    idxs = [torch.randint(-1, 12, (9, 5), generator=generator) for _ in range(4)]
    routing = traffic.Routing.of(idxs, 12, ranks_per_node)
    there, back = _bytes_by_hand(idxs, 12, ranks_per_node, local)
    assert traffic.dispatch_bytes(routing, 1) == there
    assert traffic.combine_bytes(routing, 1, 100, local_combine=local) == back
    sent = [sum(int(((idx >= 0) & (idx // 3 != rank)).sum()) for idx in idxs[rank : rank + 1]) for rank in range(4)]
    assert traffic.plain_bytes(routing, 1)[0] == sent


def test_kernel_times_are_read_from_the_profiler() -> None:
    """Durations by name from a record of torch's profiler: here of the CPU, on a GPU of the device."""
    a = torch.randn(64, 64)
    with profile(activities=[ProfilerActivity.CPU]) as record:
        for _ in range(3):
            torch.mm(a, a)
    found = {s.name: s for s in stages.group(stages.durations(record.events(), DeviceType.CPU), repeats=3)}
    assert found["aten::mm"].per_call == 1 and found["aten::mm"].median_us > 0
    assert "aten::mm" in stages.table(list(found.values()))


def test_check_names_the_row_that_is_wrong() -> None:
    """Rows that are right pass; a changed element, even in the last bit, does not."""
    everyone = torch.cat([coded_rows(r, 5, 16, 0, torch.device("cpu")) for r in range(2)])
    assert everyone.unique(dim=0).shape[0] == 10
    source = torch.tensor([3, 9, 9, 0])
    assert first_difference(everyone[source], everyone, source) is None
    wrong = everyone[source].clone()
    wrong.view(torch.int16)[2, 15] ^= 1
    assert "row 2 should be row 9" in str(first_difference(wrong, everyone, source))


class _OneRank:
    """Dispatch and combine among one rank, with a fault on request."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def dispatch(self, x: torch.Tensor, idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        token = torch.argsort(idx.flatten(), stable=True) // idx.shape[1]
        if self.fault == "swapped rows":
            token = token[[1, 0, *range(2, token.numel())]]
        return x[token], token

    def combine(self, y: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(6, y.shape[1]).index_add_(0, token, y.float())
        if self.fault == "lost copy":
            out[token[-1]] -= y[-1].float()
        return (out * float("nan") if self.fault == "not a number" else out).to(y.dtype)


@pytest.mark.parametrize("fault", ["", "swapped rows", "lost copy", "not a number"])
def test_nothing_wrong_is_timed(fault: str) -> None:
    """The check before the timing passes what is right, and names the op that is not."""
    settings = bench.parse([*TINY, "--ranks", "1"], 1)
    job = bench.Job(settings, 0, 1, 1, torch.device("cpu"), {})
    x, idx = coded_rows(0, 6, 32, 0, job.device), job.idxs[0]
    if not fault:
        bench.check(job, _OneRank(fault), x, idx)
        return
    with pytest.raises(bench.WrongResult, match="dispatch" if fault == "swapped rows" else "combine"):
        bench.check(job, _OneRank(fault), x, idx)


def test_counters_of_nvlink_are_summed() -> None:
    """Over links; another answer of nvidia-smi is an error, not zero."""
    text = "GPU 0: NVIDIA H200\n\t Link 0: Data Tx: 12 KiB\n\t Link 0: Data Rx: 7 KiB\n\t Link 1: Data Tx: 30 KiB\n"
    assert link_bytes.sent_kib(text) == 42
    with pytest.raises(RuntimeError, match="does not show"):
        link_bytes.sent_kib("Unable to retrieve the counters")
