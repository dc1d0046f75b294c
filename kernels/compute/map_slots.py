"""Convert a routing map to expert ids and weights, with one slot for each of a token's experts. A dispatch does it in
the programs that count the entries (compute/routing.py).

Protocol      1 each program takes a block of tokens, and stores the experts of each token in ascending order, and their
              weights
              2 it fills the remaining slots of the token; for a token with more experts than slots, it reports how many
Layout        map [T, E] bytes, 1 = the token goes to the expert. ids [T, K] int32, then -1. weights [T, K], then 0.
              A *word* is 8 experts of a token: bytes of 64 bits. Multiplied by 0x0101010101010101, which is _ONES, its
              bytes become numbers of experts up to each; for example experts 1, 2 and 5 have the word
              0x0000010000010100 and the numbers 3 3 3 2 2 2 1 0, from the last byte to the first.
Memory order  A block barrier separates 1 from the report, which stores to the same slots.
Progress      No program waits.
Replay        With COUNT_EXCESS the caller zeroes `excess`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device import codes
from ..spec import ep_kernel

_NEEDED_TOPK = tl.constexpr(codes.NEEDED_TOPK)
_ONES = tl.constexpr(0x0101010101010101)
_LOW_BITS = tl.constexpr(0x7F7F7F7F7F7F7F7F)


class Given(NamedTuple):
    """A routing map.

    Attributes:
        map_ptr: [T, E] uint8, 0 or 1; starts at a multiple of 8 bytes.
        probs_ptr: [T, E] float32, read if HAS_PROBS.
        weights_ptr: out [T, K] float32, if HAS_PROBS.
        excess_ptr: [1] int32; if COUNT_EXCESS, the number of experts without a slot is added to it.
        HAS_PROBS: the experts have weights.
        COUNT_EXCESS: else the last slot of a token with too many experts holds NEEDED_TOPK + their number.
        WORDS: words of a token that are read at a time, a power of two; 0: there is no map.
        WHOLE: E is a multiple of 8, so no word has experts of two tokens.
    """

    map_ptr: Any
    probs_ptr: Any
    weights_ptr: Any
    excess_ptr: Any
    HAS_PROBS: tl.constexpr
    COUNT_EXCESS: tl.constexpr
    WORDS: tl.constexpr
    WHOLE: tl.constexpr


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
def _load_words(given, row, word, alive, num_experts):
    """Words [WORDS, BLOCK_T] of tokens, each byte 0 or 1."""
    if given.WHOLE:
        words_ptr = given.map_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
        num_words = num_experts // 8
        words = tl.load(words_ptr + row * num_words + word, mask=alive & (word < num_words), other=0)
    else:
        words = tl.zeros([word.shape[0], row.shape[1]], tl.int64)
        for place in tl.static_range(8):
            expert = word * 8 + place
            mask = alive & (expert < num_experts)
            byte = tl.load(given.map_ptr + row * num_experts + expert, mask=mask, other=0)
            words |= byte.to(tl.int64) << (8 * place)
    return ((((words & _LOW_BITS) + _LOW_BITS) | words) >> 7) & _ONES


@triton.jit
def _byte(words, PLACE: tl.constexpr):
    return ((words >> (8 * PLACE)) & 255).to(tl.int32)


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
    seen = tl.zeros([BLOCK_T], tl.int32)
    # Words of a token come first, because the compiler places values that way at addresses about which it knows
    # nothing: so all values of a word belong to one thread.
    row = token.to(tl.int64)[None, :]
    for first in range(0, num_experts, 8 * given.WORDS):
        word = first // 8 + tl.arange(0, given.WORDS)[:, None]
        words = _load_words(given, row, word, alive[None, :], num_experts)
        numbers = words * _ONES
        count = _byte(numbers, 7)
        before = seen[None, :] + tl.cumsum(count, axis=0) - count
        weights = ()
        if given.HAS_PROBS:
            # All are loaded before any is stored: behind a store, each load would wait for memory again.
            for place in tl.static_range(8):
                fits = (_byte(words, place) != 0) & (before + _byte(numbers, place) <= topk)
                probs_ptr = given.probs_ptr + row * num_experts + word * 8 + place
                weights = weights + (tl.load(probs_ptr, mask=fits, other=0.0),)
        for place in tl.static_range(8):
            slot = before + _byte(numbers, place) - 1
            fits = (_byte(words, place) != 0) & (slot < topk)
            to = row * topk + slot
            tl.store(ids_ptr + to, tl.broadcast_to(word * 8 + place, slot.shape), mask=fits)
            if given.HAS_PROBS:
                tl.store(given.weights_ptr + to, weights[place], mask=fits)
        seen += tl.sum(count, axis=0)
    k = tl.arange(0, KP)[None, :]
    empty = alive[:, None] & (k < topk) & (k >= seen[:, None])
    to = token.to(tl.int64)[:, None] * topk + k
    tl.store(ids_ptr + to, tl.full(empty.shape, -1, tl.int32), mask=empty)
    if given.HAS_PROBS:
        tl.store(given.weights_ptr + to, tl.zeros(empty.shape, tl.float32), mask=empty)
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
