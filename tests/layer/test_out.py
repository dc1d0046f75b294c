"""Combine into memory of the caller."""

from dataclasses import replace

import pytest
import torch

from tests.layer.cases import Case, dispatch_and_check, expert_outputs, make_layer
from triton_ep.errors import InputError

PLAIN = Case("out", tokens=(9, 0, 14, 5), hidden=72, topk=3, experts=3)
CASES = (
    PLAIN,
    replace(PLAIN, name="out_local_weighted", local_combine=True, combine_weights=True),
    replace(PLAIN, name="out_low_latency", low_latency=True, static=True, combine_weights=True, hidden=64),
)


def _check(rank: int, nodes: int, ranks_per_node: int, case: Case) -> None:
    with make_layer(case, rank, nodes, ranks_per_node) as layer:
        done = dispatch_and_check(layer, case, 0)
        given = expert_outputs(layer, done), done.desc, done.recv_weights if case.combine_weights else None
        want = layer.combine(*given)
        # Memory with something else before and after it.
        around = torch.full((want.shape[0] + 2, case.hidden), 7.0, dtype=want.dtype, device=want.device)
        out = around[1:-1]
        for options in ({}, {"return_recv_hook": True}, {"async_finish": True}):
            out.fill_(torch.nan)
            found = layer.combine(*given, out=out, **options)
            if options:
                found, end = found
                end() if "return_recv_hook" in options else end.current_stream_wait()
            assert found is out and torch.equal(out, want)
            assert bool((around[0] == 7).all()) and bool((around[-1] == 7).all())
        for wrong in (want[:, :-1], want.double(), torch.stack((want, want), 1)[:, 0], want.tolist()):
            # One row or none is contiguous in any case.
            if not isinstance(wrong, torch.Tensor) or wrong.dtype != want.dtype or wrong.shape[0] > 1:
                with pytest.raises(InputError, match="out "):
                    layer.combine(*given, out=wrong)
        assert torch.equal(layer.combine(*given), want)
        layer.check()


@pytest.mark.plain  # a combine sends the same wherever its result goes
@pytest.mark.parametrize(
    "nodes, ranks_per_node, case",
    [(nodes, ranks, case) for nodes, ranks in ((1, 2), (2, 1)) for case in CASES if nodes == 1 or not case.low_latency],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_result_is_written_where_the_caller_wants_it(run_ranks, nodes, ranks_per_node, case):
    """The same bits, whole calls and calls in halves; nothing around the memory changes; other memory is refused."""
    run_ranks(_check, nodes, ranks_per_node, case)
