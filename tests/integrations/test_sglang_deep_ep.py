"""SGLang's own dispatchers, DeepEPDispatcher and DeepEPv2Dispatcher, over the names of DeepEP; skipped without SGLang.

    pip install --no-deps sglang==0.5.23        (into a folder of its own: --target DIR, and PYTHONPATH=DIR)

The files of the dispatchers, and the files that define their inputs and outputs, are loaded unchanged; the rest of
SGLang is stand-ins (peer_modules.py). Each expert multiplies by its own number, in float32, against a dense sum.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integrations.peer_modules import Nothing, folder_of, loaded
from triton_ep.distributed import current_heap
from triton_ep.integrations import deep_ep
from triton_ep.reference.channel_scales import quantize_channels
from triton_ep.testing import make_workload

_DISPATCHERS = "srt.layers.moe.token_dispatcher"
_REAL = (f"{_DISPATCHERS}.base", "srt.layers.moe.utils", f"{_DISPATCHERS}.deepep", f"{_DISPATCHERS}.deepep_v2")
_FOLDER = folder_of("sglang", "srt/layers/moe/token_dispatcher/deepep_v2.py")

pytestmark = [
    pytest.mark.plain,
    pytest.mark.skipif(_FOLDER is None, reason="SGLang with its dispatchers for DeepEP 1 and 2 is not installed"),
]

HIDDEN, TOPK, EXPERTS, MOST = 512, 3, 2, 16  # experts per rank


class _Setting:
    """An environment variable of SGLang."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self) -> Any:
        return self._value


class _Server:
    """Server settings that the dispatchers read."""

    def __init__(self, rank: int) -> None:
        self.extend = True  # the batch is a prefill
        moe = SimpleNamespace(deepep_dispatcher_output_dtype="auto", deepep_v2_mode="direct", deepep_config=None)
        self.resources = SimpleNamespace(buffers={})
        parallel = SimpleNamespace(attn_dp_size=2, attn_cp_size=1, tp_size=2, tp_group=None)
        settings = {
            "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": MOST,
            "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK": MOST,
            "SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND": None,
            "SGLANG_DEEPEP_V2_NUM_SMS": 0,
            "SGLANG_DEEPEP_BF16_DISPATCH": False,
            "SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE": False,
        }
        self.names = {
            "srt.environ": {"envs": SimpleNamespace(**{name: _Setting(value) for name, value in settings.items()})},
            "srt.layers.dp_attention": {"get_is_extend_in_batch": lambda: self.extend},
            "srt.layers": {"deep_gemm_wrapper": _GEMM},
            "srt.layers.deep_gemm_wrapper": vars(_GEMM),
            "srt.runtime_context": {
                "get_exec": lambda: SimpleNamespace(moe=moe),
                "get_parallel": lambda: parallel,
                "get_resources": lambda: self.resources,
                "get_server_args": lambda: None,
            },
            "srt.utils": {
                "get_bool_env_var": lambda name, default="false": False,
                "get_cuda_version": lambda: (13, 0),
                "is_npu": lambda: False,
                "is_hip": lambda: False,
                "is_cuda": lambda: False,
                "is_flashinfer_available": lambda: False,
            },
            "kernels.ops.quantization.fp8_kernel": {"sglang_per_token_group_quant_fp8": _quantized},
        }


_GEMM = SimpleNamespace(
    ENABLE_JIT_DEEPGEMM=True,
    DEEPGEMM_BLACKWELL=False,
    DEEPGEMM_SCALE_UE8M0=False,
    DEEPGEMM_NEED_TMA_ALIGNED_SCALES=False,
)
"""Values of SGLang's wrapper of DeepGEMM on an H200."""


