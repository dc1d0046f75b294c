"""Arithmetic of the low-latency kernels, compared with torch's."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import triton_ep.runtime.launch  # noqa: F401  before the kernels: decides how they run
from triton_ep.kernels.device.low_latency import on_owner, owners, quotient, rank_after, rank_bits


class _Sizes(NamedTuple):
    """The fields of a Job that the helpers read."""

    num_ranks: Any
    experts_per_rank: Any


@triton.jit
def _quotients(value_ptr, out_ptr, divisor, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, quotient(tl.load(value_ptr + at), divisor))


def test_quotients_are_exact() -> None:
    """Quotients are exact next to multiples, where a rounding error would show, and at both ends."""
    for divisor in (*range(1, 34), 63, 127, 255, 500, 511, 512, 2047, 2048):
        multiples = torch.arange(0, 2**20, max(2**20 // 2048 // divisor, 1) * divisor)
        values = torch.cat([multiples, multiples + divisor - 1, torch.tensor([2**20 - 1])])
        values = values[values < 2**20].to(torch.int32)
        block = triton.next_power_of_2(values.numel())
        values = torch.cat([values, values.new_zeros(block - values.numel())])
        out = torch.empty_like(values)
        _quotients[(1,)](values, out, divisor, N=block)
        assert torch.equal(out, values // divisor), divisor


@triton.jit
def _owners(ids_ptr, owner_ptr, local_ptr, bits_ptr, sizes, N: tl.constexpr):
    at = tl.arange(0, N)
    ids = tl.load(ids_ptr + at)
    owner = owners(sizes, ids)
    tl.store(owner_ptr + at, owner)
    tl.store(local_ptr + at, on_owner(sizes, ids, owner))
    tl.store(bits_ptr, rank_bits(owner, 0))


def test_owners_of_dropped_ids_set_no_bit() -> None:
    """With 32 ranks of 3 experts the last rank is the sign bit; -1 belongs to no rank."""
    ids = torch.tensor([0, 2, 3, 95, -1, 47, 93, -1], dtype=torch.int32)
    owner, local, bits = torch.empty_like(ids), torch.empty_like(ids), torch.empty(1, dtype=torch.int32)
    _owners[(1,)](ids, owner, local, bits, _Sizes(32, 3), N=8)
    assert owner.tolist() == [0, 0, 1, 31, -1, 15, 31, -1]
    assert local[ids >= 0].tolist() == [0, 2, 0, 2, 2, 0]
    assert int(bits) % 2**32 == 2**0 | 2**1 | 2**15 | 2**31


@triton.jit
def _ranks_after(out_ptr, sizes, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, rank_after(sizes, at))


def test_ranks_are_counted_on_from_the_first() -> None:
    """Numbers below twice the number of ranks."""
    out = torch.empty(8, dtype=torch.int32)
    _ranks_after[(1,)](out, _Sizes(5, 3), N=8)
    assert out.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
