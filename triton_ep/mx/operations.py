"""What MXTensor and NVFP4Tensor answer to torch's operations alike; aten.py and nvfp4_aten.py have the rest.

Each kind has an `Operations`, the table from operations in their ATen form to functions, which its
`__torch_dispatch__` runs, below autograd. An operation that is not in it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from triton_ep.errors import InputError

aten = torch.ops.aten

Handler = Callable[..., Any]
"""Called with the operation and its arguments, of which at least one is of the kind."""

_BY_VALUE = (
    ("mm bmm addmm baddbmm mv dot linear", "default"),
    ("sum mean", "default dim_IntList dim"),
    ("amax amin abs neg isnan isinf equal linalg_vector_norm", "default"),
    ("add sub mul div eq ne lt gt le ge", "Tensor Scalar"),
    ("add_ sub_ mul_ div_", "Tensor"),
)


def axis_of(x: torch.Tensor, dim: int) -> int:
    """A dimension counted from the end."""
    return dim if dim < 0 else dim - x.dim()


def cuts_blocks(func: Any, x: Any) -> InputError:
    """What to raise where an operation has no result of whole blocks."""
    return InputError(
        f"{func} would cut or reorder the blocks of {x.block_size} along dimension {x.block_dim} of an "
        f"{type(x).__name__} of shape {list(x.shape)}; call .dequantize() first."
    )


class Operations:
    """Operations on one kind of tensor.

    Arguments:
        kind: MXTensor or NVFP4Tensor.
        by_value: names of more operations that are computed on the dequantised values.
    """

    def __init__(self, kind: Any, by_value: str = "") -> None:
        self._kind = kind
        self._handlers: dict[Any, Handler] = {}
        self._by_value = {
            overload
            for packet, names in (*_BY_VALUE, (by_value, "default"))
            for each in packet.split()
            for name in names.split()
            if (overload := getattr(getattr(aten, each), name, None)) is not None
        }
        self.handles(
            *(getattr(aten, f"{name}_like").default for name in ("empty", "zeros", "ones", "full", "rand", "randn")),
            *(getattr(aten, f"new_{name}").default for name in ("empty", "zeros", "ones", "full", "empty_strided")),
        )(_like)
        self.handles(aten.t.default)(self._t)
        self.handles(aten.transpose.int)(self._transpose)
        self.handles(aten.unbind.int)(self._unbind)
        self.handles(aten.split.Tensor, aten.split_with_sizes.default)(self._split)

    def handles(self, *overloads: Any) -> Callable[[Handler], Handler]:
        """Decorate what computes these operations."""

        def register(handler: Handler) -> Handler:
            self._handlers.update(dict.fromkeys(overloads, handler))
            return handler

        return register

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of an operation.

        Raises:
            InputError: it has no meaning here, or would need blocks to be requantised.
        """
        first = args[0]
        in_place = func._schema.is_mutable and isinstance(first, self._kind)
        if func in self._by_value and not in_place:
            plain_args, plain_kwargs = tree_map_only(self._kind, self._kind._plain, (args, kwargs))
            return func(*plain_args, **plain_kwargs)
        handler = self._handlers.get(func)
        if handler is None:
            raise InputError(f"{func} is not defined for an {self._kind.__name__}; call .dequantize() first.")
        if torch.is_inference_mode_enabled() and isinstance(first, torch.Tensor) and not first.is_inference():
            # A tensor made in inference mode has no version counter. torch gives a view that of what it is a view of.
            with torch.inference_mode(False):
                return handler(func, *args, **kwargs)
        return handler(func, *args, **kwargs)

    def _t(self, func: Any, x: torch.Tensor) -> Any:
        return self._handlers[aten.permute.default](func, x, list(reversed(range(x.dim()))))

    def _transpose(self, func: Any, x: torch.Tensor, dim0: int, dim1: int) -> Any:
        order = list(range(-x.dim(), 0))
        dim0, dim1 = axis_of(x, dim0), axis_of(x, dim1)
        order[dim0], order[dim1] = dim1, dim0
        return self._handlers[aten.permute.default](func, x, order)

    def _unbind(self, func: Any, x: torch.Tensor, dim: int = 0) -> list[Any]:
        return [self._handlers[aten.select.int](func, x, dim, index) for index in range(x.shape[dim])]

    def _split(self, func: Any, x: torch.Tensor, sizes: int | Sequence[int], dim: int = 0) -> list[Any]:
        length = x.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, length - first) for first in range(0, length, sizes)] or [0]
        parts = zip(accumulate(sizes), sizes, strict=True)
        return [self._handlers[aten.slice.Tensor](aten.slice.Tensor, x, dim, end - size, end) for end, size in parts]


def _like(func: Any, x: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A plain tensor: what is written there later need not fit any scale."""
    shape_only = torch.empty_strided(x.shape, x.stride(), dtype=x.orig_dtype, device="meta")
    if kwargs.get("device") is None:
        kwargs["device"] = x.device
    result: torch.Tensor = func(shape_only, *args, **kwargs)
    return result
