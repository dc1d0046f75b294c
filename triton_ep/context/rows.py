"""RowFormat: format of the rows that a call sends through the buffers of a layer."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import torch

from triton_ep.errors import ConfigError
from triton_ep.runtime.launch import Launcher
from triton_ep.runtime.plans.layers import narrow_shape
from triton_ep.runtime.plans.residency import Program
from triton_ep.runtime.plans.shape import Shape


class RowFormat:
    """Format of one kind of rows in the buffers of a layer.

    The configuration defines a layer's own rows. The same buffers also carry one-byte rows with scales, which travel
    like MXFP8 rows (`RowFormats.scaled`), and short float32 rows with a number per slot (`RowFormats.narrow`).

    Example: own rows of 7168 bfloat16 take 14336 bytes; one-byte rows of such a layer 7168 and 224 of scales, 7392
    bytes; narrow rows of its 8 slots 32 bytes.

    Attributes:
        hidden: elements per row.
        dtype: dtype of rows that are not quantised.
        payload: how rows travel in dispatch: None = as they are, "mxfp8" = elements and scales.
        payload_bytes: bytes of a row of `dtype`.
        wire_bytes: bytes of a row in dispatch.
        shape: the sizes that kernels for such rows are compiled for.
        launchers: these kernels, by the keys of their call sites.
        grids: cached numbers of programs for these kernels (triton_ep/ops/tuning.py).
    """

    __slots__ = ("dtype", "grids", "hidden", "launchers", "payload", "payload_bytes", "shape", "wire_bytes")

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.hidden, self.payload = shape.hidden, shape.payload
        self.payload_bytes, self.wire_bytes = shape.payload_bytes, shape.wire_bytes
        self.launchers: dict[tuple[object, ...], Launcher] = {}
        self.grids: dict[tuple[object, ...], Any] = {}

    def programs(self, *names: str) -> tuple[Program, ...]:
        """Resources of a program of each of these kernels that has a launcher."""
        return tuple([found.program for key, found in self.launchers.items() if key[0] in names])


class RowFormats:
    """The row formats of one layer, each built once.

    Attributes:
        own: rows of the layer's configuration.
        scaled: one-byte rows with scales; the same as `own` with payload="mxfp8".
    """

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.own = self.scaled = RowFormat(shape, dtype)
        if shape.payload is None:
            self.scaled = RowFormat(shape.scaled, dtype)
        self._narrow: dict[int, RowFormat] = {}

    def narrow(self, columns: int) -> RowFormat:
        """float32 rows of up to `columns` elements, as many as fit into the rows of the buffers.

        Raises:
            ConfigError: not even one fits: one element of 2 bytes is too short. With local combine over several nodes
                also up to 8 are, because a row of partial sums has then the dtype of rows, in multiples of 8 elements.
        """
        found = self._narrow.get(columns)
        if found is None:
            shape = narrow_shape(self.own.shape, columns)
            if shape is None:
                least = next(each for each in count(self.own.hidden + 1) if self._carries(each))
                raise ConfigError(
                    f"rows of {self.own.hidden} {self.own.dtype} are too short to carry a float32, such as a gradient "
                    f"of a routing weight, through the buffers of this layer. Make it with hidden={least} or more, or "
                    "with float32 rows."
                )
            found = self._narrow[columns] = RowFormat(shape, torch.float32)
        return found

    def _carries(self, hidden: int) -> bool:
        """Whether rows of `hidden` elements could carry a float32."""
        return narrow_shape(replace(self.own.shape, hidden=hidden), 1) is not None
