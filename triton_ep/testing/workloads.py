"""Inputs of a dispatch that encode their origin, and experts with distinct results."""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from triton_ep.errors import InputError

_GROUP = 4  # columns that together encode one origin
_BITS_PER_VALUE = 11  # sign, 3 bits of exponent, 7 of mantissa: exact in bf16, fp16 and fp32
_RANK_BITS, _TOKEN_BITS, _COLUMN_BITS = 10, 17, 17
_ORIGIN_BITS = _GROUP * _BITS_PER_VALUE
_WEIGHT_BITS = 23
ROUTINGS = ("uniform", "skewed", "one_expert", "all_dropped", "duplicates")


@dataclass(frozen=True)
class Workload:
    """One rank's input of a dispatch.

    Attributes:
        x: [T, H] rows, encoded as described in `make_workload`.
        topk_idx: [T, K] int32 expert of each assignment; -1 and `num_experts` both mark a dropped entry.
        topk_weights: [T, K] float32 in [0.5, 1), distinct over all ranks while W * T * K <= 2**23.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    def to(self, device: torch.device | str) -> "Workload":
        """The same workload on another device."""
        return Workload(self.x.to(device), self.topk_idx.to(device), self.topk_weights.to(device))

    def with_ids(self, dtype: torch.dtype) -> "Workload":
        """The same workload with expert ids of int32 or int64."""
        return replace(self, topk_idx=self.topk_idx.to(dtype))


def _mix(value: torch.Tensor, bits: int) -> torch.Tensor:
    """A bijection of the integers below 2**bits (int64) that changes about half of the bits."""
    mask, half = (1 << bits) - 1, (bits + 1) // 2
    for factor in (0x9E3779B97F4A7C15 & mask | 1, 0xC2B2AE3D27D4EB4F & mask | 1):
        value = (value * factor) & mask  # wraps at 2**64, above the mask
        value = value ^ (value >> half)
    return value


def _salt(seed: int, bits: int) -> int:
    return int(_mix(torch.tensor(seed * 2 + 1), 62).item()) & ((1 << bits) - 1)


def make_workload(
    rank: int,
    world_size: int,
    num_tokens: int,
    *,
    hidden: int,
    topk: int,
    num_experts: int,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    routing: str = "uniform",
    drop: float = 0.1,
) -> Workload:
    """Input of rank `rank` on the CPU. It depends on the arguments alone, so each rank can compute any rank's input.

    Columns 4c .. 4c+3 of a row of `x` are a one-to-one code of (rank, token, c): 4 values of 11 bits, each
    +-(1 + m/128) * 2**e with m < 128 and -3 <= e <= 4, hence exact in bf16, fp16 and fp32. A misplaced aligned
    piece of 4 columns always differs from the expected one; an incomplete last piece may match with a chance of
    1 : 2048 per value. Another seed gives other values, so stale data of an earlier call show too.

    Arguments:
        num_tokens: tokens of this rank; may be 0 and may differ between ranks.
        topk: at most `num_experts`.
        routing:
            "uniform": distinct experts per token, all equally likely.
            "skewed": distinct; the i-th most popular expert has a probability proportional to 1/i (Zipf). The
                order of popularity is drawn from the seed, the same on all ranks.
            "one_expert": experts s, s+1, .. (modulo `num_experts`) for every token; s = seed % num_experts.
            "all_dropped": every entry is dropped.
            "duplicates": as "uniform", but in every token a later assignment goes to the same expert as the first.
        drop: fraction of the entries that are dropped, drawn at random.

    Raises:
        InputError: unknown routing, sizes beyond the range of the encoding (1024 ranks, 131072 tokens per rank,
            524288 columns), or a `topk` that does not fit the routing.
    """
    _check_sizes(rank, world_size, num_tokens, hidden, topk, num_experts, routing)
    generator = torch.Generator().manual_seed(_salt(seed * 1024 + rank, 62))
    if routing == "all_dropped":
        idx = torch.full((num_tokens, topk), -1)
        drop = 1.0
    elif routing == "one_expert":
        idx = ((seed + torch.arange(topk)) % num_experts).repeat(num_tokens, 1)
    else:
        popularity = torch.zeros(num_experts, dtype=torch.float64)
        if routing == "skewed":
            shared = torch.Generator().manual_seed(_salt(seed, 62))
            place = torch.randperm(num_experts, generator=shared)
            popularity = -torch.log(place.double() + 1)
        # The top k of log(p) + Gumbel noise are a draw without replacement with probabilities p.
        noise = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64)
        idx = (popularity - torch.log(-torch.log(noise.clamp(1e-300, 1 - 1e-16)))).topk(topk, dim=1).indices
        if routing == "duplicates":
            token = torch.arange(num_tokens)
            idx[token, 1 + token % (topk - 1)] = idx[:, 0].clone()
    dropped = torch.rand(num_tokens, topk, generator=generator) < drop
    mark = torch.where(torch.rand(num_tokens, topk, generator=generator) < 0.5, -1, num_experts)
    idx = torch.where(dropped, mark, idx)

    copy = torch.arange(num_tokens * topk).view(num_tokens, topk) * world_size + rank
    code = _mix((copy ^ _salt(seed, _WEIGHT_BITS)) & ((1 << _WEIGHT_BITS) - 1), _WEIGHT_BITS)
    weights = (0.5 + code.double() / (1 << (_WEIGHT_BITS + 1))).float()
    return Workload(_coded_rows(rank, num_tokens, hidden, seed).to(dtype), idx.int(), weights)


def _check_sizes(
    rank: int, world_size: int, num_tokens: int, hidden: int, topk: int, num_experts: int, routing: str
) -> None:
    if routing not in ROUTINGS:
        raise InputError(f"routing is {routing!r}; there are {', '.join(ROUTINGS)}")
    if not 0 <= rank < world_size:
        raise InputError(f"rank is {rank}, must be in [0, world_size) with world_size {world_size}")
    limits = (
        ("world_size", world_size, 1 << _RANK_BITS),
        ("num_tokens", num_tokens, 1 << _TOKEN_BITS),
        ("hidden", hidden, _GROUP << _COLUMN_BITS),
        ("topk", topk, num_experts),
    )
    for name, value, limit in limits:
        if value > limit:
            raise InputError(f"{name} is {value}, a workload has at most {limit}; use a smaller one")
    if routing == "duplicates" and topk < 2:
        raise InputError(f'routing "duplicates" needs topk >= 2, it is {topk}')


def _coded_rows(rank: int, num_tokens: int, hidden: int, seed: int) -> torch.Tensor:
    """[num_tokens, hidden] float32; the code described in `make_workload`."""
    groups = -(-hidden // _GROUP)
    token = torch.arange(num_tokens).view(-1, 1)
    origin = (rank << (_TOKEN_BITS + _COLUMN_BITS)) + (token << _COLUMN_BITS) + torch.arange(groups)
    code = _mix(origin ^ _salt(seed, _ORIGIN_BITS), _ORIGIN_BITS)
    lanes = (code.unsqueeze(-1) >> (torch.arange(_GROUP) * _BITS_PER_VALUE)) & ((1 << _BITS_PER_VALUE) - 1)
    value = torch.ldexp(1 + (lanes & 127) / 128, ((lanes >> 7) & 7) - 3)
    value = torch.where(lanes >> 10 == 1, -value, value)
    return value.reshape(num_tokens, groups * _GROUP)[:, :hidden].contiguous()


def expert_scale(expert: torch.Tensor | int) -> torch.Tensor:
    """Factors of `apply_expert`, float32 of the shape of `expert`: none is 1, the first 512 all differ.

    A factor is +-(1 + (2m+1)/128) * 2**e, so that even after rounding to bf16 a row times one factor differs from
    the row times another.
    """
    code = (torch.as_tensor(expert).long() * 0x9D) & 511
    value = torch.ldexp(1 + (2 * (code & 63) + 1) / 128, ((code >> 6) & 3) - 2)
    return torch.where(code >> 8 == 1, -value, value)


def apply_expert(x: torch.Tensor, expert: torch.Tensor | int) -> torch.Tensor:
    """A test expert with distinct results: each row times `expert_scale`, rounded once to x's dtype.

    Arguments:
        x: [R, H], or one row [H].
        expert: global expert id of all rows, or one per row, [R].
    """
    scale = expert_scale(expert).to(x.device)
    return (x.float() * scale.unsqueeze(-1)).to(x.dtype)


def apply_experts(recv_x: torch.Tensor, expert_offsets: torch.Tensor, first_expert: int) -> torch.Tensor:
    """`apply_expert` on the rows of a dispatch.

    Arguments:
        recv_x: [R, H], expert-major.
        expert_offsets: [e + 1], first row of each local expert; rows from the last entry on become zero.
        first_expert: global id of the first local expert, rank * e.
    """
    offsets = expert_offsets.tolist()
    y = torch.zeros_like(recv_x)
    for local, (begin, end) in enumerate(pairwise(offsets)):
        y[begin:end] = apply_expert(recv_x[begin:end], first_expert + local)
    return y
