"""`triton-ep bench moe-layer` on CPU ranks: all providers compute the layer; rows and table are as requested."""

from __future__ import annotations

import argparse
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from triton_ep.bench import moe, moe_providers, peak, rows, run, tables
from triton_ep.bench.job import Job, Place, WrongResult
from triton_ep.bench.settings import Settings
from triton_ep.cli import bench as cli
from triton_ep.distributed import current_heap
from triton_ep.errors import ConfigError

pytestmark = pytest.mark.plain
TINY = ["--ranks", "2", "--tokens", "6", "--hidden", "64", "--topk", "2", "--experts", "4", "--ffn", "32"]
TINY += ["--commit", "abc1234", "--iters", "1", "--warmup", "0"]


def _settings(*words: str) -> Settings:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.settings_of(parser.parse_args(["moe-layer", *TINY, *words]), 2, interpreting=True)


def _measure(_rank: int, _nodes: int, _ranks_per_node: int, settings: Settings) -> list[rows.Row]:
    return run.measure_all(settings).rows


def test_errors_of_results_that_have_a_graph_are_measured_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    """An error of a quarter is 12 dB, for results with a graph as for plain numbers."""
    leaf = torch.ones(4, requires_grad=True)
    assert moe_providers.decibel([(leaf * 1.25, torch.ones(4))]) == pytest.approx(12.04, abs=0.01)
    assert not recwarn.list


def test_cases_of_a_run() -> None:
    """Capacities and precisions of the module, one case of each other provider; modes name non-default options."""
    words = ["--payload", "bf16,mxfp8", "--capacity", "exact,static", "--precision", "default,exact"]
    cases = _settings(*words, "--provider", "triton_ep,nccl,gemm-only,deep_ep").cases()
    mode = "interpreted-{}-sm20-local-a128-ffn32"
    exact, static = mode.format("exact"), mode.format("static")
    assert [(case.provider, case.mode, case.payload) for case in cases] == [
        ("triton_ep", exact, "bf16"),
        ("triton_ep", static, "bf16"),
        ("nccl", "torch-exact-ffn32", "bf16"),
        ("gemm-only", "torch-exact-ffn32", "bf16"),
        ("deep_ep", "exact-sm20-ffn32", "bf16"),
        ("triton_ep", exact, "mxfp8"),
        ("triton_ep", f"{exact}-exact", "mxfp8"),
        ("triton_ep", static, "mxfp8"),
        ("triton_ep", f"{static}-exact", "mxfp8"),
    ]


def test_every_provider_in_one_run(run_ranks: Callable[..., Any], backend: str) -> None:
    """Forward and step, with unchanged and changed weights. Errors match the payload; the last table has ratios to the
    collectives and to the products."""
    if backend != "host":
        pytest.skip("the providers of a CPU: on GPUs the benchmark itself runs")
    words = ["--payload", "bf16,mxfp8", "--backward", "--refresh-weights", "--main-grad", "--capacity", "static"]
    settings = _settings(*words, "--experts", "2", "--provider", "triton_ep,nccl,gemm-only,deep_ep")
    found = [row for row in run_ranks(_measure, 1, 2, settings)[0] if row["op"] != "floor"]
    ops = ["moe_layer_fwd", "moe_layer_step", "moe_layer_fwd_refresh", "moe_layer_step_refresh"]
    ops.append("moe_layer_step_main_grad")
    assert [row["op"] for row in found] == ops * 5
    assert [row["provider"] for row in found[::5]] == ["triton_ep", "gloo", "gemm-only", "deep_ep", "triton_ep"]
    assert {row["skip_reason"] for row in found if row["provider"] == "deep_ep"} == {"deep_ep is not installed."}
    for row in found:
        if row["provider"] in ("triton_ep", "gloo"):
            low, high = (20, 35) if row["payload"] == "mxfp8" else (40, 60)
            assert low < float(row["error_db"]) < high, row
        else:
            assert row["error_db"] == ""
        assert row["peak_mib"] == "", "of the GPU's memory"
    here = tables.moe_table(found)
    assert "x nccl" not in here[2] and len(here) == 3 + len(found) - 5, "on the CPU nothing is compared"
    table = tables.moe_table([{**row, "gpu": "H200"} for row in found])
    assert "x nccl" in table[2] and len(table) == len(here)
    us = {row["op"]: float(row["median_us"]) for row in found if row["provider"] == "gloo"}
    mine = next(row for row in found if row["op"] == "moe_layer_step_refresh")
    assert f"{float(mine['median_us']) / us['moe_layer_step']:.3f}" in table[6]


