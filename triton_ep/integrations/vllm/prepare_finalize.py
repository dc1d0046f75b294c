"""PrepareFinalize: dispatch and combine with the methods of vLLM's modular prepare and finalize."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from triton_ep.config import EPConfig, as_integer
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.given import Rows
from triton_ep.context.overlap import RecvHook
from triton_ep.distributed import check_group
from triton_ep.errors import ConfigError, EPError, InputError
from triton_ep.integrations import arguments as check
from triton_ep.integrations.layer_pool import LayerSizes, shared_pool
from triton_ep.integrations.vllm.placement import Placement, Placements
from triton_ep.integrations.vllm.quantize import quantize_rows, scales_in_tiles
from triton_ep.layer import EPAll2AllLayer
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops.slabs import from_slabs, to_slabs

_users = itertools.count()


@dataclass(frozen=True, eq=False)
class Prepared:
    """State of a `prepare` that its `finalize` needs.

    Attributes:
        layer, desc: layer and descriptor of the dispatch.
        weights: [R] float32, weights of the received rows.
        experts: e.
        in_slabs: whether the descriptor takes the rows of slabs.
    """

    layer: EPAll2AllLayer
    desc: EPAllToAllLayoutDesc
    weights: torch.Tensor
    experts: int
    in_slabs: bool


class PrepareFinalize:
    """Dispatch and combine with the methods of vLLM's modular prepare and finalize. All calls are collective.

    Objects of equal sizes over one group share symmetric memory, one layer per micro-batch, so every MoE layer of a
    model may have its own object. Calls of one micro-batch must not overlap on several streams.

    Letters: T tokens of this rank, K experts per token, H hidden, W ranks, e experts of this rank, R received rows.

    Args:
        group: the expert-parallel process group.
        max_tokens: largest T of a call.
        hidden, topk, num_experts: H, K, experts over all ranks. The `expert_map` of the first `prepare` gives the
            placement of experts: any placement, with any number of experts per rank.
        batched: the batched activation format; static, and low latency if the sizes allow it.
        capacity: R in the standard format, for CUDA graphs. None: R is the number of rows received; the host waits for
            it.
        dtype: dtype of rows.
        num_sm, local_world_size, timeout_s: as for `EPAll2AllLayer`.
        enable_local_combine: in the standard format a rank sums the rows of a token first, rounds that sum, and sends
            one row per (token, rank), as vLLM does with DeepEP. False: it sends all rows, and the sum is rounded once.
        formats: vLLM's FusedMoEActivationFormat and ExpertTokensMetadata; None: strings and dicts instead.
        micro_batch: returns the number of the calling micro-batch; None: there is only one.
        quantize: vLLM's moe_kernel_quantize_input; None: only quant_dtype None and "mxfp8" are supported.

    Raises:
        ConfigError: an unknown group, or sizes that cannot work. HeapError: not enough symmetric memory.
    """

    def __init__(
        self,
        group: Any,
        *,
        max_tokens: int,
        hidden: int,
        topk: int,
        num_experts: int,
        batched: bool = False,
        capacity: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        num_sm: int | None = None,
        local_world_size: int | None = None,
        timeout_s: float = 30.0,
        enable_local_combine: bool = True,
        formats: tuple[Any, Any] | None = None,
        micro_batch: Callable[[], int] | None = None,
        quantize: Callable[..., Any] | None = None,
    ) -> None:
        self.group, self.ranks = group, check_group(group)
        self.rank = torch.distributed.get_rank(group)
        self.max_tokens, self.hidden, self.topk = max_tokens, hidden, topk
        self.batched, self.dtype = check.flag("batched", batched, ConfigError), check.dtype("dtype", dtype)
        check.optional_integer("num_sm", num_sm, 1, ConfigError)
        local_world_size = check.optional_integer("local_world_size", local_world_size, 1, ConfigError)
        if formats is not None and (not isinstance(formats, tuple) or len(formats) != 2):
            raise ConfigError(
                f"formats must be FusedMoEActivationFormat and ExpertTokensMetadata, got {check.shown(formats)}."
            )
        for name, function in (("micro_batch", micro_batch), ("quantize", quantize)):
            if function is not None and not callable(function):
                raise ConfigError(f"{name} must be a function or None, got {check.shown(function)}.")
        self._pool = shared_pool("vllm", group, local_world_size)
        self._user = next(_users)
        local = check.flag("enable_local_combine", enable_local_combine, ConfigError) and not self.batched
        self._given: dict[str, Any] = {
            "num_sm": num_sm,
            "timeout_s": timeout_s,
            "capacity": capacity,
            "enable_local_combine": local,
        }
        self.num_experts = as_integer("num_experts", num_experts)
        self._placements = Placements(group, self.rank, self.ranks, self.num_experts)
        # Check the sizes now. The first call reads the placement, which determines the number of experts per rank.
        self._configure(-(-self.num_experts // self.ranks))
        self._formats, self._micro_batch, self._quantize = formats, micro_batch, quantize
        self._prepared: dict[int, Prepared] = {}
        self._latest: dict[int, EPAll2AllLayer] = {}  # by micro-batch

    def _configure(self, experts_per_rank: int) -> None:
        """Set the sizes and options of the layers, for the largest number of experts of any rank.

        Raises:
            ConfigError: sizes that cannot work.
        """
        self._num_slots = experts_per_rank * self.ranks
        sizes = (
            self.max_tokens,
            self.hidden,
            self.topk,
            self._num_slots,
            self.rank,
            self.ranks,
            self._pool.ranks_per_node,
        )
        given = self._given
        config = EPConfig(*sizes, self.dtype, recv_capacity=given["capacity"], timeout_s=given["timeout_s"])
        # The most rows that can arrive: every token has as many experts on this rank as possible.
        most = self.ranks * self.max_tokens * min(self.topk, experts_per_rank)
        self._options: dict[str, Any] = {
            **given,
            "capacity": most if self.batched else given["capacity"],
            "low_latency": self.batched and config.fits_low_latency,
        }

    # --- queries of vLLM --------------------------------------------------------------------------------

    @property
    def activation_format(self) -> Any:
        """vLLM's FusedMoEActivationFormat, or its name."""
        name = "BatchedExperts" if self.batched else "Standard"
        return name if self._formats is None else getattr(self._formats[0], name)

    def topk_indices_dtype(self) -> torch.dtype | None:
        """Dtype of `topk_ids` that needs no conversion."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        """Most tokens per call in the batched format; None in the standard format, as in vLLM's implementations."""
        return self.max_tokens if self.batched else None

    def num_dispatchers(self) -> int:
        """Number of ranks that send rows."""
        return self.ranks

    def output_is_reduced(self) -> bool:
        """True: `finalize` sums over all ranks."""
        return True

    def supports_async(self) -> bool:
        """True: `prepare_async` and `finalize_async` are implemented."""
        return True

    # --- prepare ----------------------------------------------------------------------------------------

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Any, ...]:
        """Send tokens to their experts.

        Args:
            a1: [T, H]. topk_ids: [T, K] int32 or int64, global ids, -1 = dropped. topk_weights: [T, K].
            num_experts: as in the constructor.
            expert_map: [E] int32 from vLLM: the place of each expert on this rank, 0 to e - 1, or -1. The first call
                reads it on all ranks, a host synchronisation. A call with a new tensor, or with one changed in place,
                reads it again; the values must be the same. None: rank r has experts r e to (r + 1) e - 1.
            apply_router_weight_on_input: multiply rows by their weight before the dispatch, not in combine; K = 1.
            quant_config: vLLM's; its quant_dtype, a1_scale, per_act_token_quant, block_shape and is_scale_swizzled are
                used.
            defer_input_quant: do not quantise rows.

        Returns:
            Standard: (rows [R, H], scales or None, counts, ids [R, 1] int32, weights [R, 1] float32). With a capacity,
            rows past the last expert's are undefined; their ids are -1, or with an `expert_map` the id of another
            rank's expert. Batched: (rows [e, M W, H], scales or None, counts, None, None), M = max_tokens. counts:
            ExpertTokensMetadata on the device.

        Raises:
            InputError: an argument does not fit, the quantisation is not supported, an expert is on no rank or on two,
                or the placement differs from the first call's.
            Others: as `EPAll2AllLayer.dispatch`.
        """
        given = a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config
        _, receiver = self.prepare_async(*given, defer_input_quant, split=False)
        return receiver()

    @check.renamed(input="a1", exp_indices="topk_ids", weight="topk_weights")
    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
        *,
        split: bool = True,
    ) -> tuple[Callable[[], None], Callable[[], tuple[Any, ...]]]:
        """The sending half of `prepare`. Returns (hook, receiver): call the hook, which launches the receiving half,
        then the receiver, which returns the results of `prepare`. split=False: both halves are launched, the hook does
        nothing."""
        batch = 0 if self._micro_batch is None else self._micro_batch()
        try:
            self._check(a1, topk_weights, topk_ids, num_experts)
            apply_router_weight_on_input = check.flag("apply_router_weight_on_input", apply_router_weight_on_input)
            wanted = self._wanted(check.flag("defer_input_quant", defer_input_quant), quant_config)
            if apply_router_weight_on_input and topk_ids.shape[1] != 1:
                raise InputError(
                    f"apply_router_weight_on_input is for one expert per token, topk_ids has {topk_ids.shape[1]}. Let "
                    "finalize apply the weights."
                )
        except InputError:
            if batch in self._latest:
                with contextlib.suppress(EPError):  # the caller raises the cause
                    self._latest[batch].refuse()
            raise
        placement = self._placement(expert_map)
        weights = topk_weights.float()
        if apply_router_weight_on_input:
            a1 = a1 * topk_weights.to(a1.dtype)
            weights = torch.ones_like(weights)
        layer = self._latest[batch] = self._layer(batch, "mxfp8" if wanted == "mxfp8" else None)
        given = a1.contiguous(), placement.slots_of(topk_ids).contiguous(), weights.contiguous()
        recv_x, recv_weights, desc, hook = self._send(layer, *given, placement.experts, split)
        assert recv_weights is not None, "given on all ranks"
        in_slabs = isinstance(recv_x, Rows)
        self._prepared[batch] = Prepared(layer, desc, recv_weights, placement.experts, in_slabs)
        # vLLM's kernels look up every id in the expert map, so rows past the received ones get another rank's expert.
        nobody = -1 if expert_map is None else placement.elsewhere
        received = partial(self._received, recv_x, self._prepared[batch], quant_config, wanted, placement, nobody)
        return hook, received

    def _wanted(self, defer_input_quant: bool, quant_config: Any) -> Any:
        """The format that rows are quantised to here, or None."""
        wanted = None if defer_input_quant else getattr(quant_config, "quant_dtype", None)
        if wanted not in (None, "mxfp8") and self._quantize is None:
            raise InputError(
                f"quant_dtype is {wanted!r}; without vLLM's moe_kernel_quantize_input only None and "
                "'mxfp8' are supported."
            )
        if scales_in_tiles(quant_config) and (wanted == "mxfp8" or (isinstance(wanted, str) and self.batched)):
            raise InputError(
                "scales are row by row in this integration, but is_scale_swizzled=True asks for tiles. Set it to False."
            )
        return wanted

    def _send(
        self,
        layer: EPAll2AllLayer,
        a1: torch.Tensor,
        slots: torch.Tensor,
        weights: torch.Tensor,
        experts: int,
        split: bool,
    ) -> tuple[Any, torch.Tensor | None, EPAllToAllLayoutDesc, Callable[[], None]]:
        """Launch a dispatch, or its sending half: memory for rows [R, H] or slabs [e, M W, H], weights, descriptor,
        hook.

        The receiving kernel of a low-latency layer writes slabs itself.
        """
        if not self.batched or not layer.config.low_latency:
            if split:
                return layer.dispatch(a1, slots, weights, return_recv_hook=True)
            return *layer.dispatch(a1, slots, weights), _nothing
        rows, width = (max(experts, 1), self.max_tokens * self.ranks), self.hidden
        slabs = Rows(a1.new_empty(*rows, width))
        if layer.config.payload is not None:
            data, scale = (a1.new_empty(*rows, n, dtype=torch.uint8) for n in (width, width // 32))
            slabs = Rows(data.view(torch.float8_e4m3fn), scale)
        recv_weights, desc, hook = layer.dispatch_to_slabs(Rows(a1), slots, weights, slabs, split)
        return slabs, recv_weights, desc, hook if isinstance(hook, RecvHook) else _nothing

    def _check(self, a1: Any, topk_weights: Any, topk_ids: Any, num_experts: Any) -> None:
        """Raise InputError for arguments that the layer knows under other names; the layer checks the rest."""
        if check.integer("num_experts", num_experts, 1) != self.num_experts:
            raise InputError(f"num_experts is {num_experts}, but this object was created for {self.num_experts}.")
        check.tensor("a1", a1, 2)
        check.tensor("topk_weights", topk_weights, 2)
        check.tensor("topk_ids", topk_ids, 2, (torch.int32, torch.int64))
        if not topk_weights.is_floating_point():
            raise InputError(f"topk_weights must be of a floating-point dtype, got {topk_weights.dtype}.")
        if topk_weights.shape != topk_ids.shape or a1.shape[0] != topk_ids.shape[0]:
            raise InputError(
                f"a1 is {list(a1.shape)}, topk_weights {list(topk_weights.shape)}, topk_ids {list(topk_ids.shape)}: "
                "they must have one row per token, and the last two the same number of columns."
            )

    def _placement(self, expert_map: Any) -> Placement:
        """The placement of experts on ranks. The first call is collective and determines the sizes of layers."""
        if self._placements.known is None:
            self._configure(self._placements.learn(expert_map).most)
        return self._placements.check(expert_map)

    def _received(
        self,
        recv_x: torch.Tensor | MXTensor | Rows,
        prepared: Prepared,
        quant_config: Any,
        wanted: Any,
        placement: Placement,
        nobody: int,
    ) -> tuple[Any, ...]:
        """The results of `prepare`; nobody: id of rows past the last expert's."""
        desc = prepared.desc
        # Layers have as many places on every rank as the largest rank needs; unused places receive no rows.
        counts = desc.num_recv_tokens_per_expert[: placement.experts]
        rows: torch.Tensor
        scales: torch.Tensor | None
        if isinstance(recv_x, Rows):
            rows = recv_x.data[: placement.experts]
            scales = None if recv_x.scale is None else recv_x.scale[: placement.experts]
        elif isinstance(recv_x, MXTensor):
            rows, scales = recv_x.qdata, recv_x.scale.view(torch.uint8)
        else:
            rows, scales = recv_x, None
        if self.batched and not prepared.in_slabs:
            slab = self.max_tokens * self.ranks
            rows = _slabs(rows, desc, placement.experts, slab)
            if scales is not None:
                scales = _slabs(scales, desc, placement.experts, slab)
        if wanted not in (None, "mxfp8") and rows.numel():
            assert self._quantize is not None, "checked before the dispatch"
            in_use = None if self._options["capacity"] is None else partial(self._in_use, rows.shape, desc, counts)
            rows, scales = quantize_rows(self._quantize, rows, quant_config, in_use)
        meta = {"expert_num_tokens": counts, "expert_num_tokens_cpu": None}
        tokens = meta if self._formats is None else self._formats[1](**meta)
        if self.batched:
            return rows, scales, tokens, None, None
        # The position of a row gives its expert.
        at = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
        local = torch.searchsorted(desc.expert_offsets[1:].contiguous(), at, right=True, out_int32=True)
        ids = placement.ids_of(local, nobody)
        return rows, scales, tokens, ids.unsqueeze(1), prepared.weights.unsqueeze(1)

    def _in_use(self, shape: torch.Size, desc: EPAllToAllLayoutDesc, counts: torch.Tensor) -> torch.Tensor:
        """Which rows were received: [R] bool in the standard format, [e, n] for slabs; other rows are undefined."""
        last = counts.unsqueeze(1) if self.batched else desc.expert_offsets[-1]
        at = torch.arange(shape[-2], dtype=torch.int32, device=last.device)
        return at < last

    # --- finalize ---------------------------------------------------------------------------------------

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Send expert outputs back into `output` [T, H]: weights times rows, summed over k and ranks.

        Args:
            fused_expert_output: [R, H] (or [R, 1, H]) of the rows that `prepare` returned, or [e, M W, H].
            topk_weights, topk_ids: vLLM's after `prepare`; combine uses the weights received with the rows.
            apply_router_weight_on_input: weights were applied before the dispatch.
            weight_and_reduce_impl: vLLM's. With a delegate, combine applies the weights in float32; with a no-op, the
                experts applied them; any other object is applied before combine.

        Raises:
            InputError: no `prepare` came before, or shapes do not fit it. Others: as `EPAll2AllLayer.combine`.
        """
        given = fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
        _, receiver = self.finalize_async(output, *given, split=False)
        receiver()

    @check.renamed(input="fused_expert_output", weights="topk_weights")
    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
        *,
        split: bool = True,
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """The sending half of `finalize`. Returns (hook, receiver): call the hook, which launches the receiving half,
        then the receiver; `output` is complete after both. split=False: both halves are launched, the hook does
        nothing."""
        self._before_combine()
        batch = 0 if self._micro_batch is None else self._micro_batch()
        prepared = self._prepared.get(batch)
        if prepared is None:
            raise InputError(f"finalize was called without a prepare first (micro-batch {batch}).")
        layer, desc = prepared.layer, prepared.desc
        _check_output(output, (desc.num_dispatch_token_cur_rank, self.hidden))
        check.tensor("fused_expert_output", fused_expert_output)
        apply_router_weight_on_input = check.flag("apply_router_weight_on_input", apply_router_weight_on_input)
        if weight_and_reduce_impl is not None and not callable(getattr(weight_and_reduce_impl, "apply", None)):
            raise InputError(
                "weight_and_reduce_impl must be one of vLLM's TopKWeightAndReduce objects or None, got "
                f"{check.shown(weight_and_reduce_impl)}."
            )
        kind = type(weight_and_reduce_impl).__name__
        weights = None if apply_router_weight_on_input else prepared.weights
        rows = fused_expert_output
        if kind == "TopKWeightAndReduceNoOP":
            weights = None
        elif kind != "TopKWeightAndReduceDelegate" and weight_and_reduce_impl is not None:
            if self.batched:
                raise InputError(
                    f"in the batched format combine applies the weights and sums (pass a delegate), got {kind}."
                )
            if rows.numel():
                rows = weight_and_reduce_impl.apply(
                    output=None,
                    fused_expert_output=rows,
                    topk_weights=topk_weights,
                    topk_ids=topk_ids,
                    apply_router_weight_on_input=apply_router_weight_on_input,
                )
            weights = None
        if self.batched:
            rows = self._rows_of_slabs(rows, prepared)
        if rows.dim() == 3:
            rows = rows.reshape(-1, self.hidden)
        rows = rows.to(self.dtype).contiguous()
        out = output if output.dtype == self.dtype and output.is_contiguous() else None
        hook: Callable[[], None] = _nothing
        if split:
            combined, hook = layer.combine(rows, desc, weights, out=out, return_recv_hook=True)
        else:  # one launch instead of two with low latency
            combined = layer.combine(rows, desc, weights, out=out)
        del self._prepared[batch]  # only now: a refused call may be repeated
        return hook, _nothing if combined is output else partial(_copy, output, combined)

    def _before_combine(self) -> None:
        """What must run before a combine: nothing, unless a subclass says so."""

    def _rows_of_slabs(self, slabs: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        """Expert outputs as the descriptor numbers them, from slabs [e, M W, H]."""
        experts, desc, shape = prepared.experts, prepared.desc, (self.max_tokens * self.ranks, self.hidden)
        if slabs.shape != (experts, *shape):
            raise InputError(f"fused_expert_output must be {[experts, *shape]}, got {list(slabs.shape)}.")
        if not experts:
            return slabs.new_empty(desc.num_recv_rows, self.hidden)
        if prepared.in_slabs:
            return slabs.reshape(-1, self.hidden)
        counts, offsets = desc.num_recv_tokens_per_expert[:experts], desc.expert_offsets[: experts + 1]
        return from_slabs(slabs.contiguous(), offsets, counts, desc.num_recv_rows)

    # --- life -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the symmetric memory of layers that no other object uses. Collective, idempotent."""
        self._prepared.clear()
        self._latest.clear()
        self._pool.free(self._user)

    def _layer(self, batch: int, payload: str | None) -> EPAll2AllLayer:
        """The layer of a micro-batch and a payload; the first call creates it, collectively."""
        options = self._options
        sizes = LayerSizes(
            self.hidden,
            self.topk,
            self._num_slots,
            self.dtype,
            options["num_sm"],
            options["timeout_s"],
            capacity=options["capacity"],
            max_tokens=self.max_tokens,
            payload=payload,
            low_latency=options["low_latency"],
            enable_local_combine=options["enable_local_combine"],
            variant=batch,
        )
        return self._pool.get(sizes, user=self._user)


def _nothing() -> None:
    """What is left of a call that has launched all of it."""


def _copy(output: torch.Tensor, combined: torch.Tensor) -> None:
    output.copy_(combined)


def _check_output(output: Any, shape: tuple[int, int]) -> None:
    if check.tensor("output", output).shape != shape:
        raise InputError(f"output is {list(output.shape)}, but prepare got tokens {list(shape)}.")


def _slabs(rows: torch.Tensor, desc: EPAllToAllLayoutDesc, experts: int, num_rows: int) -> torch.Tensor:
    """[e, num_rows, H]: each expert's rows at the start of its slab, from expert-major rows; the rest undefined."""
    slabs = rows.new_empty(experts, num_rows, rows.shape[1])
    if experts:
        to_slabs(rows, desc.expert_offsets[: experts + 1], desc.num_recv_tokens_per_expert[:experts], slabs)
    return slabs
