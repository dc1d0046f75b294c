"""Convert a routing map to expert ids and weights, with one slot for each of a token's experts.

Protocol      1 each program takes a block of tokens, and stores the experts of each token in ascending order
              2 it fills the remaining slots of the token; for a token with more experts than slots, it reports how many
Layout        map [T, E] bytes, 1 = the token goes to the expert. ids [T, K] int32, then -1. weights [T, K], then 0.
Memory order  A block barrier separates 1 and 2, which may store into the same slot. Integer additions, whose order
              does not matter.
Progress      No program waits.
Replay        With COUNT_EXCESS the caller zeroes `excess`.
"""

from typing import Any, NamedTuple

import triton.language as tl

from ..device import codes
from ..spec import ep_kernel

_NEEDED_TOPK = tl.constexpr(codes.NEEDED_TOPK)


class Counts(NamedTuple):
    """Tokens, experts, and slots of a token."""

    num_tokens: Any
    num_experts: Any
    topk: Any


class Tile(NamedTuple):
    """Block sizes of a program; powers of two.

    Attributes:
        KP: top-k rounded up.
        BLOCK_T: tokens.
        BLOCK_E: experts at a time.
    """

    KP: tl.constexpr
    BLOCK_T: tl.constexpr
    BLOCK_E: tl.constexpr


@ep_kernel(map_ptr="*u8", probs_ptr="*fp32", ids_ptr="*i32", weights_ptr="*fp32", excess_ptr="*i32")
def map_slots_kernel(
    map_ptr,  # [T, E] uint8, 0 or 1
    probs_ptr,  # [T, E] float32, read if HAS_PROBS
    ids_ptr,  # out [T, K] int32
    weights_ptr,  # out [T, K] float32, if HAS_PROBS
    excess_ptr,  # [1] int32; if COUNT_EXCESS, the number of experts without a slot is added to it
    counts: Counts,
    HAS_PROBS: tl.constexpr,
    COUNT_EXCESS: tl.constexpr,  # else the last slot of a token with too many experts holds NEEDED_TOPK + their number
    tile: Tile,
):
    token = tl.program_id(0) * tile.BLOCK_T + tl.arange(0, tile.BLOCK_T)
    alive = token < counts.num_tokens
    row = token.to(tl.int64)[:, None]
    seen = tl.zeros([tile.BLOCK_T], tl.int32)
    for first in range(0, counts.num_experts, tile.BLOCK_E):
        expert = first + tl.arange(0, tile.BLOCK_E)[None, :]
        at = row * counts.num_experts + expert
        here = tl.load(map_ptr + at, mask=alive[:, None] & (expert < counts.num_experts), other=0) != 0
        count = here.to(tl.int32)
        slot = seen[:, None] + tl.cumsum(count, axis=1) - count
        fits = here & (slot < counts.topk)
        to = row * counts.topk + slot
        tl.store(ids_ptr + to, tl.broadcast_to(expert, slot.shape), mask=fits)
        if HAS_PROBS:
            tl.store(weights_ptr + to, tl.load(probs_ptr + at, mask=fits, other=0.0), mask=fits)
        seen += tl.sum(count, axis=1)
    k = tl.arange(0, tile.KP)[None, :]
    empty = alive[:, None] & (k >= seen[:, None]) & (k < counts.topk)
    tl.store(ids_ptr + row * counts.topk + k, tl.full(empty.shape, -1, tl.int32), mask=empty)
    if HAS_PROBS:
        tl.store(weights_ptr + row * counts.topk + k, tl.zeros(empty.shape, tl.float32), mask=empty)
    if COUNT_EXCESS:
        excess = tl.sum(tl.where(alive, tl.maximum(seen - counts.topk, 0), 0))
        if excess > 0:
            tl.atomic_add(excess_ptr, excess, sem="relaxed")
    else:
        tl.debug_barrier()
        last = token.to(tl.int64) * counts.topk + counts.topk - 1
        tl.store(ids_ptr + last, seen + _NEEDED_TOPK, mask=alive & (seen > counts.topk))
