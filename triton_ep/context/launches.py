"""Launches: the kernels of one layer, with their common arguments bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from triton_ep.context.rows import RowFormat, RowFormats
from triton_ep.kernels.device import codes
from triton_ep.runtime.cubins import Aot
from triton_ep.runtime.graphs import owns_memory
from triton_ep.runtime.launch import Launcher
from triton_ep.runtime.plans import Plan


class Launches:
    """Launchers of one layer, built at first use, and the scratch memory that its kernels share.

    Args:
        bound: arguments shared by all launches: state and tables, ranks, experts, most tokens.
        aot: library to take kernels from; None: kernels are compiled or interpreted.
        network: codes.P2P or codes.NVSHMEM.
    """

    def __init__(
        self, rows: RowFormats, bound: Mapping[str, Any], aot: Aot | None, network: int, device: torch.device
    ) -> None:
        self._own, self._bound, self._aot = rows.own, dict(bound), aot
        self._network, self._device = network, device
        self._extern_libs: dict[str, str] | None = None
        self._scratch: dict[str, torch.Tensor] = {}
        self._identity_rows = torch.empty(0, 1, dtype=torch.int32, device=device)
        self._limited_rows = 0, self._identity_rows  # number of rows that are not -1, and their table

    def launcher(
        self,
        key: tuple[object, ...],
        plan: Callable[..., Plan],
        *args: Any,
        fmt: RowFormat | None = None,
        early: bool = False,
    ) -> Launcher:
        """The launcher of this key, built at first use from `plan(shape, *args)` of triton_ep/runtime/plans.

        fmt: format of the rows that the kernel moves; None: the layer's own format, or the kernel moves no rows.
        early: as in `Launcher`; the key tells early launches from others.
        """
        rows = self._own if fmt is None else fmt
        found = rows.launchers.get(key)
        if found is None:
            wanted = plan(rows.shape, *args)
            libs = self.extern_libs if wanted.constexprs.get("NETWORK") == codes.NVSHMEM else None
            found = rows.launchers[key] = Launcher(wanted, self._bound, libs, self._aot, early=early)
        return found

    def extern_libs(self) -> dict[str, str] | None:
        """Device bitcode for kernels that call NVSHMEM; None if this layer has no such kernels."""
        if self._network != codes.P2P and self._extern_libs is None:
            from triton_ep.heap.bitcode import pruned_bitcode

            self._extern_libs = {"libnvshmem_device": str(pruned_bitcode(codes.NVSHMEM_SYMBOLS))}
        return self._extern_libs

    def scratch(self, name: str, length: int, dtype: torch.dtype) -> torch.Tensor:
        """[length] scratch memory shared by the kernels of a call; kept, because an allocation takes host time."""
        found = self._scratch.get(name)
        if found is None:
            found = torch.empty(length, dtype=dtype, device=self._device)
            if not owns_memory(self._device):
                self._scratch[name] = found
        return found

    def identity_rows(self, num_rows: int, num_staged: int, most: int) -> torch.Tensor:
        """[max(num_rows, num_staged), 1] int32: each row's own number, -1 from `num_rows` on.

        A view of one table, which grows to `most` rows in one step; with -1 a table of its own, of which the latest is
        kept.
        """
        if num_rows < num_staged:
            return self._first_rows(num_rows, num_staged)
        table = self._identity_rows
        if table.shape[0] < num_rows:
            table = torch.arange(max(num_rows, most), dtype=torch.int32, device=self._device).unsqueeze(1)
            if not owns_memory(self._device):
                self._identity_rows = table
        return table[:num_rows]

    def _first_rows(self, num_rows: int, num_staged: int) -> torch.Tensor:
        """[num_staged, 1] int32: the numbers of the first `num_rows` rows, then -1."""
        kept_rows, table = self._limited_rows
        if kept_rows != num_rows or table.shape[0] != num_staged:
            table = torch.arange(num_staged, dtype=torch.int32, device=self._device).unsqueeze(1)
            table[num_rows:] = -1
            if not owns_memory(self._device):
                self._limited_rows = num_rows, table
        return table
