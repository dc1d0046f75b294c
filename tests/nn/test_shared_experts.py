"""Shared experts overlap the exchange and add their outputs, in results and gradients."""

from __future__ import annotations

import pytest
import torch

from triton_ep.distributed import current_heap
from triton_ep.errors import ConfigError, InputError, PeerFailed
from triton_ep.nn import MoE, finalize_exchanges

pytestmark = pytest.mark.plain
HIDDEN, FFN = 64, 32
SIZES = {"num_experts": 4, "topk": 2, "max_tokens": 8, "timeout_s": 60.0}


class _Mlp(torch.nn.Sequential):
    def __init__(self, width: int = HIDDEN) -> None:
        options = {"device": current_heap().device, "dtype": torch.bfloat16}
        super().__init__(torch.nn.Linear(HIDDEN, 48, **options), torch.nn.SiLU(), torch.nn.Linear(48, width, **options))


def _check(rank: int, nodes: int, ranks_per_node: int) -> None:
    device = current_heap().device
    torch.manual_seed(4)
    shared = _Mlp()
    alone = MoE(HIDDEN, FFN, **SIZES, payload="mxfp8")
    both = MoE(HIDDEN, FFN, **SIZES, payload="mxfp8", shared=shared)
    assert {name for name in both.state_dict() if name.startswith("shared.")} == {
        f"shared.{name}" for name in shared.state_dict()
    }
    both.load_state_dict({**alone.state_dict(), **{f"shared.{name}": p for name, p in shared.state_dict().items()}})
    x = torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16().to(device)
    leaves = [x.clone().requires_grad_() for _ in range(3)]
    grad = torch.linspace(-1, 1, x.numel()).view(x.shape).bfloat16().to(device)
    y = both(leaves[0])
    y.backward(grad)
    by_shared = [parameter.grad.clone() for parameter in shared.parameters()]
    shared.zero_grad()
    parts = alone(leaves[1]), shared(leaves[2])
    torch.autograd.backward(parts, (grad, grad))
    assert torch.equal(y, parts[0] + parts[1])
    # Autograd adds three gradients of x, the router's included, in its own order.
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad + leaves[2].grad, rtol=2**-6, atol=2**-6)
    assert all(map(torch.equal, by_shared, [parameter.grad for parameter in shared.parameters()]))
    assert torch.equal(both.experts.w13.grad, alone.experts.w13.grad)
    with torch.no_grad():
        decoder = MoE(HIDDEN, FFN, **SIZES, payload="mxfp8", low_latency=True, shared=shared)
        decoder.load_state_dict(both.state_dict())
        torch.testing.assert_close(decoder(x), y, rtol=2**-5, atol=2**-5)

    with pytest.raises(ConfigError, match="must be a torch module or None, got function"):
        MoE(HIDDEN, FFN, **SIZES, shared=lambda x: x)  # type: ignore[arg-type]
    narrow = MoE(HIDDEN, FFN, **SIZES, shared=_Mlp(32) if rank == 0 else _Mlp())
    with pytest.raises(InputError if rank == 0 else PeerFailed, match=r"must return \[2, 3, 64\]|rank 0 rejected"):
        narrow(x)
    both(x)  # all ranks are still in step
    finalize_exchanges()


def test_shared_experts_add_what_they_give(run_ranks):
    """Equals the module without them plus a dense layer; a result of another shape is refused on all ranks."""
    run_ranks(_check, 1, 2)
