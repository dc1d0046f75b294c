"""Guarantees of workloads: data that encode their origin, routings as named, the same data on every rank."""

import pytest
import torch

from triton_ep.errors import InputError
from triton_ep.testing import apply_expert, apply_experts, expert_scale, make_workload

SIZES = {"hidden": 64, "topk": 4, "num_experts": 16}


def _pieces(x: torch.Tensor) -> torch.Tensor:
    """[T, H] -> one int64 per aligned piece of four bf16 columns."""
    return x.bfloat16().contiguous().view(torch.int64)


def test_every_piece_of_four_columns_is_unique() -> None:
    """No two pieces of any rows of any ranks are equal, so none can replace another unnoticed."""
    pieces = torch.cat([_pieces(make_workload(rank, 8, 200, **SIZES).x).flatten() for rank in range(8)])
    assert pieces.unique().numel() == pieces.numel() == 8 * 200 * 16


def test_single_columns_rarely_agree() -> None:
    """Neighbours in token, rank and column, and other seeds, differ in nearly all values and in every row."""
    first, other = (make_workload(rank, 2, 500, **SIZES).x for rank in range(2))
    seeded = make_workload(0, 2, 500, seed=1, **SIZES).x
    for a, b in [(first[1:], first[:-1]), (first, other), (first[:, 1:], first[:, :-1]), (first, seeded)]:
        assert (a == b).float().mean() < 0.01
        assert (a != b).any(1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_exact_in_every_dtype(dtype: torch.dtype) -> None:
    """Values are the same in every dtype, of moderate size and both signs."""
    exact = make_workload(1, 4, 50, dtype=torch.float64, **SIZES).x
    got = make_workload(1, 4, 50, dtype=dtype, **SIZES).x
    assert got.dtype == dtype
    assert torch.equal(got.double(), exact)
    assert exact.abs().min() >= 0.125
    assert exact.abs().max() < 32
    assert 0.4 < (exact > 0).double().mean() < 0.6


def test_any_hidden_and_no_tokens() -> None:
    """hidden may be any number, a narrower row is a prefix of a wider one; T may be 0."""
    wide = make_workload(0, 1, 3, **SIZES).x
    narrow = make_workload(0, 1, 3, **(SIZES | {"hidden": 33})).x
    assert torch.equal(narrow, wide[:, :33])
    assert narrow.is_contiguous()
    empty = make_workload(0, 1, 0, **SIZES)
    assert (empty.x.shape, empty.topk_idx.shape, empty.topk_weights.shape) == ((0, 64), (0, 4), (0, 4))


def test_made_anywhere_the_same() -> None:
    """Workloads neither use nor advance torch's global generator."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    a = make_workload(2, 4, 20, routing="skewed", **SIZES)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    b = make_workload(2, 4, 20, routing="skewed", **SIZES)
    assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("x", "topk_idx", "topk_weights"))
    assert not torch.equal(a.topk_idx, make_workload(3, 4, 20, routing="skewed", **SIZES).topk_idx)


def test_weights_are_distinct() -> None:
    """All weights of all ranks are distinct, and in [0.5, 1)."""
    weights = torch.cat([make_workload(r, 4, 300, **SIZES).topk_weights.flatten() for r in range(4)])
    assert weights.dtype == torch.float32
    assert weights.unique().numel() == weights.numel()
    assert weights.min() >= 0.5
    assert weights.max() < 1


@pytest.mark.parametrize("kind", ["uniform", "skewed", "one_expert"])
def test_experts_of_a_token_are_distinct_and_in_range(kind: str) -> None:
    """Experts of a token are distinct and in range if nothing is dropped."""
    idx = make_workload(0, 2, 100, routing=kind, drop=0.0, **SIZES).with_ids(torch.int64).topk_idx
    assert idx.dtype == torch.int64
    assert idx.min() >= 0
    assert idx.max() < 16
    assert all(len(set(row)) == 4 for row in idx.tolist())


def test_drops_use_both_marks_in_the_asked_share() -> None:
    """With a quarter dropped, about an eighth has -1 and an eighth E."""
    idx = make_workload(0, 1, 2000, drop=0.25, **SIZES).topk_idx
    assert idx.dtype == torch.int32
    assert abs((idx == -1).float().mean() - 0.125) < 0.02
    assert abs((idx == 16).float().mean() - 0.125) < 0.02


def test_routings_do_what_they_are_called() -> None:
    """Counts agree with the names one_expert, skewed, uniform, duplicates and all_dropped."""
    first = make_workload(1, 2, 50, routing="one_expert", drop=0.0, seed=15, **SIZES).topk_idx
    assert (first == torch.tensor([15, 0, 1, 2])).all()

    share = {}
    for kind in ("skewed", "uniform"):
        idx = torch.cat([make_workload(r, 2, 1000, routing=kind, drop=0.0, **SIZES).topk_idx[:, 0] for r in range(2)])
        share[kind] = torch.bincount(idx, minlength=16).max() / 2000
    assert share["uniform"] < 0.1
    # topk sorts by the noisy popularity, so column 0 is one draw from the law: 1 / (1 + 1/2 + ... + 1/16).
    assert abs(share["skewed"] - 0.296) < 0.04

    twice = make_workload(0, 1, 50, routing="duplicates", drop=0.0, **SIZES).topk_idx
    assert all(row.count(row[0]) == 2 for row in twice.tolist())

    dropped = make_workload(0, 1, 50, routing="all_dropped", **SIZES).topk_idx
    assert set(dropped.flatten().tolist()) == {-1, 16}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routing": "best"}, "routing is 'best'"),
        ({"topk": 17}, "topk is 17"),
        ({"topk": 1, "routing": "duplicates"}, "topk >= 2"),
        ({"rank": 2}, "rank is 2"),
        ({"num_tokens": 1 << 18}, "num_tokens is 262144"),
    ],
)
def test_impossible_workloads_are_refused(change: dict, message: str) -> None:
    """Refusing is better than data shared by two origins."""
    arguments = {"rank": 0, "world_size": 2, "num_tokens": 4, **SIZES} | change
    with pytest.raises(InputError, match=message):
        make_workload(**arguments)


def test_no_two_experts_agree() -> None:
    """Scales of 512 experts differ, and so do all bf16 values that they give for a row."""
    scales = expert_scale(torch.arange(512))
    assert scales.unique().numel() == 512
    assert not (scales == 1).any()
    x = make_workload(0, 1, 1, **SIZES).x[0]
    outputs = apply_expert(x.expand(512, 64), torch.arange(512))
    for column in range(64):
        assert outputs[:, column].unique().numel() == 512


def test_experts_apply_to_their_segments() -> None:
    """Each segment of dispatched rows gets its expert; padding and rows past the last segment stay zero."""
    x = make_workload(0, 1, 5, **SIZES).x
    rows = torch.cat([x[:2], torch.zeros(2, 64).bfloat16(), x[2:]])
    y = apply_experts(rows, torch.tensor([0, 4, 4, 6]), first_expert=3)
    assert torch.equal(y[:2], apply_expert(x[:2], 3))
    assert not y[2:4].any()
    assert torch.equal(y[4:6], apply_expert(x[2:4], 5))
    assert not y[6].any()
    assert torch.equal(apply_expert(x, 3)[1], apply_expert(x[1], 3))