def _quantized(x: torch.Tensor, group: int, **layout: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces SGLang's kernel: float32 scales per 128 values, row by row."""
    assert group == 128 and not any(layout.values())
    return quantize_channels(x, False, False)


@contextmanager
def _sglang(rank: int) -> Iterator[tuple[_Server, list[Any]]]:
    """SGLang's modules over the integration, in one rank."""
    server, before = _Server(rank), torch.cuda.get_device_properties
    environment = dict(os.environ)
    deep_ep.install()
    try:
        assert _FOLDER is not None
        with loaded("sglang", _FOLDER, _REAL, server.names) as modules:
            if not torch.cuda.is_available():
                torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)
            yield server, modules
    finally:
        torch.cuda.get_device_properties = before
        os.environ.clear()
        os.environ.update(environment)  # it sets NVSHMEM's
        deep_ep.uninstall()
        deep_ep.release()


class _Batch:
    """Tokens of this rank, and the expected result of experts that multiply by 1, 2, 3 and so on."""

    def __init__(self, rank: int, ranks: int, tokens: int, drop: float, only_first: bool) -> None:
        device = current_heap().device
        sizes = {"hidden": HIDDEN, "topk": TOPK, "num_experts": EXPERTS * ranks, "drop": drop, "seed": tokens}
        work = make_workload(rank, ranks, tokens, **sizes)
        self.x = work.x.to(device)
        idx = work.topk_idx.to(device)
        self.idx = torch.where(idx >= EXPERTS * (1 if only_first else ranks), -1, idx)
        self.weights = work.topk_weights.to(device)
        self.topk = SimpleNamespace(topk_weights=self.weights, topk_ids=self.idx)
        factors = torch.where(self.idx >= 0, self.weights * (self.idx + 1), 0.0).sum(1, keepdim=True)
        self.want = self.x.float() * factors

    def check(self, out: torch.Tensor, quantised: bool) -> None:
        assert out.shape == self.want.shape and out.dtype == torch.bfloat16
        # bf16 rounds sums per rank and the result; e4m3 rounds rows by 1/16.
        bound = (0.07 if quantised else 0.012) * self.want.abs() + 0.02 * self.want.abs().mean()
        assert ((out.float() - self.want).abs() <= bound).all()


