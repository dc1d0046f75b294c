"""All kernels that a layer of a given shape may request, which an ahead-of-time build compiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from triton_ep.kernels.device.codes import (
    CHANNELS,
    LANDING_BF16,
    LANDING_MX,
    LANDING_ROW,
    LANDING_WORDS,
    LL_NO_WEIGHTS,
    LL_ROW_WEIGHTS,
    LL_TOKEN_WEIGHTS,
    MX,
    QUANTISE,
    QUANTISE_CHANNELS,
    WORDS,
    partial_stride,
)
from triton_ep.runtime.plans import compact, compute, exchange, experts_backward, low_latency
from triton_ep.runtime.plans.request import KernelRequest
from triton_ep.runtime.plans.shape import TOKEN_BYTES, WORD_BYTES, Shape, word_type


@dataclass(frozen=True)
class LayerCalls:
    """How a layer is called; each option that is set doubles some of its kernels.

    Attributes:
        ids: dtypes of expert ids: "i32", "i64". int32 is always built: a rank that refuses its arguments sends it.
        weights: with routing weights, without, or both. Without is always built, because backward passes need it.
        scatter: full_scatter_indices are passed.
        quantized: rows are also passed as MXTensor (payload "mxfp8").
        gradients: gradients of routing weights are computed.
        compact: `dispatch_compact` and `ops.token_layout` are also called.
        fp8_rows: one-byte rows with scales are also sent (`dispatch_scaled`; with `compact`, as compact rows, too).
        maps: calls are those of `HybridEPBuffer`: by routing maps of up to `topk` experts per token, or by ids, with
            handles that record the rows of a token's assignments.
        slabs: low-latency rows are received in slabs of their experts; other rows are copied to slabs, and back.
        biases: combines add biases to the sums.
        landing: "row", "bf16": conversions of arriving rows of payload "mxfp8", in some calls.
    """

    ids: tuple[str, ...] = ("i32", "i64")
    weights: tuple[bool, ...] = (False, True)
    scatter: tuple[bool, ...] = (False,)
    quantized: bool = True
    gradients: bool = True
    compact: bool = False
    fp8_rows: bool = False
    maps: bool = False
    slabs: bool = False
    biases: bool = False
    landing: tuple[str, ...] = ()


LANDINGS = {"mx": LANDING_MX, "row": LANDING_ROW, "bf16": LANDING_BF16}
"""Conversions of arriving rows of payload "mxfp8"."""


def landed_words(landing: int, hidden: int) -> tuple[str, int]:
    """Type and number of the words of an output row converted from MXFP8: each word has four elements."""
    return "i32" if landing == LANDING_ROW else "i64", hidden // 4


def layer_requests(s: Shape, uses: LayerCalls | None = None) -> list[KernelRequest]:
    """All kernel requests of an `EPAll2AllLayer` of this shape, without duplicates."""
    given = uses = LayerCalls() if uses is None else uses
    # A refused call sends no rows, with int32 ids and without weights.
    uses = replace(uses, weights=tuple(sorted({False, *uses.weights})), ids=tuple(sorted({"i32", *uses.ids})))
    found = list(_barriers(s))
    if s.low_latency:
        found += _low_latency(s, uses)
    else:
        found += [*_routing(s, uses), *_dispatch(s, uses), *_combine(s, uses)]
        if uses.maps:
            found += _maps(s, given)
        if (uses.gradients or uses.compact) and (narrow := narrow_shape(s, s.topk)) is not None:
            found += _combine(narrow, LayerCalls(weights=(False,), compact=uses.compact), of_slots=True)
        if uses.gradients and True in uses.weights:
            found += _weighted_rows(s)
        if uses.fp8_rows:
            found += [*_places(s.scaled, uses), *_dispatch(s.scaled, uses, quantize=False)]
        if uses.compact:
            found += _compact_rows(s, uses, given)
    if uses.slabs:
        found += _slabs(s, uses)
    return list({request.signature(): request for request in found}.values())


def _weighted_rows(s: Shape) -> Iterator[KernelRequest]:
    """Backward of a combine with weights; in static mode only for the rows in use."""
    mx = s.payload is not None
    types = {"dy_ptr": "*fp8e4nv" if mx else f"*{s.token}", "dy_scale_ptr": "*u8" if mx else f"*{s.token}"}
    types |= {"y_ptr": f"*{s.token}", "grad_ptr": f"*{s.token}"}
    for offs in (False, True):
        plan = experts_backward.weighted_rows(s.hidden, mx, offs, s.interpreted)
        yield KernelRequest.of(plan, types | {"offs_ptr": "*i32" if offs else "*fp32"}, {"hidden": s.hidden})


def narrow_shape(s: Shape, columns: int) -> Shape | None:
    """The shape for rows of up to `columns` float32 in the buffers of the layer; None: not even one fits."""
    width = min(columns, s.payload_bytes // 4)
    if s.num_nodes > 1:
        partial_bytes = partial_stride(s.hidden) * (TOKEN_BYTES[s.token] if s.enable_local_combine else 4)
        while width and partial_stride(width) * 4 > partial_bytes:
            width -= 1
    return replace(s, hidden=width, token="fp32", payload=None) if width else None


def _barriers(s: Shape) -> Iterator[KernelRequest]:
    for intra_node_only in (False, True):
        yield KernelRequest.of(exchange.barrier(s, intra_node_only))


def _routing(s: Shape, uses: LayerCalls) -> Iterator[KernelRequest]:
    for scatter, ids in product(sorted({False, *uses.scatter}), uses.ids):
        yield from _splits(s, ids, scatter, None)
    yield from _places(s, uses)


def _splits(s: Shape, ids: str, scatter: bool, given: tuple[bool, bool] | None) -> Iterator[KernelRequest]:
    for packs in sorted({False, s.payload is not None}):
        types = {"topk_idx_ptr": f"*{ids}", "unpacked_ptr": f"*{s.token if packs else 'u8'}"}
        yield KernelRequest.of(exchange.splits(s, scatter, packs, given), types)


def _maps(s: Shape, given: LayerCalls) -> Iterator[KernelRequest]:
    """Ids and weights of routing maps, by themselves and in a dispatch."""
    # Exact mode reports a token with too many experts; budgets count such experts.
    for probs, excess in product(given.weights, (False, True)):
        yield KernelRequest.of(compact.map_slots(s, probs, excess))
        yield from _splits(s, "i32", False, (probs, excess))


def _places(s: Shape, uses: LayerCalls) -> Iterator[KernelRequest]:
    for scatter in sorted({False, *uses.scatter}):
        for weights in uses.weights:
            for kind in uses.ids if scatter else ("i32",):
                types = {"scatter_idx_ptr": f"*{kind}"}
                yield KernelRequest.of(exchange.place(s, weights, scatter), types, {"row_bytes": s.wire_bytes})


def _words(row_bytes: int, pointer: str, has_scales: bool = False) -> tuple[dict[str, str], dict[str, int], int]:
    """Types and integers of a kernel that takes rows in words, and the number of words per row.

    has_scales: words divide the rows of scales, too.
    """
    word = word_type(row_bytes, row_bytes // 32 if has_scales else 0)
    row_words = row_bytes // WORD_BYTES[word]
    return {pointer: f"*{word}"}, {"row_words": row_words}, row_words


def _dispatch(s: Shape, uses: LayerCalls, quantize: bool = True) -> Iterator[KernelRequest]:
    """quantize: MXFP8 rows may be given in the layer's dtype; otherwise they come with their scales."""
    sent = [] if s.payload is not None and not quantize else [(WORDS, s.wire_bytes)]
    if s.payload is not None and (uses.quantized or not quantize):
        sent.append((MX, s.hidden))
    for payload, row_bytes in sent:
        types, numbers, row_words = _words(row_bytes, "x_ptr")
        for spread in () if s.copy_engines else (False, True)[: 1 + s.spreads]:
            yield KernelRequest.of(exchange.push(s, payload, row_words, spread), types, numbers)
        for weights in uses.weights if s.num_nodes > 1 else ():
            yield KernelRequest.of(exchange.send(s, payload, row_words, weights), types, numbers)
    row_bytes = s.payload_bytes if s.payload is None else s.hidden
    for weights in uses.weights:
        if s.num_nodes > 1:
            wire_types, wire_numbers, wire_words = _words(s.wire_bytes, "word_ptr")
            for reduced in sorted({s.enable_local_combine, uses.compact or s.enable_local_combine}):
                yield KernelRequest.of(exchange.forward(s, weights, reduced, wire_words), wire_types, wire_numbers)
        yield from _expansions(s, uses, weights, row_bytes)


