"""SymmetricBuffers: the symmetric memory of one layer, by the table in triton_ep/context/layout.py.

Buffers of one growth class are one block, or those of both with `shared_staging`. Kernels read the address of every
buffer at every rank from `tables` (kernels/device/buffers.py), so a larger block can replace a block without compiling
or binding kernels again.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from triton_ep.config import EPConfig
from triton_ep.context import layout
from triton_ep.errors import HeapError
from triton_ep.heap.base import SymmetricHeap, SymmTensor

_log = logging.getLogger("triton_ep")
_INDEX = {buffer.name: index for index, buffer in enumerate(layout.BUFFERS)}
_SLACK_BYTES = 4096  # most bytes that a heap adds to one allocation for alignment


class SymmetricBuffers:
    """The buffers of one layer on this rank, and their addresses at all ranks.

    `allocate`, `grow` and `retire` are collective over the group.

    Attributes:
        config: configuration of the layer.
        sizes: rows for which the buffers have room.
        tables: [2 * buffers + 1, W] int64 on the device: addresses of every buffer at every rank, for loads and stores
            and for the network, and the numbers of the ranks in the heap.
    """

    @torch.inference_mode(False)  # the tables outlive inference mode and must stay writable outside it
    def __init__(self, config: EPConfig, sizes: layout.Sizes, group: Any, heap: SymmetricHeap, name: str) -> None:
        self.config, self.sizes = config, sizes
        self._classes = layout.blocks(config)
        self._group, self._heap, self._name = group, heap, name
        self._blocks: dict[str, SymmTensor] = {}
        self._offsets: dict[str, tuple[str, int]] = {}
        num_buffers = len(layout.BUFFERS)
        self.tables = torch.zeros(2 * num_buffers + 1, config.world_size, dtype=torch.int64, device=heap.device)
        self._addrs, self._net_addrs = self.tables[:num_buffers], self.tables[num_buffers:-1]
        self.tables[-1] = heap.pes(group)

    def allocate(self) -> None:
        """Allocate all buffers.

        Raises:
            HeapError: on all ranks, if one has no room.
        """
        slack = len(self._classes) * _SLACK_BYTES
        self._heap.require(layout.estimate_bytes(self.sizes) + slack, self._group, self._name)
        for name in self._classes:
            self._allocate_block(name)
        self._note("made")

    def _note(self, what: str) -> None:
        """Log rows and bytes at level INFO, and the configuration once."""
        _log.info(
            "%s %s: room for %d arriving rows and %d rows of output, %.1f MiB of symmetric memory per rank%s",
            self._name,
            what,
            self.sizes.arrival_rows,
            self.sizes.output_rows,
            layout.estimate_bytes(self.sizes) / 2**20,
            f"; {self.config}" if what == "made" else "",
        )

    @torch.inference_mode(False)
    def _allocate_block(self, name: str) -> None:
        """Allocate one block and enter the addresses of its buffers in the tables."""
        classes = self._classes[name]
        block = self._heap.alloc((layout.block_bytes(self.sizes, classes),), torch.uint8, self._group, self._name)
        self._blocks[name] = block
        for grows in classes:
            offset = 0
            for buffer in layout.members(grows):
                self._offsets[buffer.name] = (name, offset)
                self._addrs[_INDEX[buffer.name]] = torch.where(block.addrs != 0, block.addrs + offset, 0)
                self._net_addrs[_INDEX[buffer.name]] = block.net_addrs + offset
                offset += buffer.nbytes(self.sizes)

    def local(self, name: str) -> torch.Tensor:
        """This rank's copy of a buffer, as a tensor of the shape and dtype in triton_ep/context/layout.py."""
        buffer = layout.BUFFERS[_INDEX[name]]
        block, offset = self._offsets[name]
        shape, dtype = buffer.shape(self.sizes), buffer.dtype(self.config)
        count = torch.Size(shape).numel() * dtype.itemsize
        return self._blocks[block].local[offset : offset + count].view(dtype).view(shape)

    def local_as(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The whole memory of this rank's copy of a buffer, padding included, viewed as `dtype`."""
        block, offset = self._offsets[name]
        nbytes = layout.BUFFERS[_INDEX[name]].nbytes(self.sizes)
        return self._blocks[block].local[offset : offset + nbytes].view(dtype)

    def local_address(self, name: str) -> int:
        """Address of `local(name)`, without creating a tensor."""
        block, offset = self._offsets[name]
        return self._blocks[block].local.data_ptr() + offset

    def address_at(self, name: str, rank: int) -> int:
        """Address at which this process, or its GPU, reaches a buffer of a rank of its node."""
        block, offset = self._offsets[name]
        return self._blocks[block].addresses[rank] + offset

    def wanted_sizes(self, arrival_rows: int, output_rows: int) -> layout.Sizes:
        """The sizes for `grow` with room for at least that many rows; `sizes` itself if it has room already.

        A class that grows gets a quarter more rows, so that a slow increase does not replace buffers at every call, but
        never more staging rows than can arrive, and no more rows for sums than there can be.
        """
        staged, output = self.sizes.arrival_rows, self.sizes.output_rows
        if arrival_rows > staged:
            staged = min(arrival_rows + arrival_rows // 4, self.config.world_size * self.config.max_tokens)
        if output_rows > output:
            output = output_rows + output_rows // 4
            if output_rows <= (most := layout.rows_of_sums(self.config)):
                output = min(output, most)
        if (staged, output) == (self.sizes.arrival_rows, self.sizes.output_rows):
            return self.sizes
        return layout.Sizes(self.config, staged, output)

    def grow(self, wanted: layout.Sizes) -> None:
        """Replace the blocks of classes that are smaller than `wanted`; their contents are lost.

        Raises:
            HeapError: on all ranks, if one has no room. The block keeps its former size, and smaller calls still work.
        """
        for name, classes in self._classes.items():
            staged = wanted.arrival_rows if "arrival" in classes else self.sizes.arrival_rows
            output = wanted.output_rows if "output" in classes else self.sizes.output_rows
            if (staged, output) != (self.sizes.arrival_rows, self.sizes.output_rows):
                self._replace(name, layout.Sizes(self.config, staged, output))
        self._note("grown")

    def _replace(self, name: str, sizes: layout.Sizes) -> None:
        before, self.sizes = self.sizes, sizes
        self._heap.free(self._blocks.pop(name))
        try:
            self._allocate_block(name)
        except HeapError:
            self.sizes = before
            self._allocate_block(name)
            raise

    def retire(self, members: list[int], wait: bool) -> None:
        """Give the memory back. It is reused once all ranks have done so; wait: wait for that.

        members: world ranks of the group.
        """
        blocks = list(self._blocks.values())
        self._blocks.clear()
        self._heap.retire(blocks, self._name, members, wait=wait)
