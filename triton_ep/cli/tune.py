"""Find the fastest settings for this machine: programs of the exchange, and rows and warps of its kernels. Writes them
as a table."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from triton_ep.bench import settings as bench
from triton_ep.cli.bench import settings_of
from triton_ep.errors import ConfigError
from triton_ep.runtime.files import check_writable
from triton_ep.runtime.tuned.table import read_table

if TYPE_CHECKING:
    from triton_ep.bench.tune import Request


EXAMPLES = (
    "triton-ep tune --model deepseek-v3 --quick",
    "triton-ep tune --model qwen3-235b --tokens 4096,8192 --out tuned.toml",
    "torchrun --nproc-per-node 8 -m triton_ep.cli tune --hidden 4096 --topk 2 --experts 16 --out tuned.toml",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `triton-ep tune`."""
    small = bench.SMALL
    parser.add_argument("--out", metavar="PATH", help="table to write; its entries for other keys stay")
    parser.add_argument("--model", choices=tuple(bench.MODELS), help="sizes of a model: hidden, top-k, experts")
    text = f"most tokens per rank and call (default 4096; {small['tokens']} on the CPU)"
    parser.add_argument("--tokens", metavar="N,N,..", help=text)
    parser.add_argument("--hidden", metavar="N,N,..", help=f"default 7168; {small['hidden']} on the CPU")
    parser.add_argument("--topk", metavar="N", help=f"default 8; {small['topk']} on the CPU")
    parser.add_argument("--experts", metavar="N", help=f"over all ranks (default 256; {small['experts']} on the CPU)")
    parser.add_argument("--payload", default="bf16,mxfp8", metavar="P,P", help="bf16, mxfp8 (default %(default)s)")
    parser.add_argument("--num-sm", metavar="N,N,..", help="candidates (default 8,16,20,24,32,48,64; 1,2 on the CPU)")
    parser.add_argument("--no-local-combine", action="store_true", help="tune layers without enable_local_combine")
    parser.add_argument("--quick", action="store_true", help="fewer candidates, fewer calls")
    parser.add_argument("--iters", type=int, metavar="N", help="timed calls (default 20, quick 10; 2 on the CPU)")
    parser.add_argument("--ranks", type=int, metavar="N", help="without launcher (default: one per GPU; 4 on the CPU)")
    parser.add_argument("--local-world-size", type=int, metavar="N", help="ranks per node, for virtual nodes")
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes, instead of --local-world-size")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the routing (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON, with every measurement, instead of TOML")
    parser.add_argument("--commit", help="commit for a stored table, without a .git (default: of this checkout)")


def run(arguments: argparse.Namespace) -> int:
    """Tune: as a rank that a launcher started, or with ranks that it starts."""
    from triton_ep.bench import tune
    from triton_ep.distributed import run_ranks
    from triton_ep.runtime import launch as runtime  # before torch's Triton: decides whether kernels are interpreted
    from triton_ep.runtime.environment import read_environment

    gpus = 0
    if not runtime.INTERPRETING:
        import torch

        gpus = torch.cuda.device_count()
    environment = read_environment()
    if arguments.out is not None and environment.rank in (None, 0):  # fail now, not after the measurement
        check_writable(Path(arguments.out))
        if Path(arguments.out).exists():
            read_table(Path(arguments.out))
    launched = environment.world_size
    if launched is not None and arguments.ranks not in (None, launched):
        raise ConfigError(f"--ranks {arguments.ranks}, but the launcher started {launched} ranks.")
    request = request_of(arguments, launched or gpus or 4, interpreting=runtime.INTERPRETING)
    if launched is not None:
        tune.run(request)
        return 0
    if gpus and request.settings.ranks > gpus:
        raise ConfigError(f"--ranks {request.settings.ranks}, but this machine has {gpus} GPUs.")
    run_ranks(tune.run, request.settings.ranks, request)
    return 0


def request_of(arguments: argparse.Namespace, ranks: int, *, interpreting: bool) -> Request:
    """Convert the arguments to a tuning request; ranks: number of ranks unless the arguments give it.

    Raises:
        ConfigError: the settings cannot work.
    """
    from triton_ep.bench import tune

    a = arguments
    candidates = tune.num_sm_candidates(interpreting=interpreting, quick=a.quick)
    told = {
        **vars(a),
        "bench": "roundtrip",
        "num_sm": ",".join(map(str, candidates)) if a.num_sm is None else a.num_sm,
        "iters": (2 if interpreting else 10 if a.quick else 20) if a.iters is None else a.iters,
        "warmup": 1 if interpreting else 3,
        "enable_local_combine": not a.no_local_combine,
        "routing": "uniform",
        "capacity": "static",
        "alignment": 1 if interpreting else 128,
        "provider": "triton_ep",
        "graph": False,
        "ffn": None,
        "csv": None,
        "stages": False,
        "plot": None,
        "timeline": None,
    }
    settings = settings_of(argparse.Namespace(**told), ranks, interpreting=interpreting)
    return tune.Request(settings, a.quick, a.out)