def _expansions(s: Shape, uses: LayerCalls, weights: bool, row_bytes: int) -> Iterator[KernelRequest]:
    types, numbers, row_words = _words(row_bytes, "recv_x_ptr", s.payload is not None)
    scales = {"recv_scale_ptr": "*u8"}
    landing = LANDING_WORDS if s.payload is None else LANDING_MX
    for keep in sorted({s.enable_local_combine, s.enable_local_combine or uses.maps}):
        yield KernelRequest.of(exchange.expand(s, landing, weights, keep, row_words), types | scales, numbers)
    if s.payload is None and s.enable_local_combine and uses.gradients and weights and not s.copy_engines:
        plan = exchange.expand(s, landing, weights, True, row_words, keep_rows=True)
        yield KernelRequest.of(plan, types | scales, numbers)
    for name in uses.landing if s.payload is not None else ():
        landing = LANDINGS[name]
        word, row_words = landed_words(landing, s.hidden)
        types = {"recv_x_ptr": f"*{word}", "recv_scale_ptr": "*fp32" if landing == LANDING_ROW else "*u8"}
        plan = exchange.expand(s, landing, weights, s.enable_local_combine, row_words)
        yield KernelRequest.of(plan, types, {"row_words": row_words})


def _compact_rows(s: Shape, uses: LayerCalls, given: LayerCalls) -> Iterator[KernelRequest]:
    """Copies of arrived compact rows, with and without their ids and weights."""
    for ids in given.ids:
        yield KernelRequest.of(compact.token_layout(s.topk, s.world_size, s.interpreted), {"topk_idx_ptr": f"*{ids}"})
    for scales, row_bytes in [(False, s.payload_bytes), (True, s.hidden)][: 1 + uses.fp8_rows]:
        shape = s.scaled if scales else s
        types, numbers, row_words = _words(row_bytes, "recv_x_ptr", scales)
        # Without ids, a pointer to int32 stands in for them.
        yield KernelRequest.of(
            compact.copy_out(shape, scales, False, False, row_words), types | {"recv_idx_ptr": "*i32"}, numbers
        )
        for ids in given.ids:
            for weights in given.weights:
                kinds = types | {"recv_idx_ptr": f"*{ids}"}
                yield KernelRequest.of(compact.copy_out(shape, scales, True, weights, row_words), kinds, numbers)


