"""Slabs, which hold each expert's rows at a fixed place: from expert-major rows and back (kernels/compute/slab.py)."""

from __future__ import annotations

import functools

import torch

from triton_ep.ops.strides import view_as
from triton_ep.ops.tuning import as_words, local_programs
from triton_ep.runtime.launch import INTERPRETING, Launcher, default_aot
from triton_ep.runtime.plans import compact as plans


def to_slabs(rows: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> None:
    """Copy expert-major rows [R, H] into out [e, n, H], each expert's to the start of its slab; keep the rest of `out`.

    offsets: [e + 1] int32, first row of each expert; counts: [e] int32, rows of each expert, at most n.
    """
    _move(rows, out, offsets, counts, out.shape[1], pack=True)


def from_slabs(slabs: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Inverse of `to_slabs`: [num_rows, H]; rows past the last segment are undefined."""
    rows = torch.empty(num_rows, slabs.shape[2], dtype=slabs.dtype, device=slabs.device)
    _move(slabs, rows, offsets, counts, slabs.shape[1], pack=False)
    return rows


def _move(
    source: torch.Tensor, dest: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor, slab_rows: int, pack: bool
) -> None:
    num_experts, row_bytes = counts.shape[0], dest.shape[-1] * dest.element_size()
    words = as_words(source, row_bytes)
    into = view_as(dest, words.dtype)
    row_words = row_bytes // words.element_size()
    _launcher(pack, row_words).launch(
        _programs(num_experts, dest.device),
        source_ptr=words,
        dest_ptr=into,
        offsets_ptr=offsets,
        counts_ptr=counts,
        num_experts=num_experts,
        slab_rows=slab_rows,
        row_words=row_words,
    )


def _programs(num_experts: int, device: torch.device) -> int:
    """Number of programs: a multiple of the number of experts."""
    return num_experts * max(local_programs(device) * 4 // num_experts, 1)


@functools.cache
def _launcher(pack: bool, row_words: int) -> Launcher:
    return Launcher(plans.slab_rows(pack, row_words, INTERPRETING), aot=default_aot())