def _added(rank: int, nodes: int, ranks_per_node: int) -> None:
    settings = _settings("--main-grad", "--provider", "triton_ep,nccl")
    job = Job(settings, settings.shapes[0], Place(rank, 2, 2, current_heap().device, {}))
    for case in settings.cases():
        with moe_providers.make_moe_provider(job, case) as provider:
            measured = moe._Run(job, case, provider)
            grads = measured.step(0)[3:]
            with measured.main_grads():
                for _ in range(2):
                    assert len(measured.step_main_grad(0)) == 3
                found = [parameter.main_grad for parameter in provider.parameters]
            assert not any(hasattr(parameter, "main_grad") for parameter in provider.parameters)
            pairs = [(mine, 2 * grad.float()) for mine, grad in zip(found, grads, strict=True)]
            assert moe_providers.decibel(pairs) > 45, case.provider


def test_gradients_are_added_to_main_grad(run_ranks: Callable[..., Any]) -> None:
    """By the kernels or after them, once per step; but for rounding they are those of a step."""
    run_ranks(_added, 1, 2)


def _dropped(rank: int, nodes: int, ranks_per_node: int) -> None:
    """The collectives' layer with dropped assignments equals the dense layer, all gradients by autograd."""
    place = Place(rank, 2, 2, current_heap().device, {})
    settings = _settings()
    job = Job(settings, settings.shapes[0], place)
    provider = moe_providers.CollectiveMoe(job)
    x, idx = job.inputs[0]
    idx = torch.where(
        torch.rand(idx.shape, generator=torch.Generator().manual_seed(rank)).to(idx.device) < 0.4, -1, idx
    )
    weights = torch.rand(idx.shape, device=x.device).requires_grad_()
    leaf, grad = x.clone().requires_grad_(), torch.randn(x.shape, device=x.device).bfloat16()
    y = provider.forward(leaf, idx, weights)
    dx, dw, *_ = torch.autograd.grad(y, [leaf, weights, *provider.parameters], grad)
    exact = moe_providers.dense(job, x, idx, weights.detach(), grad)
    assert moe_providers.decibel([(y.detach(), exact[0])]) > 38 and moe_providers.decibel([(dx, exact[1])]) > 38
    assert not dw[idx < 0].any() and dw[idx >= 0].all()


def test_dropped_copies_by_the_collectives(run_ranks: Callable[..., Any]) -> None:
    """Dropped assignments contribute nothing and get no gradient."""
    run_ranks(_dropped, 1, 2)


def _of_both_ranks(mine: tuple[torch.Tensor | None, ...]) -> list[list[Any]]:
    """The tensors that each rank gave, on this rank's device."""
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, [each if each is None else each.cpu() for each in mine])
    device = current_heap().device
    return [[each if each is None else each.to(device) for each in given] for given in everyone]


