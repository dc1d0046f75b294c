"""Whose memory an allocation gets, and which ops may be captured by torch.compile."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

import triton_ep.nn
from triton_ep.runtime.graphs import owns_memory

GPU = torch.device("cuda", 0)
EXCHANGES = ("dispatch", "dispatch_backward", "combine", "combine_backward", "moe", "moe_backward", "refuse")


@pytest.mark.parametrize(
    ("capturing", "manager", "stream", "owned"),
    [
        pytest.param(True, None, 1, True, id="capture"),
        pytest.param(False, None, 1, False, id="no graphs"),
        pytest.param(False, types.SimpleNamespace(stream=2), 2, True, id="warm-up"),
        pytest.param(False, types.SimpleNamespace(stream=2), 1, False, id="between graphs"),
        pytest.param(False, AssertionError, 2, False, id="another thread"),
    ],
)
def test_memory_belongs_to_graphs_that_are_captured_or_warmed_up(monkeypatch, capturing, manager, stream, owned):
    """Also to those of torch.compile before their capture, which it warms up on a stream of their own."""

    def get_manager(index: int, create_if_none_exists: bool) -> Any:
        assert index == 0 and not create_if_none_exists
        if manager is AssertionError:
            raise manager
        return manager

    trees = types.SimpleNamespace(get_manager=get_manager)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    assert owns_memory(GPU) is owned
    assert not owns_memory(torch.device("cpu"))


def test_a_process_without_torch_compile_has_no_such_graphs(monkeypatch):
    """The module of torch that has them is not loaded for the question."""
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not owns_memory(GPU)
    assert "torch._inductor.cudagraph_trees" not in sys.modules


def test_ops_that_keep_memory_run_between_graphs():
    """Of the ops of layers and modules only that of low latency may be captured by torch.compile."""
    assert triton_ep.nn
    between = {
        name: torch.Tag.cudagraph_unsafe in getattr(torch.ops.triton_ep, name).default.tags
        for name in (*EXCHANGES, "moe_decode")
    }
    assert between == {**dict.fromkeys(EXCHANGES, True), "moe_decode": False}
