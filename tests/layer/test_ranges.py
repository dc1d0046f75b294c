"""Names of calls in traces: a range around each half while a profiler records, and none otherwise."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from triton_ep.exchange import ranges
from triton_ep.exchange.finish import Ending, Finisher


def _call(*, hook: bool) -> list[str]:
    """Run a combine whose halves record that they ran; if it returns a hook, call the hook."""
    ran: list[str] = []
    context = MagicMock(num_dispatches=7, layer_id=0x123FA2, device=torch.device("cpu"))
    finish = Finisher(context, MagicMock())

    def send() -> tuple[str, object]:
        ran.append("send")
        return "rows", lambda: ran.append("receive")

    results, ending = finish("combine", send, (), Ending(return_recv_hook=hook))
    assert results == "rows"
    if ending is not None:
        ending()
    return ran


def test_both_halves_are_ranges_under_torchs_profiler() -> None:
    """A name has the call, the number of dispatches and the layer; without a profiler there is no range."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert _call(hook=True) == ["send", "receive"]
    named = [event.key for event in profile.key_averages() if event.key.startswith("triton_ep.")]
    assert sorted(named) == ["triton_ep.combine 7, layer 3fa2", "triton_ep.hook of combine 7, layer 3fa2"]
    assert ranges.call_range("combine", SimpleNamespace(num_dispatches=7, layer_id=1)) is ranges._NO_RANGE


def test_nvtx_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TRITON_EP_NVTX=1 the ranges are NVTX ranges, which end when the call has returned."""
    monkeypatch.setenv("TRITON_EP_NVTX", "1")
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("end"))
    ranges._wants_nvtx.cache_clear()
    try:
        assert _call(hook=False) == ["send"]
    finally:
        ranges._wants_nvtx.cache_clear()
    assert seen == ["triton_ep.combine 7, layer 3fa2", "end"]
