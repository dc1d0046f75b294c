"""TransformerEngine's autocast without TransformerEngine: a mixture-of-experts block in MXFP8 on several ranks.

The same block runs in high precision, in MXFP8, and in MXFP8 with E5M2 gradients. Rows travel in bf16 in all three, so
only the rounding of the products differs. Prints the signal-to-noise ratio of the result and of its gradient against
high precision, in dB.

    python examples/08_te_autocast.py                         starts its own ranks
    torchrun --nproc-per-node 4 examples/08_te_autocast.py
    mpirun -np 4 python examples/08_te_autocast.py
"""

import warnings

import torch
import torch.distributed as dist

import triton_ep.integrations.te as te
from triton_ep import EPAll2AllLayer, finalize_distributed, initialize_distributed
from triton_ep.distributed import current_heap, launched_by, local_world_size, run_ranks

TOKENS, HIDDEN, FFN, TOPK, EXPERTS = 32, 128, 64, 2, 8
LEAST_DB = {"MXFP8": 21, "MXFP8 hybrid": 18}  # an E5M2 gradient has 6 dB less


def sqnr(exact: torch.Tensor, seen: torch.Tensor) -> float:
    """Signal-to-noise ratio in dB."""
    noise = (exact.double() - seen.double()).square().sum()
    return 10 * torch.log10(exact.double().square().sum() / noise).item()


def step(block: te.EPMoE, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Result of the block and gradient of x."""
    leaf = x.clone().requires_grad_()
    y = block(leaf)
    (dx,) = torch.autograd.grad(y, leaf, grad)
    return y.detach(), dx


def main() -> None:
    warnings.filterwarnings("ignore", "MXFP8 is emulated")  # this example reports the precision it measures
    rank, world_size = initialize_distributed()
    device = current_heap().device
    torch.manual_seed(rank)
    x, grad = (torch.randn(TOKENS, HIDDEN).bfloat16().to(device) for _ in range(2))
    sizes = (dist.group.WORLD, TOKENS, HIDDEN, TOPK, rank, EXPERTS, local_world_size(), world_size)
    with EPAll2AllLayer(*sizes) as layer:
        block = te.EPMoE(layer, FFN)
        exact = step(block, x, grad)
        seen_db = {}
        for name, fp8_format in zip(LEAST_DB, (te.Format.E4M3, te.Format.HYBRID), strict=True):
            with te.autocast(recipe=te.MXFP8BlockScaling(fp8_format=fp8_format)):
                seen = step(block, x, grad)
                with te.autocast(enabled=False):  # regions nest
                    assert torch.equal(block(x), exact[0])
            seen_db[name] = [sqnr(a, b) for a, b in zip(exact, seen, strict=True)]
    table = [None] * world_size
    dist.all_gather_object(table, seen_db)
    if rank == 0:
        print(f"rank 0 of {world_size}: {te.mxfp8_mode()}; dB against high precision: y, dx")
        for peer, row in enumerate(table):
            print(f"{peer:>6} " + "  ".join(f"{name}: {y:.1f}, {dx:.1f}" for name, (y, dx) in row.items()), flush=True)
    for name, least in LEAST_DB.items():
        assert min(seen_db[name]) >= least, f"{name} has {seen_db[name]} dB, at least {least} are expected"
    finalize_distributed()


if __name__ == "__main__":
    run_ranks(main) if launched_by() == "none" else main()