def _slabs(s: Shape, uses: LayerCalls) -> Iterator[KernelRequest]:
    rows = [s.payload_bytes] if s.payload is None else [s.hidden, s.hidden // 32]
    if uses.fp8_rows:
        rows += [s.hidden, s.hidden // 32]
    for round_scale, exponents in ((False, False), (True, False), (True, True)):
        plan = compute.quantize_channels(round_scale, exponents, s.interpreted)
        yield KernelRequest.of(plan, {"scale_ptr": "*u8" if exponents else "*fp32"})
    for pack, lengths in ((True, rows), (False, [s.payload_bytes])):
        for row_bytes in lengths:
            types, numbers, row_words = _words(row_bytes, "source_ptr")
            plan = compact.slab_rows(pack, row_words, s.interpreted)
            yield KernelRequest.of(plan, types | {"dest_ptr": types["source_ptr"]}, numbers)


def _combine(s: Shape, uses: LayerCalls, of_slots: bool = False) -> Iterator[KernelRequest]:
    """of_slots: rows carry a value per slot."""
    if s.enable_local_combine:
        yield from _sums(s, uses, s.hidden if of_slots else s.topk, of_slots)
    else:
        yield from _sums(s, uses, 0)
    if uses.compact:
        yield from _sums(s, uses, 1)


def _sums(s: Shape, uses: LayerCalls, copies: int, of_slots: bool = False) -> Iterator[KernelRequest]:
    """copies: most rows per token summed before publishing; 0: none. of_slots: each row has one value."""
    reduced, hidden = copies > 0, {"hidden": s.hidden}
    for weights in uses.weights:
        # Next to products, gradients come back without weights.
        rooms = (False, True) if s.makes_room and (copies == s.topk or of_slots) and not weights else (False,)
        if reduced:
            for room in rooms:
                plan = exchange.reduce(s, weights, copies, of_slots, room)
                yield KernelRequest.of(plan, {"y_ptr": f"*{s.token}"}, hidden)
        else:
            types, numbers, row_words = _words(s.payload_bytes, "y_ptr")
            yield KernelRequest.of(exchange.stage(s, weights, row_words), types, numbers)
        summed = weights and not reduced
        if s.num_nodes > 1:
            yield KernelRequest.of(exchange.partial(s, summed, reduced), {"like_x_ptr": f"*{s.token}"}, hidden)
        types = dict.fromkeys(("out_ptr", "bias_ptr", "second_bias_ptr", "own_ptr"), f"*{s.token}")
        for biases in sorted({False, uses.biases}):
            for room in rooms if not biases else (False,):
                yield KernelRequest.of(exchange.pull(s, summed, reduced, biases, copies, room), types, hidden)
    if reduced:
        for room in (False, True) if s.makes_room else (False,):
            yield KernelRequest.of(exchange.enter(s, room))
    if not reduced:
        yield KernelRequest.of(exchange.publish(s))
        yield KernelRequest.of(exchange.free(s))
    elif s.copy_engines:
        yield KernelRequest.of(exchange.begin(s))
        yield KernelRequest.of(exchange.await_staged(s))


def _low_latency(s: Shape, uses: LayerCalls) -> Iterator[KernelRequest]:
    yield from _low_latency_dispatch(s, [WORDS] if s.payload is None else [QUANTISE, MX][: 1 + uses.quantized], uses)
    if uses.fp8_rows:
        quantisable = s.token == "bf16" and s.hidden % CHANNELS == 0
        yield from _low_latency_dispatch(s.scaled, [MX] + [QUANTISE_CHANNELS] * quantisable, uses, scaled=True)
    hidden = {"hidden": s.hidden}
    kinds = [LL_NO_WEIGHTS] * (False in uses.weights) + [LL_ROW_WEIGHTS, LL_TOKEN_WEIGHTS] * (True in uses.weights)
    for kind in kinds:
        types = {"y_ptr": f"*{s.token}", "out_ptr": f"*{s.token}"}
        yield KernelRequest.of(low_latency.combine(s, kind), types, hidden)
    for by_blocks in (False, True) if uses.slabs else ():
        yield KernelRequest.of(low_latency.wait_signals(s, by_blocks))


def _low_latency_dispatch(
    s: Shape, kinds: list[int], uses: LayerCalls, scaled: bool = False
) -> Iterator[KernelRequest]:
    """kinds: payloads of the rows that are sent (kernels/device/payload.py); QUANTISE_CHANNELS goes to slabs only.
    scaled: rows have the caller's scales, or a scale per 128 values."""
    recv_types, recv_numbers, row_words = _words(s.payload_bytes if s.payload is None else s.hidden, "recv_x_ptr")
    for kind in kinds:
        if kind in (QUANTISE, QUANTISE_CHANNELS):
            types, x_words = {"x_ptr": f"*{s.token}"}, s.hidden
        else:
            types, _, x_words = _words(s.payload_bytes if kind == WORDS else s.hidden, "x_ptr")
        places = [False] * (kind != QUANTISE_CHANNELS) + [True] * uses.slabs
        for weights, ids, slabs in product(uses.weights, uses.ids, places):
            # Of MXTensors the slabs keep scales row by row, of one-byte rows of the caller in columns.
            columns = slabs and scaled
            plan = low_latency.dispatch(s, kind, weights, x_words, row_words, slabs, columns)
            given = types | recv_types | {"topk_idx_ptr": f"*{ids}"}
            yield KernelRequest.of(plan, given, recv_numbers | {"x_words": x_words})
