"""MoE: a mixture-of-experts layer as a torch module, over an exchange shared by all layers of a model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from triton_ep.config import as_integer
from triton_ep.distributed import check_group, current_heap
from triton_ep.errors import ConfigError, EPError, InputError
from triton_ep.exchange.checks import check_dispatch
from triton_ep.layer import EPAll2AllLayer
from triton_ep.nn.agreement import check_agreement
from triton_ep.nn.beside import Beside
from triton_ep.nn.exchanges import TIMEOUT_S, Connection, Sizes, capacity_rows
from triton_ep.nn.operations import NAMES, NO_GRADIENT, refused, register
from triton_ep.nn.router import TopKRouter
from triton_ep.nn.swiglu_experts import SwiGLUExperts, check_precision, check_sizes

_HOOKS_INSIDE = (
    "fully_shard(moe.experts) has put FSDP's hooks inside the compiled module. Shard the compiled module as a whole, "
    "with shard_placement_fn=triton_ep.nn.expert_placement(module, mesh), or compile without fullgraph."
)


class MoE(nn.Module):
    """Router, dispatch, experts, combine: [..., H] to [..., H]. All ranks of the group create it and call it alike.

        moe = MoE(7168, 2048, num_experts=256, topk=8, max_tokens=4096, payload="mxfp8")
        y = moe(x)                                              or, with a routing of your own,
        y = moe(x, topk_idx=ids, topk_weights=weights)

    Every rank has E / W of the experts. Calls and backward passes are collective: all ranks make the same calls in the
    same order. Ranks may have different numbers of tokens, including none. Gradients of the experts are sums over the
    tokens of all ranks; all other gradients are sums over this rank's tokens (docs/how-to/train-a-moe-layer.md).

    Letters: T tokens of this rank, K top-k, H hidden, F ffn, E experts over all ranks, W ranks, e = E / W.

    Arguments:
        hidden, ffn: H, F.
        num_experts, topk: E, K.
        max_tokens: most tokens per rank and call, the same on all ranks.
        payload: how rows travel and are multiplied: None = bf16, "mxfp8" = quantised before they leave.
        precision: of products of MXFP8 rows. "default": in FP8, summed in float32, as exact as MXFP8 is; "fast": in FP8
            with the tensor core's own sums, which lose up to a tenth where all values have one sign; "exact": in bf16
            of the MXFP8 values.
        capacity: None: the host waits for the number of rows that arrive, once the experts are launched. An int is
            rows, a float multiplies the mean load max_tokens * K; rounded up to 128. With a capacity nothing waits:
            rows that do not fit are left out and counted (`overflow_total`), with a warning. CUDA graphs need a
            capacity.
        low_latency: for decoding, at most 1024 tokens: one launch per dispatch and per combine; no gradient; static.
        router: None: a `TopKRouter` with softmax scores. A callable: router(x) returns topk_idx [..., K], topk_weights
            [..., K] and optionally a loss, kept as `last_aux`. False: no router; every call passes its routing.
        exchange: an exchange from `new_exchange`, not shared with other modules; None: the shared one of these sizes.
        shared: shared experts, a module [..., H] to [..., H] whose result for every token is added; None: no shared
            experts. It overlaps the exchange on a side stream, forward and backward. Its result may have another
            floating-point dtype; the sum is rounded to `dtype`.
        dtype: of rows: bfloat16, the dtype of the experts' products.
        params_dtype: of the experts' parameters; None: `dtype`. With payload=None, float32 parameters are cast in every
            pass.
        group: expert-parallel group; None = the world.
        num_sm, timeout_s, local_world_size: of the exchange, as for `EPAll2AllLayer`; None: the tuned number, and the
            job's ranks per node.
        prepared, activation, gated, limit, alpha, up_offset, bias, separate: of `SwiGLUExperts`.
        device: of the parameters; None: the rank's device, or torch's default device if that is "meta".

    Attributes:
        router, experts, shared: modules.
        last_aux: the loss that the router returned in the latest call, [], differentiable; else None.

    Raises:
        ConfigError: sizes or options that cannot work, or that differ between ranks.
        HeapError: not enough symmetric memory for the exchange.
    """

    last_aux: torch.Tensor | None
    experts: SwiGLUExperts
    router: Any
    shared: nn.Module | None

    def __init__(
        self,
        hidden: int,
        ffn: int,
        *,
        num_experts: int,
        topk: int,
        max_tokens: int,
        payload: str | None = None,
        precision: str = "default",
        capacity: int | float | None = None,
        low_latency: bool = False,
        router: Callable[..., Any] | bool | None = None,
        exchange: EPAll2AllLayer | None = None,
        shared: nn.Module | None = None,
        dtype: torch.dtype = torch.bfloat16,
        params_dtype: torch.dtype | None = None,
        group: Any = None,
        num_sm: int | None = None,
        timeout_s: float = TIMEOUT_S,
        local_world_size: int | None = None,
        prepared: str = "both",
        activation: str = "silu",
        gated: bool = True,
        limit: float | None = None,
        alpha: float = 1.0,
        up_offset: float = 0.0,
        bias: bool = False,
        separate: bool = False,
        device: Any = None,
    ) -> None:
        super().__init__()
        group = dist.group.WORLD if group is None else group
        world_size, rank = check_group(group), dist.get_rank(group)
        alike: dict[str, Any] = {"hidden": hidden, "ffn": ffn, "num_experts": num_experts, "topk": topk}
        alike |= {"max_tokens": max_tokens, "payload": payload, "precision": precision, "capacity": capacity}
        alike |= {"low_latency": low_latency, "exchange": type(exchange), "dtype": dtype, "num_sm": num_sm}
        alike |= {"timeout_s": timeout_s, "local_world_size": local_world_size, "activation": activation}
        alike |= {"gated": gated, "limit": limit, "alpha": alpha, "up_offset": up_offset, "bias": bias}
        alike |= {"separate": separate, "prepared": prepared, "params_dtype": params_dtype}
        # Of these only the kind: objects differ between processes.
        alike |= {"router": _kind(router, callable), "shared": _kind(shared, lambda each: isinstance(each, nn.Module))}
        check_agreement(group, alike)
        check_precision(payload, precision)
        check_sizes(hidden, ffn, payload)
        num_experts, topk = as_integer("num_experts", num_experts), as_integer("topk", topk)
        max_tokens = as_integer("max_tokens", max_tokens)
        if dtype is not torch.bfloat16:
            raise ConfigError(
                f"dtype is {dtype}, but experts multiply bfloat16 rows. For parameters pass params_dtype."
            )
        if num_experts % world_size:
            raise ConfigError(
                f"{num_experts} experts cannot be shared evenly by the {world_size} ranks of the group. Pad them to "
                f"{-(-num_experts // world_size) * world_size}, or choose another group."
            )
        rows = capacity_rows(capacity, low_latency, num_experts, topk, max_tokens, world_size)
        if exchange is not None and capacity is None:
            rows = None  # the exchange decides
        device = _default_device() if device is None else device
        if router is None:
            router = TopKRouter(hidden, num_experts, topk, device=device)
        elif router is not False and (not callable(router) or isinstance(router, type)):
            raise ConfigError(f"router must be callable (an instance, no class), None or False, got {router!r}.")
        self.router = None if router is False else router
        if shared is not None and not isinstance(shared, nn.Module):
            raise ConfigError(f"shared must be a torch module or None, got {type(shared).__name__}.")
        self.shared = shared
        e = num_experts // world_size
        self.experts = SwiGLUExperts(
            hidden,
            ffn,
            e,
            first_expert=rank * e,
            num_experts=num_experts,
            payload=payload,
            precision=precision,
            prepared=prepared,
            activation=activation,
            gated=gated,
            limit=limit,
            alpha=alpha,
            up_offset=up_offset,
            bias=bias,
            separate=separate,
            dtype=dtype if params_dtype is None else params_dtype,
            device=device,
        )
        self.hidden, self.topk = hidden, topk
        self.last_aux = None
        self._key = register(self)
        options = (payload, rows, low_latency, dtype, num_sm, timeout_s, local_world_size)
        sizes = Sizes(hidden, num_experts, topk, max_tokens, *options)
        # Last: nobody would release the hold of a module whose constructor fails after this.
        self._connection = Connection(group, sizes, exchange)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without `last_aux`, which belongs to the autograd graph of this module's latest call."""
        return {**self.__dict__, "last_aux": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register a copied module under a key of its own."""
        super().__setstate__(state)
        self._key = register(self)

    def forward(
        self, x: torch.Tensor, topk_idx: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """For every token of x, the weighted sum of its experts' outputs. Collective.

        Arguments:
            x: [..., H] of the module's dtype, on its device. Under torch.autocast to that dtype also float32 or
                float16, which is cast first, as by a linear layer.
            topk_idx: [..., K] int32 or int64, -1 = dropped; None: the router decides.
            topk_weights: [..., K] floating-point, with topk_idx; used as float32.

        Returns:
            [..., H] of the module's dtype; a token whose assignments were all dropped gets zeros.

        Raises:
            InputError: an argument, or the result of the router or the shared experts, does not fit (on that rank
                only); another pass is open on the exchange; an id is out of range (on every rank; with low_latency such
                ids are dropped).
            PeerFailed: another rank refused its arguments. In static mode `check` raises it, with low_latency nothing:
                sums of that rank are NaN.
            FinalizedError: the exchange was finalized: call `connect`.
            WaitTimeout, CallMismatch: as `EPAll2AllLayer.dispatch` and `combine`.
        """
        if self.last_aux is not None:  # setting attributes of modules takes long
            self.last_aux = None  # it may hold the previous step's autograd graph
        if torch._C._are_functorch_transforms_active():  # nothing could be sent to tell the other ranks
            raise InputError(
                "a MoE module was called inside a transform of torch.func (grad, vmap, jvp), which no exchange between "
                "ranks goes through. Take gradients by torch.autograd, and batches as leading dimensions of x."
            )
        if not isinstance(x, torch.Tensor) or x.dtype != torch.bfloat16:
            x = _under_autocast(x)
        if torch.compiler.is_compiling():
            return self._traced(x, topk_idx, topk_weights)
        exchange = self._connection.exchange
        try:
            shared = None if self.shared is None else self._begin_shared(x)
            ids, weights = self.route(x, topk_idx, topk_weights)
            tokens = _in_rows(x, self.hidden)
            check_dispatch(exchange.layer.config, exchange.layer.context.device, tokens, ids, weights, None)
            if exchange.layer.config.low_latency and torch.is_grad_enabled():
                raise InputError(NO_GRADIENT)
        except Exception as error:
            with contextlib.suppress(EPError):
                exchange.layer.refuse()
            if isinstance(error, InputError):
                error.with_names(NAMES)
            raise
        self.experts.look_at_shards()
        try:
            # Call the module, not its forward: FSDP's hooks gather sharded parameters.
            y: torch.Tensor = self.experts(tokens, ids, weights, over=exchange)
        except InputError as error:
            error.with_names(NAMES)
            raise
        exchange.watch_overflow()
        y = y if x.dim() == 2 else y.view(x.shape)
        return y if shared is None else (y + shared.join()).to(y.dtype)

    def _begin_shared(self, x: Any) -> Beside:
        """Start the shared experts on x; they overlap the exchange."""
        assert self.shared is not None, "checked by the caller"
        if not isinstance(x, torch.Tensor) or x.shape[-1:] != (self.hidden,):
            raise InputError(f"x must be a tensor [..., {self.hidden}], got {_shown(x)}.")
        found = Beside(self.shared, x)
        early = found.early
        if not isinstance(early, torch.Tensor) or early.shape != x.shape or not early.is_floating_point():
            raise InputError(f"the shared experts must return {list(x.shape)}, floating-point, got {_shown(early)}.")
        return found

    def _traced(
        self, x: torch.Tensor, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None
    ) -> torch.Tensor:
        """`forward` as torch.compile traces it: the other checks are made when the graph runs."""
        from torch.distributed.fsdp import FSDPModule

        try:
            ids, weights = self.route(x, topk_idx, topk_weights)
        except InputError:
            if not isinstance(x, torch.Tensor):
                raise
            return refused(self._connection.traced.layer, x, topk_idx, topk_weights, moe=self._key)
        if isinstance(self.experts, FSDPModule):
            torch._dynamo.graph_break(msg=_HOOKS_INSIDE)  # FSDP's hooks would break the graph anyway, without a reason
            self.experts.look_at_shards()
        exchange = self._connection.traced
        y: torch.Tensor = self.experts(x.reshape(-1, self.hidden).contiguous(), ids, weights, over=exchange)
        y = y.view(x.shape)
        return y if self.shared is None else (y + self.shared(x)).to(y.dtype)

    def route(self, x: Any, topk_idx: Any, topk_weights: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and weights [T, K], from the call or the router, as `forward` gets them; sets `last_aux`.

        Raises:
            InputError: they do not fit.
        """
        if not isinstance(x, torch.Tensor) or x.shape[-1:] != (self.hidden,):
            raise InputError(f"x must be a tensor [..., {self.hidden}], got {_shown(x)}.")
        if x.layout is not torch.strided:
            raise InputError(f"x must be a strided tensor, got {x.layout}. Pass x.to_dense().")
        if (topk_idx is None) != (topk_weights is None):
            raise InputError("topk_idx and topk_weights go together: pass both, or none and let the router decide.")
        source = "the call"
        if topk_idx is None:
            if self.router is None:
                raise InputError("this module was made with router=False: pass topk_idx and topk_weights.")
            source = "the router"
            found = self.router(x)
            if not isinstance(found, tuple | list) or len(found) not in (2, 3):
                raise InputError(f"the router must return (topk_idx, topk_weights[, aux]), got {_shown(found)}.")
            topk_idx, topk_weights = found[:2]
            if len(found) == 3:
                self.last_aux = found[2]
        wanted = (*x.shape[:-1], self.topk)
        for name, value in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            if not isinstance(value, torch.Tensor) or value.shape != wanted:
                raise InputError(f"{name} of {source} must be a tensor {list(wanted)}, got {_shown(value)}.")
        if not topk_weights.is_floating_point():
            raise InputError(f"topk_weights of {source} must be floating-point, got {topk_weights.dtype}.")
        if topk_weights.dtype != torch.float32:
            topk_weights = topk_weights.float()
        return _in_rows(topk_idx, self.topk), _in_rows(topk_weights, self.topk)

    def invalidate(self) -> None:
        """Build kept copies of the weights anew: call this after a change that torch's version counters do not show."""
        self.experts.invalidate()

    def refresh(self) -> None:
        """Update the copies of changed weights that a captured CUDA graph reads; call it before the next replay."""
        self.experts.refresh()

    # --- the exchange ---------------------------------------------------------------------------------------

    @property
    def exchange(self) -> EPAll2AllLayer:
        """The exchange; shared with all modules of the same group and sizes unless one was given.

        Raises:
            FinalizedError, WaitTimeout: it was finalized, or has failed.
        """
        return self._connection.exchange.layer

    @property
    def overflow_total(self) -> int:
        """Rows that did not fit the capacity on this rank, padding rows included, over all passes of all modules that
        share the exchange and all replays of CUDA graphs; 0 without a capacity. Waits for the current stream."""
        return self.exchange.overflow_total

    def check(self) -> None:
        """Wait for the current stream, raise errors that the exchange's kernels reported, warn if rows did not fit."""
        self.exchange.check()

    def forget_captures(self) -> None:
        """Allow captures on any stream again; no CUDA graph captured with this exchange may be replayed afterwards."""
        self._connection.exchange.forget_captures()

    def connect(self, exchange: EPAll2AllLayer | None = None) -> None:
        """Take a shared exchange after `finalize` or `finalize_exchanges`, or another one at any time. Collective.

        The last module that leaves a shared exchange frees it, and passes over it that still wait for their backward
        pass raise FinalizedError then. For micro-batches in flight take `over`, which leaves none.
        """
        self._connection.connect(exchange)

    def over(self, exchange: EPAll2AllLayer) -> MoE:
        """The same router and experts over another exchange (`new_exchange`): for a second micro-batch in flight.

        Both modules share parameters, quantised copies and hooks; `train` and `to` on one apply to the other's
        submodules. Only `last_aux` is separate. Run one pass, which builds the quantised copies, before both are in
        flight together.

        Raises:
            ConfigError: the exchange does not fit.
        """
        twin = copy.copy(self)
        twin._connection = Connection(self._connection.group, self._connection.sizes, exchange)
        return twin

    def finalize(self) -> None:
        """Release the exchange; the last module that holds a shared one frees its memory. Collective, idempotent."""
        self._connection.release()

    def extra_repr(self) -> str:
        """Sizes of the exchange."""
        sizes = self._connection.sizes
        rows = "exact" if sizes.capacity is None else f"capacity={sizes.capacity}"
        return f"top-{sizes.topk} of {sizes.num_experts}, max_tokens={sizes.max_tokens}, {rows}"


def _kind(given: Any, fits: Callable[[Any], bool]) -> Any:
    if given is None or given is False:
        return given
    return "given" if fits(given) and not isinstance(given, type) else f"of type {type(given).__name__}"


def _default_device() -> torch.device:
    default = torch.get_default_device()
    return default if default.type == "meta" else current_heap().device


def _under_autocast(x: Any) -> Any:
    """x as torch.autocast to bfloat16 gives it to products. Outside of that, and if it cannot, unchanged: it is refused
    where the other ranks are told."""
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.float32, torch.float16):
        return x
    device = x.device.type
    casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return x.to(torch.bfloat16) if casts and torch.get_autocast_dtype(device) == torch.bfloat16 else x


def _in_rows(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """The tensor as contiguous [rows, columns]."""
    return tensor if tensor.dim() == 2 and tensor.is_contiguous() else tensor.reshape(-1, columns).contiguous()


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {value.dtype}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
