"""What is said of memory is what is taken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from triton_ep.bench.settings import MODELS
from triton_ep.context.layout import estimate_bytes
from triton_ep.distributed import current_heap
from triton_ep.nn import MoE, estimate_memory, finalize_exchanges
from triton_ep.ops.row_scales import RowScaled

pytestmark = pytest.mark.plain
PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/train-a-moe-layer.md"


def _bytes_of(tensor: torch.Tensor | RowScaled) -> int:
    parts = (tensor.qdata, tensor.scale) if isinstance(tensor, RowScaled) else (tensor,)
    return sum(part.numel() * part.element_size() for part in parts)


def _check(rank: int, nodes: int, ranks_per_node: int, options: dict[str, Any]) -> None:
    world, device = nodes * ranks_per_node, current_heap().device
    sizes: dict[str, Any] = {
        "num_experts": 2 * world,
        "topk": 2,
        "max_tokens": 8,
        "capacity": 3.0,
        "num_sm": 2,
        **options,
    }
    sizes["local_world_size"] = ranks_per_node
    said = estimate_memory(64, 96, world_size=world, **sizes)
    moe = MoE(64, 96, **sizes)
    x = torch.randn(8, 64, device=device).bfloat16().requires_grad_()
    ids, weights = torch.zeros(8, 2, dtype=torch.int32, device=device), torch.ones(8, 2, device=device)
    saved: dict[int, torch.Tensor] = {}
    own = {parameter.data_ptr() for parameter in moe.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            saved[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = moe(x, topk_idx=ids, topk_weights=weights.requires_grad_())
    y.sum().backward()
    assert said.rows == moe.exchange.config.recv_capacity
    assert said.exchange == estimate_bytes(moe.exchange.context.sizes)
    assert said.saved == sum(map(_bytes_of, saved.values()))
    kept = [] if moe.experts.prepared is None else [each.copy for each in moe.experts.prepared._kept.values()]
    assert said.prepared == sum(map(_bytes_of, kept))
    assert said.total(3, 2) == said.exchange + 3 * said.prepared + 6 * said.saved
    finalize_exchanges()


@pytest.mark.parametrize(
    ("nodes", "options"),
    [
        (1, {}),
        (2, {"payload": "mxfp8"}),
        (1, {"payload": "mxfp8", "precision": "exact", "prepared": "fprop"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else f"{value}",
)
def test_the_estimate_is_what_is_allocated(run_ranks, nodes, options):
    """Exchange, prepared weights and what autograd keeps, to the byte."""
    run_ranks(_check, nodes, 2 // nodes, options)


def test_the_page_has_what_the_estimate_says():
    """The table of docs/how-to/train-a-moe-layer.md, in GiB."""
    rows = re.findall(
        r"^\| `([\w-]+)` \| (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(), re.MULTILINE
    )
    assert [(model, payload) for model, payload, *_ in rows] == [
        (model, payload) for model in MODELS for payload in ("bf16", "mxfp8")
    ]
    for model, payload, *figures in rows:
        sizes = dict(MODELS[model])
        hidden, ffn = sizes.pop("hidden"), sizes.pop("ffn")
        said = estimate_memory(
            hidden,
            ffn,
            num_experts=sizes["experts"],
            topk=sizes["topk"],
            max_tokens=4096,
            world_size=8,
            payload=None if payload == "bf16" else payload,
        )
        assert figures == [f"{value / 2**30:.2f}" for value in (said.exchange, said.prepared, said.saved)], model
