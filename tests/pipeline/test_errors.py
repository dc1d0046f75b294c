"""Arguments that do not fit are refused before anything is sent; errors have both numbers and a remedy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.ops.grouped import DEVICE
from tests.pipeline.plain import device
from triton_ep import MXTensor, pipeline
from triton_ep.errors import InputError

pytestmark = pytest.mark.plain


def _check_exchange_errors(rank: int, nodes: int, ranks_per_node: int) -> None:
    rows = torch.zeros(5, 64, device=device()).bfloat16()
    mx = MXTensor.to_mx(rows)
    here = [5]
    for match, call in (
        ("add up to 4, input has 5 rows. They are", lambda: pipeline.a2a_dispatch(rows, [6], [4])),
        ("may be swapped", lambda: pipeline.a2a_combine(rows, here, [6])),
        ("output_splits of a2a_dispatch has 2 entries, the group has 1 ranks", lambda: _dispatch(rows, [5, 0], here)),
        ("negative", lambda: pipeline.a2a_dispatch(rows, [-1], here)),
        ("has 5.0; numbers of rows are integers", lambda: pipeline.a2a_dispatch(rows, [5.0], here)),
        ("has True; numbers of rows are integers", lambda: pipeline.a2a_dispatch(rows, here, [True])),
        (r"pass input_splits.tolist\(\)", lambda: pipeline.a2a_dispatch(rows, here, torch.tensor(here))),
        (r"\[rows, row length\]; it is \[5\]", lambda: pipeline.a2a_dispatch(rows[:, 0], here, here)),
        ("torch.int64", lambda: pipeline.a2a_dispatch(rows.long(), here, here)),
        ("40 elements, which must be a multiple of block_size, 32", lambda: _dispatch(rows[:, :40], here, here)),
        ("mxfp8_bwd=False", lambda: pipeline.a2a_combine(rows[:, :40], here, here)),
        ("along their length", lambda: pipeline.a2a_dispatch(_across(mx), [64], [64])),
        ("dequantize", lambda: pipeline.a2a_combine(mx, here, here)),
        ("choose one of", lambda: pipeline.a2a_dispatch(rows, here, here, scaling_mode="nearest")),
        ("named 'nobody'", lambda: pipeline.a2a_dispatch(rows, here, here, "nobody")),
        ("member of", lambda: pipeline.a2a_dispatch(rows, here, here, dist.GroupMember.NON_GROUP_MEMBER)),
        ("pass one of them", lambda: _dispatch(rows, here, here, "one", group=dist.group.WORLD)),
    ):
        with pytest.raises(InputError, match=match):
            call()
    assert pipeline.a2a_combine(rows[:, :40], here, here, mxfp8_bwd=False).shape == (5, 40)
    assert pipeline.a2a_dispatch(rows, np.array(here), np.array(here)).shape == (5, 64)


_dispatch = pipeline.a2a_dispatch_mxfp8_fwd_hp_bwd


def _across(mx: MXTensor) -> torch.Tensor:
    """[64, 5], with blocks along the rows."""
    return mx.t()


def test_exchanges(run_ranks):
    """Splits, shapes, dtypes, groups."""
    run_ranks(_check_exchange_errors, 1, 1)


def test_no_process_group() -> None:
    """The error says how to create one."""
    with pytest.raises(InputError, match="initialize_distributed"):
        pipeline.a2a_dispatch(torch.zeros(1, 32), [1], [1])


def test_permutations() -> None:
    """Shapes and dtypes are checked on every device."""
    x = torch.zeros(5, 32, device=DEVICE)
    indices = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    counts = torch.tensor([2, 3], device=DEVICE)
    for match, call in (
        ("with one row more", lambda: pipeline.permute(x, indices, (5, 32))),
        ("with one row more", lambda: pipeline.permute(x, indices, (6, 64))),
        ("1-D, int32 or int64", lambda: pipeline.permute(x, indices.float(), (6, 32))),
        ("1-D, int32 or int64", lambda: pipeline.permute(x, indices.view(2, 4), (6, 32))),
        ("along their length", lambda: pipeline.permute(MXTensor.to_mx(x).t(), indices, (33, 5))),
        (r"must be \[P, N\] and \[P\]", lambda: pipeline.unpermute(x, indices, (6, 32))),
        (r"\[R \+ 1, row length\]", lambda: pipeline.unpermute(x, indices[:5], (0, 32))),
        ("dequantize", lambda: pipeline.unpermute(MXTensor.to_mx(x), indices[:5], (6, 32))),
        ("2 ranks with 2 local experts need 4", lambda: pipeline.generate_permute_indices(counts, 2, 2, 9, 1)),
        ("float32", lambda: pipeline.generate_permute_indices(counts.float(), 2, 1, 9, 1)),
        ("alignment 0", lambda: pipeline.generate_permute_indices(counts, 2, 1, 9, 0)),
        ("must be a tensor of integers", lambda: pipeline.permute_and_pad(x, [2, 3], 2, 1, 32)),
        ("alignment of groups is 0", lambda: pipeline.permute_and_pad(x, counts, 2, 1, 0)),
    ):
        with pytest.raises(InputError, match=match):
            call()


def test_values_that_the_host_sees() -> None:
    """On the CPU, an index or a count out of range is refused."""
    x = torch.zeros(5, 32)
    counts = torch.tensor([2, 3])
    for match, call in (
        ("has 6, there are 5 rows", lambda: pipeline.permute(x, torch.tensor([0, 6]), (6, 32))),
        ("has 7, there are 5 rows", lambda: pipeline.unpermute(x[:2], torch.tensor([0, 7]), (6, 32))),
        ("take 64 rows, max_len is 63", lambda: pipeline.generate_permute_indices(counts, 2, 1, 63, 32)),
        ("none can be negative", lambda: pipeline.generate_permute_indices(counts - 3, 2, 1, 64, 32)),
        ("adds up to 5, but there are 4 rows", lambda: pipeline.permute_and_pad(x[:4], counts, 2, 1, 32)),
    ):
        with pytest.raises(InputError, match=match):
            call()
