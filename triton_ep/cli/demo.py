"""Run a small MoE layer (router, dispatch, expert FFNs, combine) on 4 ranks, in bf16 and MXFP8, and compare it with a
dense layer."""

import argparse
import tempfile
from pathlib import Path

from triton_ep.errors import ConfigError

EXAMPLES = (
    "triton-ep demo",
    "triton-ep demo --tokens 256 --hidden 1024 --experts 32 --topk 8 --picture routing.png",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `triton-ep demo`."""
    parser.add_argument("--tokens", type=int, default=64, help="tokens of rank 0 (default %(default)s)")
    parser.add_argument(
        "--hidden", type=int, default=512, help="elements per token, a multiple of 32 (default %(default)s)"
    )
    parser.add_argument("--experts", type=int, default=16, help="experts over all ranks (default %(default)s)")
    parser.add_argument("--topk", type=int, default=4, help="experts per token (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of weights and tokens (default %(default)s)")
    parser.add_argument("--picture", default="demo_routing.png", help="PNG to write (default %(default)s)")


def choose_ranks(num_gpus: int) -> tuple[int, int]:
    """Number of ranks, and of ranks per node: 2 nodes x 2 on the CPU or with 4 GPUs, fewer with fewer GPUs."""
    if num_gpus in (2, 3):
        return 2, 1
    return (1, 1) if num_gpus == 1 else (4, 2)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo. Returns 0 if every rank's result equals the dense result up to bfloat16 rounding, else 1."""
    from triton_ep.cli.demo_moe import Settings, compare, load, run_and_save
    from triton_ep.cli.demo_report import draw_routing, failures, module_table, payload_table, table
    from triton_ep.distributed import run_ranks
    from triton_ep.runtime import launch as runtime  # before torch's Triton: decides whether kernels are interpreted
    from triton_ep.runtime.environment import read_environment

    job = read_environment()
    if (job.world_size or 1) > 1:
        raise ConfigError(
            f"{job.launcher} started {job.world_size} processes, but the demo starts its own ranks. Run it without a "
            "launcher; examples/01_dispatch_combine.py runs under one."
        )
    if arguments.tokens < 1:
        raise ConfigError(f"--tokens is {arguments.tokens}; the demo needs at least 1.")
    if arguments.hidden < 32 or arguments.hidden % 32:
        raise ConfigError(f"--hidden is {arguments.hidden}; MXFP8 needs a multiple of 32, the block of a scale.")
    num_gpus = 0
    if not runtime.INTERPRETING:
        import torch

        num_gpus = torch.cuda.device_count()
    num_ranks, ranks_per_node = choose_ranks(num_gpus)
    if arguments.experts < 1 or arguments.experts % num_ranks:
        raise ConfigError(f"--experts is {arguments.experts}; {num_ranks} ranks need a multiple of {num_ranks}.")
    if not 1 <= arguments.topk <= arguments.experts:
        raise ConfigError(
            f"--topk is {arguments.topk}; with {arguments.experts} experts it is 1 to {arguments.experts}."
        )
    settings = Settings(
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        tokens=arguments.tokens,
        hidden=arguments.hidden,
        ffn=2 * arguments.hidden,
        experts=arguments.experts,
        topk=arguments.topk,
        seed=arguments.seed,
    )
    where = f"{num_ranks} GPUs" if num_gpus else f"{num_ranks} CPU ranks, kernels interpreted"
    print(
        f"MoE layer on {num_ranks // ranks_per_node} nodes x {ranks_per_node} ranks ({where}):\n"
        f"{settings.tokens} tokens per rank or a few less, hidden {settings.hidden}, "
        f"top-{settings.topk} of {settings.experts} experts\n\nstarting {num_ranks} processes",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(run_and_save, num_ranks, settings, folder)
        results = [load(folder, rank) for rank in range(num_ranks)]
    bf16 = [compare(settings, rank, result.bf16) for rank, result in enumerate(results)]
    mxfp8 = [compare(settings, rank, result.mxfp8, "mxfp8") for rank, result in enumerate(results)]
    print()
    print(table(results, bf16, settings.experts, ranks_per_node))
    print(f"\nThe same in MXFP8, over all ranks:\n\n{payload_table(results, bf16, mxfp8)}")
    print("\nAs a torch module (triton_ep.nn.MoE), forward and backward, against the dense layer:\n")
    print(module_table(results))
    not_drawn = draw_routing(arguments.picture, results, settings.experts)
    print(f"\nrouting picture: {not_drawn or Path(arguments.picture).resolve()}")
    wrong = failures(results, bf16, mxfp8, settings.experts, ranks_per_node)
    print("\n".join(f"FAIL {text}" for text in wrong) or "PASS: equal to the dense layer up to bfloat16 rounding")
    return 1 if wrong else 0
