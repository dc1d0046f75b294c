"""torchtitan's own functions for HybridEP over HybridEPBuffer, forward and backward; skipped where it is not installed.

    pip install --no-deps torchtitan        (into a folder of its own: --target DIR, and PYTHONPATH=DIR)

Of torchtitan this file and its logging are loaded, unchanged. It registers its ops for CUDA; on the CPU the test
registers the same functions for the CPU. The file takes the base of opaque types by its name in later versions of torch
than 2.13, which call it OpaqueBase.
"""

import importlib.util
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._library import opaque_object

from tests.integrations.peer_modules import folder_of
from triton_ep.distributed import current_heap
from triton_ep.integrations import deep_ep

_FILE = "distributed/deepep/hybridep.py"
_NAME = "torchtitan_hybrid_ep"

pytestmark = [
    pytest.mark.plain,
    pytest.mark.skipif(folder_of("torchtitan", _FILE) is None, reason="torchtitan with HybridEP is not installed"),
    pytest.mark.skipif(
        torch.__version__ < (2, 13), reason="torchtitan's ops return objects, as ops of torch 2.11 cannot and 2.13 can"
    ),
]

HIDDEN, TOPK, EXPERTS, MOST = 128, 2, 2, 8  # experts per rank
# Tokens by rank, and whether all of them go to rank 0.
BATCHES = (((5, 3), False), ((4, 0), False), ((0, 0), False), ((1, 3), True))


def _load() -> Any:
    """Load torchtitan's module once: its ops can only be registered once per process."""
    if _NAME not in sys.modules:
        folder = folder_of("torchtitan", _FILE)
        assert folder is not None
        spec = importlib.util.spec_from_file_location(_NAME, folder / _FILE)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[_NAME] = module  # its dataclasses look for it there
        if not hasattr(opaque_object, "CustomClassBase"):
            opaque_object.CustomClassBase = opaque_object.OpaqueBase
        spec.loader.exec_module(module)
        for op in (module._dispatch_impl, module._combine_impl, module._dispatch_bwd_impl, module._combine_bwd_impl):
            op.register_kernel("cpu")(op._init_fn)
    return sys.modules[_NAME]


def _layer(
    titan: Any, x: torch.Tensor, idx: torch.Tensor, scores: torch.Tensor, rank: int, pad: int | None, static: bool
) -> torch.Tensor:
    """A layer whose experts multiply by a power of two, so that no sum rounds."""
    rows, counts, state = titan.dispatch_tokens(
        x,
        idx,
        scores,
        EXPERTS,
        2 * EXPERTS,
        dist.group.WORLD,
        non_blocking_expert_capacity_factor=1.0 if static else None,
        pad_multiple=pad,
    )
    assert pad is None or not (counts % pad).any()
    of_row = torch.repeat_interleave(torch.arange(EXPERTS, device=x.device), counts)
    assert static or of_row.shape[0] == rows.shape[0]
    factor = torch.ones(rows.shape[0], device=x.device, dtype=rows.dtype)
    factor[: of_row.shape[0]] = 2.0 ** (of_row + rank * EXPERTS).to(rows.dtype)
    if static:  # rows past the last expert's are undefined, and torchtitan's experts do not read them
        rows = torch.where(torch.arange(rows.shape[0], device=x.device).unsqueeze(1) < of_row.shape[0], rows, 0.0)
    return titan.combine_tokens(rows * factor.unsqueeze(1), state, pad)


def _check(rank: int, nodes: int, ranks_per_node: int, pad: int | None) -> None:
    deep_ep.install()
    titan, device = _load(), current_heap().device
    try:
        for tokens, to_first in BATCHES:
            titan.get_buffer(dist.group.WORLD, HIDDEN, MOST, EXPERTS)
            token = torch.arange(tokens[rank], device=device)
            idx = torch.stack([token % 2, 1 - token % 2] if to_first else [token % 4, (token + 2) % 4], 1)
            scores = torch.tensor([0.5, 0.25], device=device).repeat(tokens[rank], 1).requires_grad_()
            x = torch.full((tokens[rank], HIDDEN), 1.0 + rank, dtype=torch.bfloat16, device=device).requires_grad_()
            whole = (scores.detach() * 2.0**idx).sum(1, keepdim=True).expand(-1, HIDDEN).bfloat16()
            out = _layer(titan, x, idx, scores, rank, pad, static=False)
            assert torch.equal(out, whole * x.detach())
            out.sum().backward()
            assert torch.equal(x.grad, whole)
            # torchtitan passes no gradient of scores on where a rank has no tokens, or has received no rows.
            assert (scores.grad is None) == (tokens[rank] == 0 or (to_first and rank == 1))
            if scores.grad is not None:
                assert torch.equal(scores.grad, 2.0**idx * HIDDEN * (1 + rank))
        # Without a look at the counts, all ranks need the same number of tokens.
        token = torch.arange(4, device=device)
        idx = torch.stack([token, (token + 1 + rank) % 4], 1)
        x = torch.arange(4.0, device=device).bfloat16().unsqueeze(1).expand(-1, HIDDEN).contiguous()
        scores = torch.tensor([0.5, 0.25], device=device).repeat(4, 1)
        out = _layer(titan, x, idx, scores, rank, pad, static=True)
        assert torch.equal(out, ((scores * 2.0**idx).sum(1, keepdim=True) * x.float()).bfloat16())
    finally:
        titan._buffer.close()
        titan._buffer = None
        deep_ep.uninstall()


@pytest.mark.parametrize("pad", [None, 4])
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2)])
def test_torchtitan_trains_and_infers_over_hybrid_ep_buffer(run_ranks, nodes, ranks_per_node, pad):
    """Rows by expert, with gradients of tokens and scores; ranks that send or receive no rows; a given number of
    rows."""
    run_ranks(_check, nodes, ranks_per_node, pad)
