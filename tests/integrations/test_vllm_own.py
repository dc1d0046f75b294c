"""vLLM's own FusedMoEKernel over triton_ep's class, and over vLLM's three for DeepEP; skipped where vLLM is absent.

    pip install --no-deps vllm==0.33.0        (into a folder of its own: --target DIR, and PYTHONPATH=DIR)

The files of the kernel, of its configuration and of the classes for DeepEP are loaded unchanged; the rest of vLLM is
stand-ins (peer_modules.py).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from tests.integrations.peer_modules import folder_of, loaded
from tests.integrations.vllm_batches import (
    BATCHES,
    EXPERTS,
    HIDDEN,
    MOST,
    TOPK,
    batch,
    check,
    expert_map,
    numbered_experts,
)
from triton_ep.distributed import current_heap
from triton_ep.integrations import deep_ep
from triton_ep.reference.channel_scales import quantize_channels

_LAYERS = "model_executor.layers.fused_moe"
_CLASSES = f"{_LAYERS}.prepare_finalize"
_REAL = (
    "utils.math_utils",
    f"{_LAYERS}.activation",
    f"{_LAYERS}.config",
    f"{_LAYERS}.modular_kernel",
    f"{_LAYERS}.topk_weight_and_reduce",
    f"{_CLASSES}.deepep_ht",
    f"{_CLASSES}.deepep_ll",
    f"{_CLASSES}.deepep_v2",
)
_FOLDER = folder_of("vllm", "model_executor/layers/fused_moe/prepare_finalize/deepep_v2.py")

pytestmark = [
    pytest.mark.plain,
    pytest.mark.skipif(_FOLDER is None, reason="vLLM with its classes for DeepEP 1 and 2 is not installed"),
]

_CONFIG = SimpleNamespace(
    moe_parallel_config=None,
    **dict.fromkeys(("swiglu_limit", "swiglu_alpha", "swiglu_beta")),
    **dict.fromkeys(("activation_situ_beta", "activation_situ_linear_beta")),
)
"""A FusedMoEConfig of a model without special options."""


class GroupShape(NamedTuple):
    """vLLM's GroupShape, whose file needs vLLM's compiled code."""

    row: int
    col: int


GroupShape.PER_TENSOR, GroupShape.PER_TOKEN = GroupShape(-1, -1), GroupShape(1, -1)  # type: ignore[attr-defined]


def _quantized(
    A: torch.Tensor, A_scale: Any, quant_dtype: Any, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Replaces vLLM's kernel, with its argument names: no quantisation, or float32 scales per 128 values."""
    return (A, None) if quant_dtype is None else quantize_channels(A, False, False)


def _names(ranks: int) -> dict[str, dict[str, Any]]:
    tokens = SimpleNamespace(num_tokens_across_dp_cpu=torch.full((ranks,), MOST))
    platform = SimpleNamespace(is_cpu=lambda: True, is_cuda=lambda: False, is_rocm=lambda: False)
    return {
        "_custom_ops": {"moe_sum": lambda rows, out: out.copy_(rows.float().sum(1))},
        "forward_context": {"get_forward_context": lambda: SimpleNamespace(dp_metadata=tokens)},
        "platforms": {"current_platform": platform},
        "triton_utils": {"tl": tl, "triton": triton},
        "utils.import_utils": {"get_triton_kernels_version": lambda: None},
        "utils.torch_utils": {"PIN_MEMORY": False},
        f"{_LAYERS}.utils": {
            "_resize_cache": lambda cache, shape: cache.flatten()[: torch.Size(shape).numel()].view(*shape),
            "moe_kernel_quantize_input": _quantized,
            "normalize_batched_scales_shape": lambda scales, num_experts: scales,
        },
        f"{_LAYERS}.experts.fused_humming_moe": {"HummingIndexedExperts": type("HummingIndexedExperts", (), {})},
        "model_executor.layers.quantization.utils.quant_utils": {"GroupShape": GroupShape},
        "model_executor.layers.quantization.utils.ocp_mx_utils": {"OCP_MX_DTYPES": set()},
        "v1.worker.ubatching": {
            "dbo_current_ubatch_id": lambda: 0,
            "dbo_enabled": lambda: False,
            "dbo_get_previous_event": lambda function: None,
        },
    }


@contextmanager
def _vllm(ranks: int) -> Iterator[SimpleNamespace]:
    """vLLM's modules over the integration, by the last parts of their names."""
    deep_ep.install()
    try:
        assert _FOLDER is not None
        with loaded("vllm", _FOLDER, _REAL, _names(ranks)) as modules:
            yield SimpleNamespace(**{module.__name__.split(".")[-1]: module for module in modules})
    finally:
        sys.modules.pop("triton_ep.integrations.vllm.classes", None)
        deep_ep.uninstall()
        deep_ep.release()


