"""torchtitan's own functions for DeepEP 2 over ElasticBuffer, forward and backward; skipped where it is not installed.

    pip install --no-deps torchtitan        (into a folder of its own: --target DIR, and PYTHONPATH=DIR)

Only this file of torchtitan is loaded, unchanged, without its package. It registers its ops for CUDA; on the CPU the
test registers the same functions for the CPU.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from triton_ep.distributed import current_heap
from triton_ep.integrations import deep_ep

_NAME = "torchtitan_deep_ep"


def _file() -> Path | None:
    spec = importlib.util.find_spec("torchtitan")
    folders = [] if spec is None else spec.submodule_search_locations or []
    found = [Path(folder) / "distributed/deepep/deepep.py" for folder in folders]
    return next((path for path in found if path.is_file() and "ElasticBuffer" in path.read_text()), None)


pytestmark = [
    pytest.mark.plain,
    pytest.mark.skipif(_file() is None, reason="torchtitan with DeepEP 2 is not installed"),
]

HIDDEN, TOPK, EXPERTS, MOST = 128, 2, 2, 8  # experts per rank
# Tokens by rank, and whether all of them go to rank 0.
BATCHES = (((5, 3), False), ((4, 0), False), ((0, 0), False), ((1, 3), True))


def _load() -> Any:
    """Load torchtitan's module once: its ops can only be registered once per process."""
    if _NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(_NAME, _file())
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        deep_ep.install()
        spec.loader.exec_module(module)
        deep_ep.uninstall()
        sys.modules[_NAME] = module
        torch.library.impl(module._lib, "dispatch", "CPU")(module._dispatch_op_impl)
        torch.library.impl(module._lib, "combine", "CPU")(module._combine_op_impl)
    return sys.modules[_NAME]


def _layer(titan: Any, x: torch.Tensor, idx: torch.Tensor, scores: torch.Tensor, rank: int, static: bool) -> Any:
    """A layer whose experts multiply by a power of two, so that no sum rounds."""
    rows, counts, state = titan.dispatch_tokens(
        x, idx, scores, EXPERTS, 2 * EXPERTS, num_tokens_per_rank=MOST, cudagraphable=static
    )
    of_row = torch.repeat_interleave(torch.arange(EXPERTS, device=x.device), counts.long())
    factor = torch.ones(rows.shape[0], device=x.device, dtype=rows.dtype)
    factor[: of_row.shape[0]] = 2.0 ** (of_row + rank * EXPERTS).to(rows.dtype)
    out = titan.combine_tokens(rows * factor.unsqueeze(1), state)
    titan.sync_combine()
    return out


def _check(rank: int, nodes: int, ranks_per_node: int) -> None:
    titan, device = _load(), current_heap().device
    titan.get_buffer(dist.group.WORLD, hidden=HIDDEN, num_max_tokens_per_rank=MOST, num_topk=TOPK)
    for tokens, to_first in BATCHES:
        token = torch.arange(tokens[rank], device=device)
        idx = torch.stack([token % 2, 1 - token % 2] if to_first else [token % 4, (token + 2) % 4], 1)
        x = torch.full((tokens[rank], HIDDEN), 1.0 + rank, dtype=torch.bfloat16, device=device).requires_grad_()
        scores = torch.tensor([0.5, 0.25], device=device).repeat(tokens[rank], 1).requires_grad_()
        whole = (scores.detach() * 2.0**idx).sum(1, keepdim=True).expand(-1, HIDDEN).bfloat16()
        out = _layer(titan, x, idx, scores, rank, False)
        assert torch.equal(out, whole * x.detach())
        out.sum().backward()
        assert torch.equal(x.grad, whole)
        assert torch.equal(scores.grad, 2.0**idx * HIDDEN * (1 + rank))
        with torch.no_grad():
            assert torch.equal(_layer(titan, x, idx, scores, rank, True), whole * x)
    assert not titan._handle_cache
    titan._buffer = None
    deep_ep.release()


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_torchtitan_trains_and_infers_over_elastic_buffer(run_ranks, nodes, ranks_per_node):
    """Compact rows with gradients of tokens and scores, expanded rows without; ranks that send or receive no rows."""
    run_ranks(_check, nodes, ranks_per_node)
