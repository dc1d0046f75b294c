"""HybridEPBuffer: dispatch and combine in HybridEP's calling convention."""

from __future__ import annotations

from operator import sub
from types import SimpleNamespace
from typing import Any

import torch

from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.given import Rows
from triton_ep.distributed import check_group
from triton_ep.errors import ConfigError, InputError
from triton_ep.exchange.slots import needed_slots, to_slots
from triton_ep.integrations import arguments as check
from triton_ep.integrations import at_once
from triton_ep.integrations.host_counts import HostCounts
from triton_ep.integrations.hybrid_ep import arguments as checks
from triton_ep.integrations.hybrid_ep.handle import RANK_ITEMS, Handle, Routing, open_handle
from triton_ep.integrations.hybrid_ep.layers import Layers
from triton_ep.integrations.hybrid_ep.maps import indices_to_map, map_of_slots, weights_by_ids, weights_of_slots
from triton_ep.integrations.hybrid_ep.routing import AgreedSizes, CallMode, GivenRouting
from triton_ep.integrations.hybrid_ep.rows import SentRows, dtype_of_layer, sendable
from triton_ep.layer import EPAll2AllLayer
from triton_ep.runtime.untraced import untraced_calls

Permuted = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, Handle]


@untraced_calls("an exchange between ranks")
class HybridEPBuffer:
    """Dispatch and combine in HybridEP's calling convention. All calls are collective over the group.

    Letters: T tokens of this rank (any number, zero included; it may differ between ranks), E experts over all ranks, e
    experts of this rank, H hidden, P permuted rows.

    Args:
        group: process group, any sub-group of the world.
        hidden_dim: H; another H needs another buffer.
        max_num_of_tokens_per_rank: T of the first memory allocation. More tokens make the memory grow, collectively.
            Earlier handles stay valid, and their memory stays allocated, until `close`.
        num_local_experts: e.
        use_fp8: dispatches also take one-byte rows with scales; a call can override it.
        num_sms_dispatch_api, num_sms_combine_api: CTAs of the communication kernels, the larger of both; None: as
            tuned.
        num_of_hybrid_ep_ranks_per_nvlink_domain: ranks per node; None: as `initialize_distributed` found them.
        topk: most experts per token. None: the first blocking call with a routing map, and every blocking call with a
            map and a budget, agrees on it by a small all-reduce; non-blocking calls take min(E, 32). Calls with
            `topk_idx` take its K.
        enable_local_combine: `combine_with_unpermute` sums the rows of a token on each rank first, rounds that sum, and
            sends one row per (token, rank), as HybridEP does. False: it sends all rows, and rounds once.
        timeout_s: as for `EPAll2AllLayer`.

    The other arguments are settings of HybridEP's kernels; they are accepted and have no effect.

    Raises:
        ConfigError: an unknown group, a group without this process, or sizes that cannot work.
        EPError: `triton_ep.initialize_distributed` has not been called.
    """

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
        *,
        topk: int | None = None,
        enable_local_combine: bool = True,
        timeout_s: float = 30.0,
    ) -> None:
        ranks = check_group(group)
        hidden_dim = check.integer("hidden_dim", hidden_dim, 1, ConfigError)
        most = check.integer("max_num_of_tokens_per_rank", max_num_of_tokens_per_rank, 0, ConfigError)
        num_local_experts = check.integer("num_local_experts", num_local_experts, 1, ConfigError)
        topk = check.optional_integer("topk", topk, 1, ConfigError)
        if topk is not None and topk > num_local_experts * ranks:
            raise ConfigError(f"topk is {topk}, but {ranks} ranks have {num_local_experts * ranks} experts.")
        ranks_per_node = check.optional_integer(
            "num_of_hybrid_ep_ranks_per_nvlink_domain", num_of_hybrid_ep_ranks_per_nvlink_domain, 1, ConfigError
        )
        if ranks_per_node is not None and ranks % ranks_per_node:
            raise ConfigError(
                f"num_of_hybrid_ep_ranks_per_nvlink_domain is {ranks_per_node}; it must divide the {ranks} ranks of "
                "the group."
            )
        enable_local_combine = check.flag("enable_local_combine", enable_local_combine, ConfigError)
        asked = {"num_sms_dispatch_api": num_sms_dispatch_api, "num_sms_combine_api": num_sms_combine_api}
        programs = [check.optional_integer(name, given, 1, ConfigError) for name, given in asked.items()]
        num_sm = max((each for each in programs if each is not None), default=None)
        check.seconds("timeout_s", timeout_s)
        self.group = group
        self.group_size = ranks
        self.layers = layers = Layers(
            group,
            hidden_dim,
            num_local_experts * ranks,
            max(most, 1),
            ranks_per_node,
            num_sm=num_sm,
            enable_local_combine=enable_local_combine,
            timeout_s=timeout_s,
        )
        self._sizes = AgreedSizes(layers, topk)
        self._host_counts = HostCounts()
        self.topk, self.rank = topk, layers.rank
        self.use_fp8 = check.flag("use_fp8", use_fp8, ConfigError)
        ranks_per_node = layers.pool.ranks_per_node
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = ranks_per_node
        self.num_of_nodes = ranks // ranks_per_node
        self.node_rank, self.local_rank = divmod(self.rank, ranks_per_node)

    @property
    def configurer(self) -> Any:
        """Object whose `buffer_config` holds the sizes under HybridEP's names, for callers that compare them."""
        sizes = SimpleNamespace(
            hidden_dim=self.layers.hidden,
            max_num_of_tokens_per_rank=self.layers.max_tokens,
            num_of_experts_per_rank=self.layers.num_experts // self.group_size,
        )
        return SimpleNamespace(buffer_config=sizes)

    def update_template_config(self, *sizes: Any, **named_sizes: Any) -> Any:
        """`configurer.buffer_config`. The arguments, sizes for HybridEP's JIT, have no effect."""
        return self.configurer.buffer_config

    def empty_jit_cache(self) -> None:
        """No effect: kernels do not depend on a buffer."""

    def close(self) -> None:
        """Free the memory. Collective, idempotent. Later calls, also of a backward pass, raise FinalizedError."""
        self.layers.close()

    @checks.with_own_names
    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        scaling_factor: torch.Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        handle: Handle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> Permuted:
        """Send each token's row to the experts it is routed to; rows arrive grouped by expert.

        Args:
            hidden: [T, H] bfloat16, float16 or float32; or with `use_fp8` uint8, float8_e4m3fn or float8_e5m2, whose
                bytes are sent unchanged; one-byte rows on all ranks or on none.
            scaling_factor: [T, H / 128] float32 of one-byte rows; ignored with other rows.
            use_fp8: None: the value of the buffer.
            routing_map: [T, E] bool, or instead `topk_idx` [T, K] with distinct ids, -1 = dropped.
            probs: [T, E] float32; or with `topk_idx` instead `topk_weights` [T, K]. On all ranks or on none.
            num_of_experts_per_rank: e, if it differs from the buffer's.
            num_permuted_tokens: P, the same on all ranks, a multiple of `pad_multiple`. None: the number of rows
                received.
            pad_multiple: each expert's rows are padded to a multiple of this, with zero rows of probability zero.
            num_of_tokens_per_rank: at least the T of every rank, the same on all ranks; lets memory grow.
            handle: handle of an earlier call, to send other rows to the same places; the host does not wait. Of the
                routing arguments only probabilities are used, and `topk_idx` for the order of `topk_weights`.
            non_blocking: the host does not wait; needs `num_permuted_tokens`, or a handle.

        Returns:
            (hidden [P, H], probs [P] float32 or None, scaling_factor [P, H / 128] of one-byte rows or None,
            tokens_per_expert [e] int64, handle). Rows are ordered by expert, source rank, token. tokens_per_expert
            counts padding rows as well; it is on the device if `non_blocking`, else on the host. With a budget, rows
            past the last expert's are undefined, with probability zero; rows that do not fit are dropped, and
            handle[-1], int32 [1] on the device, counts them and their padding (not zero = overflow).

        Raises:
            InputError: an argument does not fit, before any row is sent.
            StaleHandleError: a handle of another buffer. FinalizedError: the buffer was closed.
            PeerFailed, WaitTimeout: as `EPAll2AllLayer.dispatch`.
        """
        if use_host_meta is not None:
            non_blocking = not use_host_meta
        if handle is not None:
            if pad_multiple is not None or num_permuted_tokens is not None:
                checks.check_numbers({"pad_multiple": pad_multiple, "num_permuted_tokens": num_permuted_tokens})
            rows = SentRows.of(hidden, scaling_factor, self.use_fp8, use_fp8)
            return self._again(rows, handle, (topk_idx, topk_weights, probs), pad_multiple, num_permuted_tokens)
        sizes = (num_of_experts_per_rank, num_of_experts)
        if num_permuted_tokens is num_of_tokens_per_rank is None and non_blocking is False:
            sent_as = sendable(hidden, scaling_factor, self.use_fp8, use_fp8)
            table = (routing_map, topk_idx, probs, topk_weights)
            found = None if sent_as is None else self._permuted_at_once(*sent_as, table, pad_multiple, sizes)
            if found is not None:
                return found
        given = GivenRouting(routing_map, topk_idx, probs, topk_weights)
        mode = CallMode(num_permuted_tokens is not None, non_blocking is True)
        try:
            check.flag("non_blocking", non_blocking)
            checks.check_numbers(
                {
                    "pad_multiple": pad_multiple,
                    "num_permuted_tokens": num_permuted_tokens,
                    "num_of_tokens_per_rank": num_of_tokens_per_rank,
                    "num_of_experts_per_rank": num_of_experts_per_rank,
                    "num_of_experts": num_of_experts,
                }
            )
            align = pad_multiple or 1
            if num_permuted_tokens is not None or non_blocking:
                checks.check_budget(num_permuted_tokens, align, non_blocking)
            experts = checks.check_routing(
                self.layers, hidden, routing_map, topk_idx, probs, sizes, topk_weights=topk_weights
            )
            rows = SentRows.of(hidden, scaling_factor, self.use_fp8, use_fp8)
        except InputError:
            numbers = (pad_multiple, num_permuted_tokens, num_of_experts_per_rank)
            self._sizes.refuse(given, mode, dtype_of_layer(hidden), numbers)
            raise

        def send(idx: Any, weights: torch.Tensor | None, topk: int) -> tuple[EPAll2AllLayer, Any]:
            layer = self.layers.get(rows.dtype, topk, align, num_permuted_tokens, experts)
            return layer, (layer, *rows.dispatch(layer, idx, weights))

        sent, dropped = self._sizes.dispatch(given, num_of_tokens_per_rank, mode, send)
        layer, (recv_x, scales), recv_probs, desc, copies = sent
        counts = self._counts(desc, non_blocking)
        overflow = None if dropped is None else desc.overflow + dropped
        facts = (self.layers, layer, desc, copies, counts, recv_probs is not None)
        return recv_x, recv_probs, scales, counts, Handle(*facts, tokens=hidden.shape[0], overflow=overflow)

    def _permuted_at_once(
        self,
        rows: Rows,
        dtype: torch.dtype,
        given: tuple[Any, Any, Any, Any],
        pad_multiple: Any,
        sizes: tuple[Any, Any],
    ) -> Permuted | None:
        """`dispatch_with_permute` by `AgreedSizes.dispatch_at_once`; None: no row was sent.

        given: fields of a `GivenRouting`. sizes: as in `checks.check_routing`.
        """
        per_rank = self.layers.num_experts // self.group_size if sizes[0] is None else sizes[0]
        wanted = per_rank if sizes[1] is None else sizes[1]  # if given, a number over all ranks
        align = 1 if pad_multiple is None else pad_multiple
        if not type(per_rank) is type(wanted) is type(align) is int:
            return None
        experts = per_rank * self.group_size
        if sizes[1] is not None and wanted != experts:
            return None
        found = self._sizes.dispatch_at_once(rows, dtype, given, align, experts)
        if found is None:
            return None
        layer, sent = found
        arrived, probs, copies, _ = sent.received
        recv_x, scales = arrived.like(rows)
        offsets = sent.desc.host_expert_offsets
        assert offsets is not None, "the host waited for them"
        counts = self._host_counts.tensor(list(map(sub, offsets[1:], offsets)))
        facts = (self.layers, layer, sent.desc, copies, counts, probs is not None)
        return recv_x, probs, scales, counts, Handle(*facts, tokens=rows.data.shape[0])

    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: Handle | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
        non_blocking: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Send one row per permuted row back and sum them per token, unweighted, in float32.

        Args:
            hidden: [P, H] with the dtype of the dispatch.
            probs: [P] float32; the dispatch must have had probabilities. On all ranks or on none; ranks without rows
                may leave them out.
            handle: handle of `dispatch_with_permute`; usable any number of times, and in any order.
            pad_multiple: None, or the value given to the dispatch.

        Returns:
            [T, H], and with `probs` [T, E] float32: for each (token, expert) exactly the value of its row, else zero.

        Raises:
            InputError: an argument does not fit. StaleHandleError: a handle of another buffer. FinalizedError: the
            buffer was closed.
        """
        routing = open_handle(self.layers, handle, pad_multiple)
        if probs is not None and not routing.has_probs:
            raise InputError(
                "combine_with_unpermute got probs, but the dispatch of this handle had none, so their places are "
                "unknown. Give probs to dispatch_with_permute, or none here."
            )
        layer, desc = routing.layer, routing.desc
        check.tensor("hidden", hidden, 2)
        if probs is not None:
            checks.check_probs(probs, (desc.num_recv_rows,), layer.context.device, "one per permuted row")
        combined = at_once.combine(layer, hidden.contiguous(), desc, "hidden")
        if probs is None and not _may_be_left_out(routing):
            return combined, None
        sent = torch.zeros(desc.num_recv_rows, device=layer.context.device) if probs is None else probs.contiguous()
        slots = needed_slots(layer.context, desc, routing.copies)
        values = to_slots(layer.context, sent, slots, desc)
        if probs is None:
            return combined, None
        return combined, map_of_slots(values, desc.topk_indices_tensor, routing.num_experts)

    @checks.with_own_names
    def dispatch(
        self,
        hidden: torch.Tensor,
        scaling_factor: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts: int | None = None,
        probs: torch.Tensor | None = None,
        routing_map: torch.Tensor | None = None,
        num_dispatched_tokens_tensor: torch.Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: Handle | None = None,
        num_of_tokens_per_rank: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, Handle]:
        """Send each token's row once to every rank that owns at least one of its experts; rows are not grouped by
        expert.

        Args:
            num_dispatched_tokens: N, the same on all ranks; the host then does not wait, and rows past the received
                ones are undefined. None: the number of rows received.
            Other arguments: as in `dispatch_with_permute`.

        Returns:
            (hidden [N, H], probs or None, scaling_factor or None, handle). Rows are ordered by source rank, token.
            probs is [N, e * ranks per node] float32, one column per expert of the node, zero except in this rank's
            columns. handle[3]: number of rows received, on the device; handle[4]: [N, e] bool, local experts of a row.

        Raises:
            As `dispatch_with_permute`.
        """
        if handle is not None:
            routing = open_handle(self.layers, handle, None, items=RANK_ITEMS)
            idx, layer = routing.desc.topk_indices_tensor, routing.layer
            rows = SentRows.of(hidden, scaling_factor, self.use_fp8, None)
            checks.check_weights(layer, idx, probs, topk_idx, topk_weights)
            weights = weights_by_ids(idx, probs, topk_idx, topk_weights, routing.num_experts)
            if weights is None:
                arrived, scales = rows.by_rank_again(layer, routing.desc)
                return arrived, None, scales, handle
            (arrived, scales), ids, recv_weights, desc = rows.by_rank(layer, idx, weights, routing.desc.num_recv_rows)
        else:
            sizes, mode = (None, num_of_experts), CallMode(num_dispatched_tokens is not None, False)
            given = GivenRouting(routing_map, topk_idx, probs, topk_weights)
            try:
                checks.check_numbers(
                    {
                        "num_of_experts": num_of_experts,
                        "num_dispatched_tokens": num_dispatched_tokens,
                        "num_of_tokens_per_rank": num_of_tokens_per_rank,
                    }
                )
                checks.check_routing(
                    self.layers, hidden, routing_map, topk_idx, probs, sizes, topk_weights=topk_weights
                )
                rows = SentRows.of(hidden, scaling_factor, self.use_fp8, None)
            except InputError:
                self._sizes.refuse(given, mode, dtype_of_layer(hidden), (None, None, None))
                raise

            def send(idx: Any, weights: torch.Tensor | None, topk: int) -> tuple[EPAll2AllLayer, Any]:
                layer = self.layers.get(rows.dtype, topk)
                return layer, (layer, *rows.by_rank(layer, idx, weights, num_dispatched_tokens))

            sent, _ = self._sizes.dispatch(given, num_of_tokens_per_rank, mode, send)
            layer, (arrived, scales), ids, recv_weights, desc = sent
        experts = layer.config.num_experts_per_rank
        mine, row_probs = indices_to_map(ids, recv_weights, ids.shape[0], experts)
        if row_probs is not None:
            node = row_probs.new_zeros(ids.shape[0], experts * layer.config.local_world_size)
            first = self.local_rank * experts
            node[:, first : first + experts] = row_probs
            row_probs = node
        if handle is None:
            handle = Handle(self.layers, layer, desc, local_ids=ids, tokens=hidden.shape[0], experts_of_rows=mine)
        return arrived, row_probs, scales, handle

    @checks.with_own_names
    def combine(
        self, hidden: torch.Tensor, probs: torch.Tensor | None = None, handle: Handle | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Send one row per (token, rank) back and sum them per token, in float32.

        Args:
            hidden: [N, H], rows summed over the experts of this rank. probs: [N, e * ranks per node] float32.
            handle: handle of `dispatch`.

        Returns:
            [T, H], and with `probs` [T, E] float32.

        Raises:
            As `combine_with_unpermute`.
        """
        routing = open_handle(self.layers, handle, None, items=RANK_ITEMS)
        layer, desc, ids = routing.layer, routing.desc, routing.local_ids
        assert ids is not None
        check.tensor("hidden", hidden, 2)
        nodes_experts = layer.config.num_experts_per_rank * layer.config.local_world_size
        if probs is not None:
            wanted = (ids.shape[0], nodes_experts)
            checks.check_probs(probs, wanted, layer.context.device, "as dispatch returns them")
        combined = layer.combine(hidden.contiguous(), desc)
        if probs is None:
            return combined, None
        first = self.local_rank * layer.config.num_experts_per_rank
        values, _ = layer.combine_topk(weights_of_slots(probs[:, first:], ids), desc)
        return combined, map_of_slots(values, desc.topk_indices_tensor, routing.num_experts)

    def _counts(self, desc: EPAllToAllLayoutDesc, non_blocking: bool) -> torch.Tensor:
        """[e] int64, rows of each local expert, padding included."""
        offsets = desc.host_expert_offsets
        if offsets is not None:
            return self._host_counts.tensor(list(map(sub, offsets[1:], offsets)))
        counts = desc.expert_offsets.diff().long()
        return counts if non_blocking else counts.cpu()

    # --- arguments --------------------------------------------------------------------------------------

    def _again(
        self,
        rows: SentRows,
        handle: Handle,
        given: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        pad_multiple: int | None,
        num_permuted_tokens: int | None,
    ) -> Permuted:
        """`dispatch_with_permute` with a handle; given: topk_idx, topk_weights, probs."""
        routing = open_handle(self.layers, handle, pad_multiple)
        desc, counts = routing.desc, routing.counts
        assert counts is not None, "permuted rows have them"
        if num_permuted_tokens is not None and num_permuted_tokens != desc.num_recv_rows:
            raise InputError(
                f"num_permuted_tokens is {num_permuted_tokens}, but the dispatch of this handle has "
                f"{desc.num_recv_rows} permuted rows. Pass that number, or None."
            )
        topk_idx, topk_weights, probs = given
        weights = None
        if not topk_idx is topk_weights is probs is None:
            ids = desc.topk_indices_tensor
            checks.check_weights(routing.layer, ids, probs, topk_idx, topk_weights)
            weights = weights_by_ids(ids, probs, topk_idx, topk_weights, routing.num_experts)
        (recv_x, scales), recv_probs = rows.again(routing.layer, desc, weights)
        return recv_x, recv_probs, scales, counts, handle


def _may_be_left_out(routing: Routing) -> bool:
    """Whether ranks may combine with and without probabilities in one call, so that every call must send them.

    torchtitan gives none in the backward pass of a rank without rows. That rank cannot know whether the others do.
    """
    rows = routing.desc.host_num_rows
    return routing.has_probs and rows is not None and 0 in rows
