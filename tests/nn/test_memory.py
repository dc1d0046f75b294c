"""Memory estimates equal the memory that is allocated."""

from __future__ import annotations

import gc
import re
import weakref
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from triton_ep.bench.settings import MODELS
from triton_ep.context.layout import estimate_bytes
from triton_ep.distributed import current_heap
from triton_ep.errors import ConfigError
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
    """Exchange, prepared weights and tensors saved by autograd, to the byte."""
    run_ranks(_check, nodes, 2 // nodes, options)


@pytest.mark.parametrize("prepared", ["x", None, ["both"]], ids=str)
def test_unknown_prepared_is_refused(prepared):
    """The error names the value and the choices."""
    with pytest.raises(ConfigError, match=r"prepared is .*, choose from both, fprop, none"):
        estimate_memory(64, 96, num_experts=4, topk=2, max_tokens=8, world_size=1, payload="mxfp8", prepared=prepared)


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


class _Alive(TorchDispatchMode):
    """Bytes of live tensors that ops have created, and the peak of these bytes.

    Views of the symmetric heap, recognised by address, do not count.
    """

    def __init__(self, heap: int) -> None:
        super().__init__()
        self.now, self.peak, self._heap = 0, 0, heap
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._uses: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "triton_ep":
            gc.collect()  # reference cycles of the interpreter
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return found

    def _note(self, storage: Any) -> None:
        key, place, size = storage._cdata, storage.data_ptr(), storage.nbytes()
        if key in self._seen or place == self._heap:
            return

        def gone(_: Any) -> None:
            del self._seen[key]
            self._uses[place] -= 1
            self.now -= 0 if self._uses[place] else size

        self._seen[key] = weakref.ref(storage, gone)
        # The interpreter creates its own storages over the memory of its arguments.
        self.now += 0 if self._uses[place] else size
        self._uses[place] += 1


def _check_backward(rank: int, nodes: int, ranks_per_node: int) -> None:
    hidden, ffn, rows, tokens = 256, 128, 2048, 8
    device = current_heap().device
    x = torch.randn(tokens, hidden, device=device).bfloat16().requires_grad_()
    ids, weights = torch.arange(2, device=device).expand(tokens, 2), torch.ones(tokens, 2, device=device)
    given = (x, weights.requires_grad_())
    gc.collect()
    gc.freeze()

    def step(moe: MoE, retain: bool) -> tuple[int, int, int, list[torch.Tensor]]:
        """Peak bytes of the forward pass; bytes saved between the passes; peak bytes of the backward pass without
        gradients of parameters; gradients."""
        leaves = [*given, *moe.experts.parameters()]
        of_params = sum(leaf.numel() * leaf.element_size() for leaf in leaves[2:])
        heap = moe.exchange.context.local("stage_x").untyped_storage().data_ptr()
        # Under a dispatch mode the module would be one op.
        with mock.patch("triton_ep.nn.operations.is_observed", return_value=False), _Alive(heap) as alive:
            y = moe(x, topk_idx=ids, topk_weights=weights)
            gc.collect()
            forward, saved, alive.peak = alive.peak, alive.now, 0
            found = torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=retain)
            if retain:
                assert all(map(torch.equal, torch.autograd.grad(y, leaves, torch.ones_like(y)), found))
        return forward, saved, alive.peak - of_params, [*found]

    # Bytes per row: the first product or its gradient, the activation, a row in bf16. MXFP8: e4m3 rows, dpre, and
    # either the activation with e4m3 rows and half of them in bf16, or dpre in e4m3 and the gradient of the rows. In
    # bf16 few rows arrive, and the staging rows are kept in place of the expanded rows.
    pre, act, wide = 4 * ffn, 2 * ffn, 2 * hidden
    for payload, row, most in (("mxfp8", hidden, hidden + pre + act + wide), (None, 0, wide + pre + act)):
        moe = MoE(hidden, ffn, num_experts=2, topk=2, max_tokens=tokens, capacity=rows, payload=payload, num_sm=2)
        *_, first = step(moe, retain=False)  # builds the copies of weights
        forward, saved, peak, again = step(moe, retain=False)
        slack = rows * 64 + sum(param.numel() * param.element_size() for param in moe.parameters())
        assert saved <= rows * (row + pre) + slack
        assert max(forward, peak) <= rows * most + slack
        *_, kept = step(moe, retain=True)
        assert all(map(torch.equal, again, first)) and all(map(torch.equal, kept, first))
        moe.finalize()
    gc.unfreeze()


def test_rows_are_dropped_as_the_backward_pass_goes_on(run_ranks):
    """At no time do more rows exist than the current step reads and writes plus those that later steps need."""
    run_ranks(_check_backward, 1, 1)