def _made(vllm: SimpleNamespace, name: str, rank: int, ranks: int, quantised: bool) -> Any:
    """vLLM's class `name`, with the buffer that its manager would create; or triton_ep's class."""
    group, num_experts = dist.group.WORLD, EXPERTS * ranks
    if name.startswith("triton_ep"):
        # Not `from triton_ep.integrations.vllm import ...`, which would keep the class of another test's vLLM.
        classes = importlib.import_module("triton_ep.integrations.vllm.classes")
        sizes = {"max_tokens": MOST, "hidden": HIDDEN, "topk": TOPK, "num_experts": num_experts}
        return classes.TritonEPPrepareAndFinalize(group, batched=name == "triton_ep_batched", **sizes)
    if name == "ht":
        return vllm.deepep_ht.DeepEPHTPrepareAndFinalize(deep_ep.Buffer(group, 1 << 26), ranks, ranks, EXPERTS * rank)
    if name == "ll":
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, ranks, num_experts)
        buffer = deep_ep.Buffer(group, 0, size, low_latency_mode=True, num_qps_per_rank=EXPERTS)
        return vllm.deepep_ll.DeepEPLLPrepareAndFinalize(buffer, MOST, ranks, quantised)
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOPK)
    sizes = {"num_experts": num_experts, "num_topk": TOPK, "use_fp8_dispatch": quantised}
    decode = name == "v2_decode"
    return vllm.deepep_v2.DeepEPV2PrepareAndFinalize(
        buffer, ranks, ranks, EXPERTS * rank, **sizes, use_cudagraph=decode
    )


def _check(rank: int, nodes: int, ranks_per_node: int, name: str, quantised: bool) -> None:
    ranks = nodes * ranks_per_node
    with _vllm(ranks) as vllm:
        made = _made(vllm, name, rank, ranks, quantised)
        assert isinstance(made, vllm.modular_kernel.FusedMoEPrepareAndFinalizeModular)
        batched = made.activation_format.name == "BatchedExperts"
        kinds = {"quant_dtype": torch.float8_e4m3fn, "block_shape": [128, 128]} if quantised else {}
        config = vllm.config.FusedMoEQuantConfig.make(**kinds)
        slabs = {"max_num_tokens": MOST, "num_dispatchers": ranks} if batched else {}
        modules = vllm.modular_kernel, vllm.topk_weight_and_reduce
        experts = numbered_experts(*modules, _CONFIG, batched, quant_config=config, **slabs)
        kernel = vllm.modular_kernel.FusedMoEKernel(made, experts)
        check(kernel, rank, ranks, quantised)
        if name.startswith("triton_ep"):
            made.close()


CASES = [
    *[(name, False) for name in ("triton_ep", "triton_ep_batched", "ht", "ll", "v2_prefill", "v2_decode")],
    *[(name, True) for name in ("ht", "ll", "v2_prefill", "v2_decode")],
]


@pytest.mark.parametrize("name, quantised", CASES)
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_its_kernel_over_each_class(run_ranks, nodes, ranks_per_node, name, quantised):
    """bf16 rows and FP8 rows with a scale per 128 values, dropped ids, ranks without tokens or rows."""
    run_ranks(_check, nodes, ranks_per_node, name, quantised)


def _check_experts(rank: int, nodes: int, ranks_per_node: int, batched: bool, kind: str | None) -> None:
    ranks, device, width = nodes * ranks_per_node, current_heap().device, 32
    draw = torch.Generator().manual_seed(1)
    shapes = (2 * width, HIDDEN), (HIDDEN, width)
    w13, w2 = (
        (torch.randn(EXPERTS * ranks, *shape, generator=draw) / shape[1] ** 0.5).bfloat16().to(device)
        for shape in shapes
    )
    mine = slice(EXPERTS * rank, EXPERTS * (rank + 1))
    with _vllm(ranks) as vllm:
        made = _made(vllm, "triton_ep_batched" if batched else "triton_ep", rank, ranks, False)
        config = vllm.config.FusedMoEQuantConfig.make(quant_dtype=kind, is_scale_swizzled=False)
        classes = importlib.import_module("triton_ep.integrations.vllm.classes")
        experts = classes.TritonEPExperts(made, config, _CONFIG)
        kernel = vllm.modular_kernel.FusedMoEKernel(made, experts)
        for tokens, drop, only_first in BATCHES:
            x, weights, ids = batch(rank, ranks, tokens[rank % 2], drop, only_first)
            gate, up = torch.einsum("th,enh->ten", x.float(), w13.float()).chunk(2, 2)
            every = torch.einsum("tef,ehf->teh", torch.nn.functional.silu(gate) * up, w2.float())
            shares = torch.where(ids >= 0, weights, 0.0)
            want = (every[torch.arange(len(x)).unsqueeze(1), ids.clamp(min=0)] * shares.unsqueeze(2)).sum(1)
            silu = vllm.activation.MoEActivation.SILU
            given = (w13[mine].contiguous(), w2[mine].contiguous(), weights, ids, silu, EXPERTS * ranks)
            out = kernel.apply(x, *given, expert_map(rank, ranks), False)
            error, size = (out.float() - want).norm(), want.norm()
            # e4m3 rounds by 0.026 on average: rows, both halves of w13, the activation, w2.
            assert out.shape == want.shape and error <= (0.08 if kind else 0.008) * size
        made.close()


@pytest.mark.parametrize("kind", [None, "mxfp8"])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_its_kernel_with_experts_of_triton_ep(run_ranks, nodes, ranks_per_node, batched, kind):
    """Both formats, bf16 and MXFP8, against a dense computation in float32."""
    run_ranks(_check_experts, nodes, ranks_per_node, batched, kind)