class _PeerBuffer:
    """The methods of deep_ep.Buffer that the benchmark calls, over collectives; rows by source rank and token."""

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        assert (num_nvl_bytes, num_rdma_bytes) == (128 * 64, 0) and group is dist.group.WORLD

    @staticmethod
    def set_num_sms(num_sms: int) -> None:
        assert num_sms == 20

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> type[_PeerBuffer]:
        assert num_ranks == 2
        return cls

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_nvl_buffer_size_hint(hidden_bytes: int, num_ranks: int) -> int:
        return 32 * hidden_bytes * num_ranks

    def get_dispatch_layout(self, idx: torch.Tensor, experts: int) -> tuple[Any, ...]:
        in_rank = torch.stack([(idx // (experts // 2) == rank).any(1) for rank in range(2)], dim=1)
        return in_rank.sum(0).int(), None, torch.bincount(idx.flatten(), minlength=experts).int(), in_rank, None

    def dispatch(self, x: torch.Tensor, *, handle: Any = None, **told: Any) -> tuple[Any, ...]:
        me = dist.get_rank()
        in_rank = told["is_token_in_rank"] if handle is None else handle[me]
        everyone = _of_both_ranks((x, in_rank, told.get("topk_idx"), told.get("topk_weights")))
        rows = torch.cat([x[here[:, me]] for x, here, _, _ in everyone])
        if handle is not None:
            return rows, None, None, [], handle, None
        ids = torch.cat([idx[here[:, me]] for _, here, idx, _ in everyone])
        weights = torch.cat([w[here[:, me]] for _, here, _, w in everyone])
        mine = ids // 2 == me
        ids, weights = torch.where(mine, ids - 2 * me, -1), torch.where(mine, weights, 0.0)
        return rows, ids, weights, [], [here for _, here, _, _ in everyone], None

    def combine(self, y: torch.Tensor, handle: list[torch.Tensor], topk_weights: Any = None) -> tuple[Any, ...]:
        me, everyone = dist.get_rank(), _of_both_ranks((y, topk_weights))
        found = []
        for part in (0, 1):
            if everyone[0][part] is None:
                found.append(None)
                continue
            out = torch.zeros(handle[me].shape[0], everyone[0][part].shape[1], device=y.device)
            for rank in range(2):
                before = sum(int(handle[source][:, rank].sum()) for source in range(me))
                here = handle[me][:, rank]
                out[here] += everyone[rank][part][before : before + int(here.sum())].float()
            found.append(out.to(everyone[0][part].dtype))
        return found[0], found[1], None


def _measure_peer(rank: int, nodes: int, ranks_per_node: int, settings: Settings) -> list[rows.Row]:
    module = types.ModuleType("deep_ep")
    module.__spec__ = importlib.machinery.ModuleSpec("deep_ep", None)
    module.Buffer = _PeerBuffer  # type: ignore[attr-defined]
    sys.modules["deep_ep"] = module
    try:
        return _measure(rank, nodes, ranks_per_node, settings)
    finally:
        del sys.modules["deep_ep"]


def test_deep_ep_as_a_provider(run_ranks: Callable[..., Any]) -> None:
    """A stand-in with DeepEP's interface gives the same tokens and gradients."""
    found = run_ranks(_measure_peer, 1, 2, _settings("--provider", "deep_ep", "--backward"))[0]
    found = [row for row in found if row["op"] != "floor"]
    assert [row["op"] for row in found] == ["moe_layer_fwd", "moe_layer_step"]
    assert all(float(row["error_db"]) > 40 for row in found)


def _wrong(rank: int, nodes: int, ranks_per_node: int) -> None:
    settings = _settings("--provider", "nccl")
    job = Job(settings, settings.shapes[0], Place(rank, 2, 2, current_heap().device, {}))
    provider = moe_providers.CollectiveMoe(job)
    provider.parameters[1].data[0, 0] *= 3
    with pytest.raises(WrongResult, match=r"y has \d+\.\d dB against dense experts, 36.0 are expected"):
        moe._Run(job, settings.cases()[0], provider).check(False)


def test_a_wrong_layer_is_not_timed(run_ranks: Callable[..., Any]) -> None:
    """One wrong row of one matrix is enough to refuse the layer."""
    run_ranks(_wrong, 1, 2)


def test_files_from_before_memory_and_error_get_their_columns(tmp_path: Path) -> None:
    """Old files are read and appended to; the missing cells are empty."""
    path, old = tmp_path / "rows.csv", rows.make_row({"op": "dispatch", "median_us": 3})
    before = [name for name in rows.COLUMNS if name not in ("peak_mib", "error_db")]
    path.write_text(",".join(before) + "\n" + ",".join(old[name] for name in before) + "\n")
    assert rows.read_rows(path) == [old]
    new = rows.make_row({"op": "moe_layer_fwd", "median_us": 4, "peak_mib": 1.5, "error_db": 23.1})
    rows.append_rows(path, [new])
    assert rows.read_rows(path) == [old, new]


@pytest.mark.parametrize(
    "words",
    [["--alignment", "16"], ["--provider", "vdev"], ["--precision", "best"], ["--capacity", "none"]],
    ids=lambda words: words[0],
)
def test_options_that_do_not_fit(words: Sequence[str]) -> None:
    """Unfit options are refused before any rank starts."""
    with pytest.raises(ConfigError):
        _settings(*words)


def _decoding(rank: int, nodes: int, ranks_per_node: int, settings: Settings) -> tuple[list[rows.Row], float]:
    found = run.measure_all(settings).rows
    job = Job(settings, settings.shapes[0], Place(rank, 2, 2, current_heap().device, {}))
    return found, moe._Run(job, settings.cases()[1], moe_providers.CollectiveMoe(job))._active_bytes()


def test_decoding_has_its_bound(run_ranks: Callable[..., Any]) -> None:
    """Low latency, forward only, is above the bound, which counts the weights of experts with rows at their width."""
    settings = _settings("--low-latency", "--payload", "bf16,mxfp8", "--provider", "triton_ep,nccl", "--tokens", "2")
    assert settings.ops == ("moe_layer_decode",) and settings.capacities == ("static",)
    found, active = run_ranks(_decoding, 1, 2, settings)[0]
    found = [row for row in found if row["op"] != "floor"]
    assert [(row["provider"], row["payload"]) for row in found] == [
        ("triton_ep", "bf16"),
        ("gloo", "bf16"),
        ("triton_ep", "mxfp8"),
    ]
    for row in (found[0], found[2]):
        assert row["mode"] == "interpreted-static-ll-local-ffn32" and float(row["error_db"]) > 20
        assert float(row["floor_us"]) > 0 and row["floor_ratio"]
    assert found[1]["floor_us"] == ""
    (expert,) = [3 * 32 * 64 * 2]  # case 1 uses the collectives, in bf16
    assert expert <= active <= 2 * expert
    table = tables.moe_table([{**row, "gpu": "H200"} for row in found])
    assert table[2].split()[-6:] == ["x", "nccl", "x", "bound", "error", "dB"]
    ratio = float(found[2]["median_us"]) / float(found[0]["median_us"])
    assert f"{ratio:.3f}" in table[5] and found[2]["floor_ratio"] in table[5]
    assert "x bf16" not in tables.moe_table(found)[2]
    for words in (["--backward"], ["--capacity", "exact"], ["--refresh-weights"], ["--main-grad"]):
        with pytest.raises(ConfigError):
            _settings("--low-latency", *words)


def test_models_have_their_sizes() -> None:
    """Sizes are as published; options on the command line override them."""
    for model, sizes in (
        ("qwen3-235b", (4096, 1536, 8, 128)),
        ("mixtral", (4096, 14336, 2, 8)),
        ("gpt-oss", (2880, 2880, 4, 128)),
    ):
        parser = argparse.ArgumentParser()
        cli.add_arguments(parser)
        (shape,) = cli.settings_of(
            parser.parse_args(["moe-layer", "--model", model, "--commit", "a"]), 4, interpreting=False
        ).shapes
        assert (shape.hidden, shape.ffn, shape.topk, shape.experts, shape.tokens) == (*sizes, 4096)


def test_most_allocated() -> None:
    """Peak of live memory: earlier memory and results do not count, but earlier tensors at their addresses do."""

    def event(action: str, addr: int, size: int) -> dict[str, object]:
        return {"action": action, "addr": addr, "size": size}

    events = [
        event("free_requested", 5, 100),
        event("alloc", 1, 10),
        event("segment_alloc", 0, 1000),
        event("alloc", 2, 30),
        event("free_requested", 1, 10),
        event("free_completed", 1, 10),
        event("alloc", 1, 25),
        event("free_requested", 2, 30),
        event("alloc", 3, 20),
    ]
    assert peak.most_allocated(events) == 55
    assert peak.most_allocated(events, [1]) == 40
    assert peak.most_allocated(events, [1, 3, 7]) == 40
    assert peak.most_allocated([]) == 0
