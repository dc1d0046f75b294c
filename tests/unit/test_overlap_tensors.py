"""All tensors that a call on another stream reads or returns are found: torch could reuse a missed one too early."""

import pytest
import torch

from triton_ep.context.descriptor import EPAllToAllLayoutDesc
from triton_ep.context.overlap import tensors_in
from triton_ep.exchange.landings import CompactRows
from triton_ep.mx.tensor import MXTensor

pytestmark = pytest.mark.plain


def _tensors(count: int) -> list[torch.Tensor]:
    return [torch.full((2,), i, dtype=torch.int32) for i in range(count)]


def _same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return [id(tensor) for tensor in found] == [id(tensor) for tensor in expected]


def test_tensors_of_what_calls_return() -> None:
    """Tensors are found in tuples, lists, dicts, descriptors and rows; numbers and long lists of them are skipped."""
    a, b, c, d, e, f, g = _tensors(7)
    assert tensors_in(None, 3, 2.5, "x", [1, 2, 3] * 100, ()) == []
    assert _same(tensors_in(a, (b, None, [c, 4]), {"k": (d,)}), [a, b, c, d])
    desc = EPAllToAllLayoutDesc(
        num_dispatch_token_cur_rank=1,
        num_recv_rows=2,
        entries=a,
        placement=b,
        shape=(1, 1, 2),
        layer_id=5,
        dispatch_number=1,
        forward=c,
        skipped_token_topk_mapping_indices=d,
        host_expert_offsets=(0, 1, 2),
    )
    assert _same(tensors_in(desc), [a, b, c, d])
    rows = CompactRows(e, f, g, [1] * 128, desc)
    assert _same(tensors_in((rows, 7)), [e, f, g, a, b, c, d])


def test_parts_of_tensors_made_of_others() -> None:
    """A quantised tensor yields its parts, having no memory of its own; a parameter yields itself."""
    mx = MXTensor.from_qdata_and_scales(
        torch.zeros(2, 32, dtype=torch.float8_e4m3fn), torch.zeros(2, 1, dtype=torch.float8_e8m0fnu), torch.bfloat16
    )
    assert _same(tensors_in((mx,)), [mx.qdata, mx.scale])
    parameter = torch.nn.Parameter(torch.ones(3))
    assert _same(tensors_in(parameter), [parameter])
