"""Check the arguments of a public call and build its `Request`; report refused arguments to the other ranks."""

from __future__ import annotations

from typing import NoReturn

import torch

from triton_ep.context.context import DispatchCombineContext
from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.given import RoutingMap, Rows
from triton_ep.errors import InputError, StaleHandleError
from triton_ep.exchange import checks, refusals
from triton_ep.exchange.finish import PLAIN, Ending
from triton_ep.exchange.landings import Deduplicated
from triton_ep.exchange.request import Request, as_sent, rows_of
from triton_ep.mx.tensor import MXTensor

_Refused = (InputError, StaleHandleError)


class Requests:
    """Builds the requests of one layer. Each method takes the arguments of the public call of the same name.

    If the arguments do not fit, a method reports that to the other ranks and raises InputError or StaleHandleError.
    """

    def __init__(self, ctx: DispatchCombineContext) -> None:
        self._ctx, self._cfg, self._device = ctx, ctx.config, ctx.device
        self._sends_scaled: bool | None = None  # low latency: whether rows are one-byte; None before the first dispatch

    def dispatch(
        self,
        ending: Ending,
        landing: str | None,
        x: torch.Tensor | MXTensor,
        ids: torch.Tensor,
        weights: torch.Tensor | None,
        scatter: torch.Tensor | None,
        checked: bool = False,
    ) -> Request:
        """Build the request of `EPAll2AllLayer.dispatch`; checked: the arguments are known to fit."""
        if checked:
            return Request(rows_of(x), ids, weights, scatter)
        try:
            if ending is not PLAIN:
                checks.check_overlap(self._cfg, *ending)
            if landing is not None:
                checks.check_landing(self._cfg, landing)
            checks.check_dispatch(self._cfg, self._device, x, ids, weights, scatter)
            if self._cfg.low_latency:
                self._keep_kind(scaled=False)
        except _Refused:
            refusals.refuse(self._ctx)
            raise
        return Request(rows_of(x), ids, weights, scatter)

    def dispatch_again(
        self,
        landing: str | None,
        x: torch.Tensor | MXTensor,
        desc: EPAllToAllLayoutDesc,
        weights: torch.Tensor | None,
    ) -> Request:
        """Build the request of `EPAll2AllLayer.dispatch_again`."""
        try:
            checks.check_landing(self._cfg, landing)
            checks.check_again(self._cfg, self._device, self._ctx.layer_id, x, desc, weights)
            self._keep_kind(scaled=False)
        except _Refused:
            refusals.refuse(self._ctx, others_know=True)
            raise
        return again(rows_of(x), desc, weights)

    def dispatch_scaled(
        self,
        rows: Rows,
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        desc: EPAllToAllLayoutDesc | None,
    ) -> Request:
        """Build the request of `EPAll2AllLayer.dispatch_scaled`; desc: of an earlier dispatch, in place of ids."""
        cfg, ctx = self._cfg, self._ctx
        try:
            if rows.scale is None:
                raise InputError("scale must be a tensor, got NoneType. Rows without scales go by dispatch.")
            if desc is None:
                checks.check_dispatch(cfg, self._device, rows.data, ids, weights, None, scale=rows.scale)
            else:
                checks.check_again(cfg, self._device, ctx.layer_id, rows.data, desc, weights, rows.scale)
            self._keep_kind(scaled=True)
        except _Refused:
            refusals.refuse(ctx, scaled=True, others_know=desc is not None)
            raise
        if desc is not None:
            return again(as_sent(rows), desc, weights)
        assert ids is not None, "checked"
        return Request(as_sent(rows), ids, weights)

    def dispatch_to_slabs(self, rows: Rows, ids: torch.Tensor, weights: torch.Tensor | None, slabs: Rows) -> Request:
        """Build the request of `EPAll2AllLayer.dispatch_to_slabs`."""
        scaled = rows.scale is not None or (self._cfg.payload is None and slabs.scale is not None)
        try:
            checks.check_dispatch(self._cfg, self._device, rows.data, ids, weights, None, scale=rows.scale)
            self._keep_kind(scaled)
        except _Refused:
            refusals.refuse(self._ctx, scaled=scaled)
            raise
        return Request(as_sent(rows), ids, weights, slabs=slabs)

    def dispatch_with_row_map(
        self, rows: Rows, given: torch.Tensor | RoutingMap, weights: torch.Tensor | None
    ) -> Request:
        """Build the request of `EPAll2AllLayer.dispatch_with_row_map`.

        Raises:
            CapacityError: this rank has too many tokens; the same on all ranks.
        """
        cfg, scaled, num_tokens = self._cfg, rows.scale is not None, rows.data.shape[0]
        try:
            if num_tokens > cfg.max_tokens and cfg.recv_capacity is None:
                checks.check_rows(cfg, self._device, rows.data, None, rows.scale)
            elif isinstance(given, torch.Tensor):
                checks.check_dispatch(cfg, self._device, rows.data, given, weights, None, scale=rows.scale)
            else:
                checks.check_num_tokens(cfg, num_tokens)
        except InputError:
            refusals.refuse(self._ctx, scaled=scaled)
            raise
        if num_tokens > cfg.max_tokens:
            self._needs(num_tokens)
        return Request(as_sent(rows), given, weights)

    def dispatch_compact(
        self,
        ending: Ending,
        rows: Rows,
        ids: torch.Tensor,
        weights: torch.Tensor | None,
        num_rows: int | None,
    ) -> Request:
        """Build the request of `EPAll2AllLayer.dispatch_compact`.

        Raises:
            CapacityError: without `num_rows`, this rank or another one has too many tokens; the same on all ranks.
        """
        cfg, x = self._cfg, rows.data
        try:
            checks.check_overlap(self._cfg, *ending)
            num_rows = checks.check_num_rows(num_rows)
            if num_rows is None and isinstance(x, torch.Tensor) and x.dim() == 2 and x.shape[0] > cfg.max_tokens:
                checks.check_rows(cfg, self._device, x, None, rows.scale)
            else:
                checks.check_dispatch(cfg, self._device, x, ids, weights, None, scale=rows.scale)
        except InputError:
            if num_rows is None:
                refusals.refuse(self._ctx)
            else:  # the other ranks go on without this rank's rows, so it must take part
                refusals.refuse(self._ctx, Deduplicated(), scaled=rows.scale is not None, num_rows=0)
            raise
        if x.shape[0] > cfg.max_tokens:
            self._needs(x.shape[0])
        return Request(as_sent(rows), ids, weights, num_rows=num_rows)

    def dispatch_compact_again(self, ending: Ending, rows: Rows, desc: EPAllToAllLayoutDesc) -> Request:
        """Build the request of `EPAll2AllLayer.dispatch_compact_again`."""
        try:
            checks.check_overlap(self._cfg, *ending)
            checks.check_compact_desc("dispatch_compact_again", self._ctx.layer_id, desc)
            num_tokens = desc.num_dispatch_token_cur_rank
            checks.check_rows(self._cfg, self._device, rows.data, num_tokens, rows.scale)
        except _Refused:
            refusals.refuse(self._ctx, Deduplicated(), scaled=rows.scale is not None, num_rows=0)
            raise
        return again(as_sent(rows), desc)

    def _keep_kind(self, scaled: bool) -> None:
        """Raise InputError if a low-latency layer changes its kind of rows."""
        if self._cfg.low_latency:
            checks.check_kind(self._cfg, self._sends_scaled, scaled)
            self._sends_scaled = scaled

    def _needs(self, num_tokens: int) -> NoReturn:
        """Report to all ranks that this one has more tokens than fit the layer; all ranks raise CapacityError."""
        refusals.refuse(self._ctx, needed_tokens=num_tokens)
        raise AssertionError("the refusal raises CapacityError on all ranks")


def again(rows: Rows, desc: EPAllToAllLayoutDesc, weights: torch.Tensor | None = None) -> Request:
    """Build a request to send rows by the routing of an earlier dispatch; the host knows how many arrive."""
    return Request(rows, desc.topk_indices_tensor, weights, routed=desc, num_rows=desc.num_recv_rows)
