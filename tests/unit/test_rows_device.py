"""Places of rows within a token, compared with a stable sort."""

import pytest
import torch
import triton
import triton.language as tl

from triton_ep.runtime.launch import INTERPRETING  # before the kernels: decides how they run

# isort: split
from triton_ep.kernels.device.pull import compact_position

DEVICE = "cpu" if INTERPRETING else "cuda"


@triton.jit
def _positions(here_ptr, out_ptr, N: tl.constexpr, KP: tl.constexpr):
    at = tl.arange(0, N)[None, :] * KP + tl.arange(0, KP)[:, None]
    tl.store(out_ptr + at, compact_position(tl.load(here_ptr + at) != 0))


@pytest.mark.parametrize("num_warps", [4, 16])
@pytest.mark.parametrize("kp", [1, 2, 4, 8, 16, 32])
def test_entries_that_are_here_come_first_in_order(kp: int, num_warps: int) -> None:
    """All patterns of up to 8 entries; for more entries none, all and random ones."""
    if kp <= 8:
        here = (torch.arange(max(2**kp, 2))[:, None] >> torch.arange(kp)) & 1
    else:
        here = torch.rand(64, kp, generator=torch.Generator().manual_seed(kp)).lt(0.4).int()
        here[0], here[1] = 0, 1
    want = (1 - here).argsort(dim=1, stable=True).argsort(dim=1)
    out = torch.empty(here.shape, dtype=torch.int32, device=DEVICE)
    _positions[(1,)](here.int().to(DEVICE), out, N=len(here), KP=kp, num_warps=num_warps)
    assert torch.equal(out.cpu().long(), want)
