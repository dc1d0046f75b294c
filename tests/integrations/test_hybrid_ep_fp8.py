"""One-byte rows with scales through HybridEPBuffer: the bytes of an all-gather, in the order of bf16 rows."""

import pytest
import torch
import torch.distributed as dist

from tests.integrations import hybrid_reference as reference
from triton_ep.distributed import current_heap
from triton_ep.errors import InputError
from triton_ep.integrations.hybrid_ep import HybridEPBuffer

EXPERTS, TOPK = 2, 3  # experts per rank
TOKENS = (7, 4)  # per rank


def make_buffer(ranks_per_node: int, hidden: int) -> HybridEPBuffer:
    """A buffer that takes one-byte rows."""
    return HybridEPBuffer(
        dist.group.WORLD, hidden, 8, EXPERTS, use_fp8=True, num_of_hybrid_ep_ranks_per_nvlink_domain=ranks_per_node
    )


def same(seen: torch.Tensor, want: torch.Tensor) -> None:
    """Assert the same bits, dtype and shape."""
    assert seen.dtype == want.dtype
    torch.testing.assert_close(seen.cpu(), want, rtol=0, atol=0)


def _check_one_byte(rank: int, nodes: int, ranks_per_node: int) -> None:
    world_size, device, hidden = nodes * ranks_per_node, current_heap().device, 256
    buffer = make_buffer(ranks_per_node, hidden)
    sizes = {"hidden": hidden // 2, "topk": TOPK, "experts": EXPERTS * world_size}
    inputs = [reference.inputs_of(r, world_size, TOKENS[r], **sizes) for r in range(world_size)]
    scales = [torch.randn(i.hidden.shape[0], 2, generator=torch.Generator().manual_seed(7)) for i in inputs]
    # Each byte is a value: the bytes of rows with half as many bf16 elements, which encode their origin.
    for dtype, pad, budget in ((torch.uint8, 16, None), (torch.float8_e4m3fn, 1, 160)):
        rows = [reference.Inputs(i.hidden.view(torch.uint8), i.routing_map, i.probs) for i in inputs]
        want, want_probs, want_counts = reference.dispatch(rows, rank, EXPERTS, pad)
        per_scale = [reference.Inputs(f, i.routing_map, i.probs) for f, i in zip(scales, inputs, strict=True)]
        want_scales, _, _ = reference.dispatch(per_scale, rank, EXPERTS, pad)
        mine = rows[rank].to(device)
        call = {"hidden": mine.hidden.view(dtype), "scaling_factor": scales[rank].to(device).T.contiguous().T}
        routing = {"routing_map": mine.routing_map, "probs": mine.probs}
        how = {"pad_multiple": pad, "num_permuted_tokens": budget, "non_blocking": budget is not None}
        got, probs, got_scales, counts, handle = buffer.dispatch_with_permute(**call, **routing, **how)
        again, _, again_scales, _, _ = buffer.dispatch_with_permute(**call, handle=handle)
        used = want.shape[0]
        for bytes_, factors in ((got, got_scales), (again, again_scales)):
            assert bytes_.dtype == dtype
            same(bytes_[:used].view(torch.uint8), want)
            same(factors[:used], want_scales)
        same(probs[:used], want_probs)
        same(counts, want_counts)
        # The handle takes bf16 rows: outputs, and their gradients.
        wide = torch.cat([mine.hidden, mine.hidden], 1).view(torch.bfloat16)
        plain, _, no_scales, _, _ = buffer.dispatch_with_permute(hidden=wide, handle=handle)
        same(plain[:used].view(torch.uint8), torch.cat([want, want], 1))
        assert no_scales is None
        combined, combined_probs = buffer.combine_with_unpermute(
            hidden=torch.ones(got.shape, dtype=torch.bfloat16, device=device), probs=probs, handle=handle
        )
        same(combined, mine.routing_map.cpu().sum(1, keepdim=True).expand(-1, hidden).bfloat16())
        same(combined_probs, mine.probs.cpu())

        # By rank.
        own = slice(rank * EXPERTS, (rank + 1) * EXPERTS)
        wanted = [i.routing_map[:, own].any(1) for i in inputs]
        got, _, got_scales, handle = buffer.dispatch(**call, **routing)
        again, _, again_scales, _ = buffer.dispatch(**call, handle=handle)
        for bytes_, factors in ((got, got_scales), (again, again_scales)):
            same(bytes_.view(torch.uint8), torch.cat([i.hidden[w] for i, w in zip(rows, wanted, strict=True)]))
            same(factors, torch.cat([f[w] for f, w in zip(scales, wanted, strict=True)]))
        combined, _ = buffer.combine(got.view(torch.uint8).bfloat16(), handle=handle)
        assert combined.shape == (mine.hidden.shape[0], hidden)
    for change, text in (
        ({"use_fp8": False}, "use_fp8 is False"),
        ({"scaling_factor": None}, r"scaling_factor is None; .* need \[\d+, 2\] float32"),
        ({"scaling_factor": call["scaling_factor"].half()}, "float16"),
        ({"hidden": wide, "use_fp8": True}, "hidden is torch.bfloat16. Quantise"),
        ({"hidden": wide if rank else call["hidden"]}, r"ranks \[0\] of 2 dispatch one-byte rows"),
    ):
        with pytest.raises(InputError, match=text):
            buffer.dispatch_with_permute(**{**call, **routing, **change})
    odd = make_buffer(ranks_per_node, 64)
    with pytest.raises(InputError, match="64 values; pad them to a multiple of 128"):
        odd.dispatch(call["hidden"][:, :64], call["scaling_factor"], **routing)
    odd.close()
    buffer.close()


@pytest.mark.plain
@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 2), (2, 1)])
def test_one_byte_rows_travel_with_their_scales(run_ranks, nodes, ranks_per_node):
    """uint8 and e4m3 rows, padded and with a budget, by expert and by rank, with handles of both kinds; mistakes."""
    run_ranks(_check_one_byte, nodes, ranks_per_node)
