"""`triton-ep demo`: the run, and that its counters and its verdict can tell right from wrong."""

import dataclasses
import struct
from pathlib import Path

import pytest
import torch

from triton_ep.cli import main
from triton_ep.cli.demo import choose_ranks
from triton_ep.cli.demo_report import (
    Comparison,
    RankResult,
    Traffic,
    draw_routing,
    expected_traffic,
    failures,
)


def test_demo_equals_the_dense_layer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """4 ranks as 2 nodes x 2: the table has a line per rank, the verdict is PASS, the picture is a PNG."""
    picture = tmp_path / "routing.png"
    assert main(["demo", "--tokens", "20", "--hidden", "48", "--picture", str(picture)]) == 0
    output = capfd.readouterr().out
    assert "PASS" in output
    assert "received" in output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_demo_names_a_wrong_option(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake is one line on stderr and exit code 1, not a traceback."""
    assert main(["demo", "--tokens", "0"]) == 1
    assert "--tokens is 0" in capsys.readouterr().err


# 2 nodes x 2 ranks, one expert per rank. Token 0 of rank 0 goes everywhere, token 1 only to rank 3, of which
# the gateway for rank 0 is rank 2; rank 1 keeps its token; rank 2 drops one copy; rank 3 has no token.
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
    """One row per rank of the own node, one per other node, and the second hop counted where it happens."""
    assert expected_traffic(ROUTING, num_experts=4, ranks_per_node=2) == TRAFFIC
    assert [t.sent for t in TRAFFIC] == [3, 0, 1, 0]
    assert [t.nvlink for t in TRAFFIC] == [1, 0, 3, 0]


def _results() -> list[RankResult]:
    return [
        RankResult(topk_idx=idx, received=1, combined=torch.zeros(len(idx), 8), traffic=traffic)
        for idx, traffic in zip(ROUTING, TRAFFIC, strict=True)
    ]


@pytest.mark.parametrize("max_rel", [0.02, float("nan")])
def test_a_wrong_result_fails(max_rel: float) -> None:
    """An error past rounding, and a NaN, are failures that name the rank."""
    good = [Comparison(0.0, 0.0, 0.01)] * 4
    assert failures(_results(), good, 4, 2) == []
    wrong = failures(_results(), [*good[:3], Comparison(1.0, max_rel, 0.01)], 4, 2)
    assert [text[:6] for text in wrong] == ["rank 3"]


def test_a_row_sent_twice_fails() -> None:
    """The layer's own tables must show the de-duplicated number of rows."""
    results = _results()
    results[0] = dataclasses.replace(results[0], traffic=dataclasses.replace(TRAFFIC[0], network=3))
    wrong = failures(results, [Comparison(0.0, 0.0, 0.01)] * 4, 4, 2)
    assert [text[:6] for text in wrong] == ["rank 0"]


def test_picture_has_a_sensible_size(tmp_path: Path) -> None:
    """The PNG is wider than high for many experts, and not empty."""
    path = tmp_path / "routing.png"
    assert draw_routing(str(path), ROUTING, 4) is None
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert width > 300
    assert height > 300


def test_ranks_follow_the_gpus() -> None:
    """2 nodes x 2 on the CPU and with at least 4 GPUs; less with fewer."""
    assert [choose_ranks(n) for n in (0, 1, 2, 3, 4, 8)] == [(4, 2), (1, 1), (2, 1), (2, 1), (4, 2), (4, 2)]
