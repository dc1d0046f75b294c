"""Prepared copies of the experts' weights for the products of an MXFP8 layer, cached until the weights change."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from triton_ep.errors import ConfigError, InputError
from triton_ep.mx.tensor import MXTensor
from triton_ep.ops.prepare import prepare_weights
from triton_ep.ops.row_scales import RowScaled
from triton_ep.runtime.graphs import owns_memory

PREPARED = ("both", "fprop", "none")
PRECISIONS = ("default", "fast", "exact")
USES = ("fprop", "dgrad")

Copy = RowScaled | torch.Tensor
_Identity = tuple[tuple[int, int, int], torch.Size, int]
"""`origin_of` and shape of a weight, and how often `invalidate` was called."""


@dataclass
class _Kept:
    """One copy, and the identity of the weight it was computed from.

    storage: refers to the weight's storage without keeping its memory, so that no later one is taken for it: memory
    that was freed is often given to the next tensor.
    """

    copy: Copy
    made_of: _Identity
    storage: StorageWeakRef


class PreparedWeights:
    """Copies of weights [E, N, K] for the products x w^T ("fprop", sums over K) and dy w ("dgrad", sums over N).

    The first use after a change of the weight computes its copy, in the memory of the previous copy; so a captured CUDA
    graph that reads the copy sees later refreshes. A weight counts as changed if its version counter, address or
    storage is another, and after a step of any torch optimizer, because FSDP's all-gather and writes to `.data` do not
    move the counter. Other code that changes weights without moving the counter must call `invalidate`.

    A capture, or torch.compile's warm-up for one, raises an error if a copy is missing or out of date, because replays
    would not update it: run a step first. If weights change between replays, call `refresh` before the next replay; a
    graph that contains the optimizer's step itself needs prepared="none".

    Arguments:
        prepared: "both": keep copies for both products, 2 bytes per weight; "fprop": compute copies for "dgrad" in
            every backward pass and drop them; "none": compute copies at every use.
        precision: "default" or "fast": copies are `RowScaled`, [E, N, K] for "fprop", [E, K, N] for "dgrad". "exact":
            bf16 values [E, N, K] of the weights in MXFP8, quantised along the sum of the product, 2 bytes each.

    Raises:
        ConfigError: unknown `prepared` or `precision`.
    """

    def __init__(self, prepared: str = "both", precision: str = "default") -> None:
        if prepared not in PREPARED:
            raise ConfigError(f"prepared is {prepared!r}, choose from {', '.join(PREPARED)}.")
        if precision not in PRECISIONS:
            raise ConfigError(f"precision is {precision!r}, choose from {', '.join(PRECISIONS)}.")
        self.prepared, self.precision = prepared, precision
        self._kept: dict[tuple[Any, str], _Kept] = {}
        self._changes = 0
        invalidate_after_steps(self)

    def __deepcopy__(self, memo: Any) -> PreparedWeights:
        """For a copied module: the same settings, no copies of weights."""
        return PreparedWeights(self.prepared, self.precision)

    def __reduce__(self) -> Any:
        """As `__deepcopy__`: copies of weights can be computed again."""
        return PreparedWeights, (self.prepared, self.precision)

    def get(self, weight: torch.Tensor, use: str, *, name: str = "") -> Copy:
        """The copy of a weight for a product. Do not write to it.

        Arguments:
            weight: [E, N, K] bf16 or fp32, contiguous, or MXTensor of e4m3 quantised along K.
            use: "fprop" or "dgrad".
            name: of the weight, if several weights have its shape.

        Raises:
            InputError: unknown use; a weight that cannot be prepared; or a copy that would have to be computed during
                the capture of a CUDA graph.
        """
        if use not in USES:
            raise InputError(f"use is {use!r}, choose from {', '.join(USES)}.")
        if self.prepared == "none" or (self.prepared == "fprop" and use == "dgrad"):
            return self._make(weight, (use,), {})[use]
        key = (name or tuple(weight.shape), use)
        made_of = self._identity(weight)
        kept = self._kept.get(key)
        if kept is not None and kept.made_of == made_of:
            return kept.copy
        if owns_memory(weight.device):
            state = "missing" if kept is None else "out of date"
            raise InputError(
                f"the copy of a weight {list(weight.shape)} for {use} is {state}, and a CUDA graph is being captured, "
                "or warmed up by torch.compile, whose replays would not make it. Run a step before that, without "
                'torch.compile, or refresh, or choose prepared="none".'
            )
        uses = [each for each in USES if each == use or self._is_stale((key[0], each), made_of)]
        old = {each: self._kept[key[0], each].copy for each in uses if (key[0], each) in self._kept}
        storage = storage_of(weight)
        for each, copy in self._make(weight, uses, old).items():
            self._kept[key[0], each] = _Kept(copy, made_of, storage)
        return self._kept[key].copy

    def refresh(self, weight: torch.Tensor, *, name: str = "") -> None:
        """Update the kept copies of a weight if it has changed. Call it before a captured graph is replayed."""
        for use in USES:
            if (name or tuple(weight.shape), use) in self._kept:
                self.get(weight, use, name=name)

    def is_stale(self, weight: torch.Tensor, *, name: str = "") -> bool:
        """Whether a kept copy of the weight must be computed again at its next use."""
        key, made_of = name or tuple(weight.shape), self._identity(weight)
        return self._is_stale((key, "fprop"), made_of) or self._is_stale((key, "dgrad"), made_of)

    def invalidate(self) -> None:
        """Compute copies again at their next use. Call it when weights change without moving their version counters."""
        self._changes += 1

    def _identity(self, weight: torch.Tensor) -> _Identity:
        memory = weight.qdata if isinstance(weight, MXTensor) else weight
        return origin_of(memory), memory.shape, self._changes

    def _is_stale(self, key: tuple[Any, str], made_of: _Identity) -> bool:
        """Whether the copy is kept, but out of date."""
        kept = self._kept.get(key)
        return kept is not None and kept.made_of != made_of

    def _make(self, weight: torch.Tensor, uses: Any, old: dict[str, Copy]) -> dict[str, Copy]:
        """Copies for these uses, in the memory of old ones where they fit."""
        # Copies outlive inference mode and must stay writable outside it, unless the weight is not.
        memory = weight.qdata if isinstance(weight, MXTensor) else weight
        with torch.inference_mode(memory.is_inference()):
            return self._make_now(weight, uses, old)

    @torch.no_grad()  # leaving inference mode turns gradients on
    def _make_now(self, weight: torch.Tensor, uses: Any, old: dict[str, Copy]) -> dict[str, Copy]:
        weight = weight.detach()
        old = {use: copy for use, copy in old.items() if _fits(copy, weight, use)}
        if self.precision == "exact":
            return {use: _values(weight, use, old.get(use)) for use in uses}
        out = tuple(copy if isinstance(copy := old.get(use), RowScaled) else None for use in USES)
        made = prepare_weights(weight, "both" if len(uses) == 2 else uses[0], out=(out[0], out[1]))
        return {use: copy for use, copy in zip(USES, made, strict=True) if copy is not None}


def _fits(copy: Copy, weight: torch.Tensor, use: str) -> bool:
    """Whether the copy has the device and the shape of a copy of this weight."""
    transposed = isinstance(copy, RowScaled) and use == "dgrad"
    return copy.device == weight.device and copy.shape == (weight.transpose(1, 2) if transposed else weight).shape


def storage_of(weight: torch.Tensor) -> StorageWeakRef:
    """A reference to the storage of a weight. While it exists, no other storage has the same `_cdata`."""
    memory = weight.qdata if isinstance(weight, MXTensor) else weight
    return StorageWeakRef(memory.untyped_storage())


def origin_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Storage, address and version counter; of an inference tensor, which has no counter, 0."""
    return tensor.untyped_storage()._cdata, tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _values(weight: torch.Tensor, use: str, old: Copy | None) -> torch.Tensor:
    """[E, N, K] bf16 values of a weight in MXFP8 along the sum of the product."""
    if isinstance(weight, MXTensor):
        values = weight.dequantize(torch.bfloat16)
        if use == "dgrad":
            values = MXTensor.to_mx(values, block_dim=1).dequantize(torch.bfloat16)
    else:
        values = MXTensor.to_mx(weight, block_dim=-1 if use == "fprop" else 1).dequantize(torch.bfloat16)
    values = values.contiguous()
    if isinstance(old, torch.Tensor) and old.shape == values.shape:
        return old.copy_(values)
    return values


def invalidate_after_steps(owner: Any) -> None:
    """Call `owner.invalidate` after each step of any torch optimizer, for the lifetime of the owner."""
    reference = weakref.ref(owner)

    def after_step(*_: Any) -> None:
        alive = reference()
        if alive is not None:
            alive.invalidate()

    weakref.finalize(owner, register_optimizer_step_post_hook(after_step).remove)
