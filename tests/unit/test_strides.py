"""Views of memory as another dtype, whatever the strides of tensors with no or one row."""

from pathlib import Path

import pytest
import torch

from tests.odd_strides import odd
from triton_ep.integrations.deep_ep.fp8 import scale_bytes, scales_of_bytes
from triton_ep.mx.serialize import load_safetensors, save_safetensors
from triton_ep.ops.grouped_bf16 import _row_major
from triton_ep.ops.strides import dense, view_as
from triton_ep.ops.tuning import as_words

SHAPES = ((0, 8), (1, 8), (3, 1), (0,), (1,), (1, 2, 8), (0, 4, 8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("narrow, wide", [(torch.float32, torch.int64), (torch.float32, torch.uint8)])
def test_any_strides_are_viewed(shape: tuple[int, ...], narrow: torch.dtype, wide: torch.dtype) -> None:
    """A view has the values of the same tensor with normal strides, in the same memory."""
    if shape[-1] * narrow.itemsize % wide.itemsize:
        shape = (*shape[:-1], 2)
    plain = torch.randn(shape, dtype=narrow)
    given = odd(plain)
    assert torch.equal(view_as(given, wide), plain.view(wide))
    assert dense(given).stride() == torch.empty(shape).stride()
    assert not given.numel() or dense(given).data_ptr() == given.data_ptr()


def test_words_follow_rows_and_address() -> None:
    """Word sizes are right for rows of a wider tensor, and for memory at an odd address."""
    wide = torch.arange(27, dtype=torch.bfloat16).view(3, 9)
    assert as_words(wide[:1, :8], 16).dtype == torch.int64
    assert torch.equal(as_words(wide[1:2, 1:5], 8).view(torch.bfloat16), wide[1:2, 1:5])
    memory = bytearray(64)
    shifted = torch.frombuffer(memory, dtype=torch.bfloat16, offset=2)
    for first in range(8):
        rows = shifted[first : first + 8].view(1, 8)
        rows.copy_(torch.arange(8).view(1, 8))
        assert torch.equal(as_words(rows, 16).view(torch.bfloat16), rows)


def test_scales_of_one_column_travel_as_bytes() -> None:
    """[T, 1] float32 with an unusual stride, one row, or no rows survive the round trip."""
    for scales in (torch.randn(3, 1), torch.randn(1, 2), torch.randn(0, 2), torch.randn(1, 1)):
        sent = scale_bytes(odd(scales), 128 * scales.shape[1] + 128)
        assert sent.shape == (scales.shape[0], 4 * scales.shape[1] + 4)
        assert torch.equal(scales_of_bytes(odd(sent), scales.shape[1], torch.float32), scales)


def test_rows_of_a_product_have_the_stride_of_their_length() -> None:
    """TMA does not accept a stride of zero, which one expanded row has."""
    assert _row_major(torch.ones((), dtype=torch.bfloat16).expand(1, 1)).stride() == (1, 1)
    assert _row_major(torch.empty_strided((0, 8), (0, 0))).stride() == (8, 1)


def test_files_hold_tensors_of_any_strides(tmp_path: Path) -> None:
    """An empty tensor, one element of many, and an expanded number are stored and loaded."""
    tensors = {"none": odd(torch.empty(0, 3)), "one": torch.randn(9)[::9], "number": torch.ones(()).expand(1)}
    save_safetensors(tensors, tmp_path / "file")
    loaded = load_safetensors(tmp_path / "file")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