def _values(rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Rows as float32, with scales [..., H / 128] or none."""
    values = rows.float()
    if scale is None:
        return values
    return (values.unflatten(-1, (-1, 128)) * scale.unsqueeze(-1)).flatten(-2)


def _normal(module: Any, dispatcher: Any, batch: _Batch, first: int) -> torch.Tensor:
    """A round of the normal kernels; this function sums over the experts of this rank."""
    got = dispatcher.dispatch(batch.x, batch.topk)
    assert type(got).__name__ == "DeepEPNormalDispatchOutput"
    local = got.topk_ids >= 0
    factors = torch.where(local, got.topk_weights * (got.topk_ids + first + 1), 0.0).sum(1, keepdim=True)
    y = (_values(got.hidden_states, got.hidden_states_scale) * factors).bfloat16()
    return dispatcher.combine(module.DeepEPNormalCombineInput(y, got.topk_ids, got.topk_weights))


def _low_latency(module: Any, dispatcher: Any, batch: _Batch, first: int) -> torch.Tensor:
    """A round of the low-latency kernels: slabs by expert, with undefined rows past the count."""
    got = dispatcher.dispatch(batch.x, batch.topk)
    assert type(got).__name__ == "DeepEPLLDispatchOutput"
    factors = torch.arange(first + 1, first + 1 + EXPERTS, device=batch.x.device).view(-1, 1, 1)
    values = _values(got.hidden_states, got.hidden_states_scale)
    filled = torch.arange(values.shape[1], device=values.device) < got.masked_m.unsqueeze(1)
    y = torch.where(filled.unsqueeze(2), values * factors, 0.0).bfloat16()
    return dispatcher.combine(module.DeepEPLLCombineInput(y, got.topk_ids, got.topk_weights))


# Tokens by rank, share of dropped ids, and whether only experts of rank 0 get rows.
BATCHES = (
    ((7, 12), 0.2, False),
    ((0, 5), 0.0, False),
    ((9, 6), 0.0, True),
    ((16, 0), 0.3, False),
    ((0, 0), 0.0, False),
)


def _check_version_1(rank: int, nodes: int, ranks_per_node: int, quantised: bool, hook: bool) -> None:
    ranks = nodes * ranks_per_node
    with _sglang(rank) as (server, (_, utils, module, _)):
        options: dict[str, Any] = {"async_finish": hook, "return_recv_hook": hook}
        sizes = {"num_experts": EXPERTS * ranks, "num_local_experts": EXPERTS, "hidden_size": HIDDEN}
        dispatcher = module.DeepEPDispatcher(
            dist.group.WORLD,
            TOPK,
            True,
            params_dtype=torch.bfloat16,
            deepep_mode=utils.DeepEPMode.AUTO,
            **sizes,
            **options,
        )
        dispatcher.set_quant_config({"dispatcher_output_dtype": "fp8" if quantised else "bf16"})
        for tokens, drop, only_first in BATCHES:
            batch = _Batch(rank, ranks, tokens[rank % 2], drop, only_first)
            for extend in (True, False, True):  # alternate prefill and decoding
                server.extend = extend
                work = _normal if extend else _low_latency
                batch.check(work(module, dispatcher, batch, EXPERTS * rank), quantised)


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_its_dispatcher_of_version_1(run_ranks, nodes, ranks_per_node, quantised, hook):
    """Normal and low-latency calls in turns; bf16, FP8; hooks and events, ranks without tokens or rows, dropped ids."""
    run_ranks(_check_version_1, nodes, ranks_per_node, quantised, hook)


def _check_version_2(rank: int, nodes: int, ranks_per_node: int, quantised: bool) -> None:
    ranks = nodes * ranks_per_node
    with _sglang(rank) as (server, (_, _, _, module)):
        dispatcher = module.DeepEPv2Dispatcher(
            dist.group.WORLD, TOPK, EXPERTS * ranks, EXPERTS, HIDDEN, torch.bfloat16, use_fp8_dispatch=quantised
        )
        dispatcher.prebuild()
        for tokens, drop, only_first in BATCHES:
            batch = _Batch(rank, ranks, tokens[rank % 2], drop, only_first)
            for extend in (True, False):
                server.extend = extend
                got = dispatcher.dispatch(batch.x, batch.topk)
                assert got.is_expanded and got.use_masked_gemm == (not extend)
                rows = torch.arange(got.hidden_states.shape[0], device=batch.x.device)
                # Ends of the experts' rows; the starts are multiples of the alignment.
                ends = got.psum_num_recv_tokens_per_expert
                y = torch.zeros(len(rows), HIDDEN, device=batch.x.device)
                values, start = _values(got.hidden_states, got.hidden_states_scale), 0
                for expert, end in enumerate(ends.tolist()):
                    here = (rows >= start) & (rows < end)
                    factor = (EXPERTS * rank + expert + 1) * got.topk_weights[here]
                    y[here] = values[here] * factor.unsqueeze(1)
                    start = -(-end // got.expert_alignment) * got.expert_alignment
                batch.check(dispatcher.combine(module.DeepEPv2CombineInput(y.bfloat16(), None)), quantised)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_its_dispatcher_of_version_2(run_ranks, nodes, ranks_per_node, quantised):
    """Expanded rows of prefill and, without a host wait, of decoding; bf16 and FP8; ranks without tokens or rows."""
    run_ranks(_check_version_2, nodes, ranks_per_node, quantised)


def test_what_is_not_there_is_false() -> None:
    """Everything in a stand-in is false, and a class can derive from it."""
    assert not Nothing and not Nothing.anything and not Nothing()(1).more
    assert not issubclass(type("Made", (Nothing,), {}), dict)
