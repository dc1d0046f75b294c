"""Convert a routing map to expert ids and weights, with one slot for each of a token's experts. A dispatch does it in
the programs that count the entries (compute/routing.py).

Protocol      1 each program takes a block of tokens, and stores the experts of each token in ascending order
              2 it fills the remaining slots of the token, and stores the weight of each slot; for a token with more
              experts than slots, it reports how many
Layout        map [T, E] bytes, 1 = the token goes to the expert. ids [T, K] int32, then -1. weights [T, K], then 0.
Memory order  Block barriers separate 1, the weights and the report, which load and store the same slots. Integer
              additions, whose order does not matter.
Progress      No program waits.
Replay        With COUNT_EXCESS the caller zeroes `excess`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device import codes
from ..spec import ep_kernel

_NEEDED_TOPK = tl.constexpr(codes.NEEDED_TOPK)


class Given(NamedTuple):
    """A routing map.

    Attributes:
        map_ptr: [T, E] uint8, 0 or 1.
        probs_ptr: [T, E] float32, read if HAS_PROBS.
        weights_ptr: out [T, K] float32, if HAS_PROBS.
        excess_ptr: [1] int32; if COUNT_EXCESS, the number of experts without a slot is added to it.
        HAS_PROBS: the experts have weights.
        COUNT_EXCESS: else the last slot of a token with too many experts holds NEEDED_TOPK + their number.
        BLOCK_E: experts at a time, a power of two; 0: there is no map.
    """

    map_ptr: Any
    probs_ptr: Any
    weights_ptr: Any
    excess_ptr: Any
    HAS_PROBS: tl.constexpr
    COUNT_EXCESS: tl.constexpr
    BLOCK_E: tl.constexpr


class Counts(NamedTuple):
    """Tokens, experts, and slots of a token."""

    num_tokens: Any
    num_experts: Any
    topk: Any


class Tile(NamedTuple):
    """Tokens of a program, and top-k rounded up; powers of two."""

    KP: tl.constexpr
    BLOCK_T: tl.constexpr


@triton.jit
def fill_slots(
    given,
    ids_ptr,  # out [T, K] int32
    num_tokens,
    num_experts,
    topk,
    KP: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Store the experts and weights of this program's block of tokens. Other threads than the one that stores a value
    see it after a block barrier."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    alive = token < num_tokens
    row = token.to(tl.int64)[:, None]
    seen = tl.zeros([BLOCK_T], tl.int32)
    for first in range(0, num_experts, given.BLOCK_E):
        expert = first + tl.arange(0, given.BLOCK_E)[None, :]
        at = row * num_experts + expert
        here = tl.load(given.map_ptr + at, mask=alive[:, None] & (expert < num_experts), other=0) != 0
        count = here.to(tl.int32)
        slot = seen[:, None] + tl.cumsum(count, axis=1) - count
        fits = here & (slot < topk)
        to = row * topk + slot
        tl.store(ids_ptr + to, tl.broadcast_to(expert, slot.shape), mask=fits)
        seen += tl.sum(count, axis=1)
    k = tl.arange(0, KP)[None, :]
    slots = alive[:, None] & (k < topk)
    filled = slots & (k < seen[:, None])
    tl.store(ids_ptr + row * topk + k, tl.full(slots.shape, -1, tl.int32), mask=slots & (filled == 0))
    if given.HAS_PROBS:
        tl.debug_barrier()
        expert = tl.load(ids_ptr + row * topk + k, mask=filled, other=0)
        weights = tl.load(given.probs_ptr + row * num_experts + expert, mask=filled, other=0.0)
        tl.store(given.weights_ptr + row * topk + k, weights, mask=slots)
    if given.COUNT_EXCESS:
        excess = tl.sum(tl.where(alive, tl.maximum(seen - topk, 0), 0))
        if excess > 0:
            tl.atomic_add(given.excess_ptr, excess, sem="relaxed")
    else:
        tl.debug_barrier()
        last = token.to(tl.int64) * topk + topk - 1
        tl.store(ids_ptr + last, seen + _NEEDED_TOPK, mask=alive & (seen > topk))


@ep_kernel(map_ptr="*u8", probs_ptr="*fp32", ids_ptr="*i32", weights_ptr="*fp32", excess_ptr="*i32")
def map_slots_kernel(
    given: Given,
    ids_ptr,  # out [T, K] int32
    counts: Counts,
    tile: Tile,
):
    fill_slots(given, ids_ptr, counts.num_tokens, counts.num_experts, counts.topk, tile.KP, tile.BLOCK_T)
