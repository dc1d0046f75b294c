"""`triton-ep demo`: the run, and whether its counters and verdict detect errors."""

import dataclasses
import re
import struct
from pathlib import Path

import pytest
import torch

from tests.programs import environment_of_programs, run_program
from triton_ep.cli import demo, main
from triton_ep.cli.demo import choose_ranks
from triton_ep.cli.demo_report import (
    Comparison,
    Noise,
    PayloadResult,
    RankResult,
    Traffic,
    draw_routing,
    expected_traffic,
    failures,
    payload_table,
)


def test_demo_equals_the_dense_layer(tmp_path: Path) -> None:
    """4 ranks as 2 nodes x 2: the table has a line per rank, the verdict is PASS, the picture is a PNG.

    Runs as a separate program: ranks of this process keep writing where its first ranks wrote.
    """
    picture = tmp_path / "routing.png"
    words = ["--tokens", "12", "--hidden", "256", "--experts", "8", "--picture", picture]
    done = run_program(["-m", "triton_ep.cli", "demo", *words], environment_of_programs(), imported=True)
    assert done.returncode == 0, done.stdout + done.stderr
    output = done.stdout
    assert "PASS" in output
    assert "received" in output
    steps = re.findall(r"^\[(\d)/4\] ", output, re.MULTILINE)  # printed during the run, by one rank
    assert steps == ["1", "2", "3", "4"] and output.index("[4/4]") < output.index("received")
    of_layer = output.split("triton_ep.nn.MoE")[0]
    rows = {
        line.split()[0]: line.split()[1:] for line in of_layer.splitlines() if line.strip().startswith(("bf16", "mx"))
    }
    assert rows["bf16"][0] == "512" and rows["bf16"][3:5] == ["0.0%", "exact"]
    assert rows["mxfp8"][0] == "384" and rows["mxfp8"][3] == "25.0%"  # 256 + 8, padded to multiples of 128
    assert float(rows["mxfp8"][4]) > 30 and float(rows["mxfp8"][5]) > 28
    module = output.split("triton_ep.nn.MoE")[1].split("routing picture")[0]
    found = re.findall(r"^ *(bf16|mxfp8) +([\d.]+) +([\d.]+)$", module, re.MULTILINE)
    assert [name for name, *_ in found] == ["bf16", "mxfp8"]
    assert all(float(value) > least for (_, *values), least in zip(found, (36, 20), strict=True) for value in values)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_demo_names_a_wrong_option(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake is one line on stderr and exit code 1, not a traceback."""
    assert main(["demo", "--tokens", "0"]) == 1
    assert "--tokens is 0" in capsys.readouterr().err
    assert main(["demo", "--hidden", "48"]) == 1
    assert "--hidden is 48" in capsys.readouterr().err
    assert main(["demo", "--experts", "6"]) == 1
    assert "--experts is 6; 4 ranks need a multiple of 4" in capsys.readouterr().err
    assert main(["demo", "--topk", "17"]) == 1
    assert "--topk is 17; with 16 experts it is 1 to 16" in capsys.readouterr().err


def test_demo_is_for_one_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a launcher every process would start four ranks, so the demo refuses."""
    for name, value in {"RANK": 0, "SIZE": 4, "LOCAL_RANK": 0, "LOCAL_SIZE": 4}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    assert main(["demo"]) == 1
    assert "mpirun started 4 processes" in capsys.readouterr().err


def test_a_package_that_is_missing_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing package gives one line and the command to run next; a missing module of this package is an error."""

    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(demo, "run", lambda _: missing("torch"))
    assert main(["demo"]) == 1
    assert "torch is not installed here" in (told := capsys.readouterr().err) and "triton-ep doctor" in told
    monkeypatch.setattr(demo, "run", lambda _: missing("triton_ep.nowhere"))
    with pytest.raises(ModuleNotFoundError):
        main(["demo"])


# 2 nodes x 2 ranks, one expert per rank. Token 0 of rank 0 goes everywhere, token 1 only to rank 3, through gateway
# rank 2; rank 1 keeps its token; rank 2 drops one assignment; rank 3 has no token.
ROUTING = [
    torch.tensor([[0, 1, 2, 3], [3, -1, -1, -1]]),
    torch.tensor([[1, -1, -1, -1]]),
    torch.tensor([[3, 4, -1, -1]]),
    torch.zeros(0, 4, dtype=torch.int64),
]
TRAFFIC = [
    Traffic(local=1, network=2, forwarded=0, arrived=1),
    Traffic(local=0, network=0, forwarded=0, arrived=2),
    Traffic(local=1, network=0, forwarded=2, arrived=1),
    Traffic(local=0, network=0, forwarded=0, arrived=3),
]


def test_traffic_of_a_routing_counted_by_hand() -> None:
    """One row per rank of the same node, one per other node; the second hop counts on the forwarding rank."""
    assert expected_traffic(ROUTING, num_experts=4, ranks_per_node=2) == TRAFFIC
    assert [t.sent for t in TRAFFIC] == [3, 0, 1, 0]
    assert [t.nvlink for t in TRAFFIC] == [1, 0, 3, 0]


def _payload(traffic: Traffic, row_bytes: int, noise: float) -> PayloadResult:
    return PayloadResult(
        row_bytes=row_bytes, traffic=traffic, signal=25.0, noise=noise, combined=torch.zeros(traffic.arrived, 8)
    )


def _results() -> list[RankResult]:
    return [
        RankResult(topk_idx=idx, received=1, bf16=_payload(traffic, 1024, 0.0), mxfp8=_payload(traffic, 528, 0.025))
        for idx, traffic in zip(ROUTING, TRAFFIC, strict=True)
    ]


GOOD = [Comparison(0.0, 0.0, 0.01, signal=1.0, noise=0.01)] * 4


@pytest.mark.parametrize("max_rel", [0.02, float("nan")])
def test_a_wrong_result_fails(max_rel: float) -> None:
    """An error beyond rounding, or a NaN, is a failure that names the rank and the payload."""
    bad = [*GOOD[:3], Comparison(1.0, max_rel, 0.01)]
    assert failures(_results(), GOOD, GOOD, 4, 2) == []
    assert [text.split(":")[0] for text in failures(_results(), bad, GOOD, 4, 2)] == ["rank 3, bf16"]
    assert [text.split(":")[0] for text in failures(_results(), GOOD, bad, 4, 2)] == ["rank 3, mxfp8"]


@pytest.mark.parametrize("noise", [1.0, float("nan")])
def test_a_wrong_module_fails(noise: float) -> None:
    """Noise beyond rounding, or a NaN, in one part of one rank is a failure."""
    good = {name: {part: Noise(signal=1e4, noise=1.0) for part in ("result", "gradient")} for name in ("bf16", "mxfp8")}
    results = [dataclasses.replace(result, module=good) for result in _results()]
    assert failures(results, GOOD, GOOD, 4, 2) == []
    worse = {**good, "mxfp8": {**good["mxfp8"], "gradient": Noise(signal=1.0, noise=noise * 1e3)}}
    results[2] = dataclasses.replace(results[2], module=worse)
    assert [text.split(" has")[0] for text in failures(results, GOOD, GOOD, 4, 2)] == ["module, mxfp8: its gradient"]


@pytest.mark.parametrize("payload", ["bf16", "mxfp8"])
def test_a_row_sent_twice_fails(payload: str) -> None:
    """The layer's own tables must show the deduplicated number of rows."""
    results = _results()
    once = getattr(results[0], payload)
    twice = dataclasses.replace(once, traffic=dataclasses.replace(TRAFFIC[0], network=3))
    results[0] = dataclasses.replace(results[0], **{payload: twice})
    assert [text.split(":")[0] for text in failures(results, GOOD, GOOD, 4, 2)] == [f"rank 0, {payload}"]


def test_payloads_beside_each_other_counted_by_hand() -> None:
    """4 rows over NVLink and 2 over the network; 528 of 1024 bytes; noise of a thousandth and a hundredth."""
    bf16, mxfp8 = (line.split() for line in payload_table(_results(), GOOD, GOOD).splitlines()[2:4])
    assert bf16 == ["bf16", "1024", "4.0", "2.0", "0.0%", "exact", "20.0"]
    assert mxfp8 == ["mxfp8", "528", "2.1", "1.0", "48.4%", "30.0", "20.0"]


def test_picture_has_a_sensible_size(tmp_path: Path) -> None:
    """Width and height of the PNG exceed 300 pixels."""
    path = tmp_path / "routing.png"
    assert draw_routing(str(path), _results(), 4) is None
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert width > 300
    assert height > 300


def test_ranks_follow_the_gpus() -> None:
    """2 nodes x 2 ranks on the CPU and with at least 4 GPUs; fewer ranks with fewer GPUs."""
    assert [choose_ranks(n) for n in (0, 1, 2, 3, 4, 8)] == [(4, 2), (1, 1), (2, 1), (2, 1), (4, 2), (4, 2)]
