"""Benchmarks: times of dispatch, combine and related calls, compared with other providers and with the link bound."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from triton_ep import __version__
from triton_ep.bench import scaling
from triton_ep.bench import settings as bench
from triton_ep.cli.help import describe
from triton_ep.errors import ConfigError

_HELP = {
    "dispatch": "send rows to their experts",
    "combine": "send rows back to their tokens",
    "roundtrip": "dispatch and combine, one by one and together",
    "low-latency": "dispatch and combine together, for few tokens, in a CUDA graph",
    "beside-gemm": "dispatch and combine overlapping matrix products: time of both, and of the products alone",
    "host": "host time of each call, by function",
    "barrier": "barrier of all ranks on the device",
    "quantise": "quantise rows to MXFP8",
    "moe-layer": "triton_ep.nn.MoE after its router: dispatch, experts, combine; and a training step",
}
_BUDGETED = ("dispatch", "combine", "roundtrip", "beside-gemm")
EXAMPLES = (
    "triton-ep bench roundtrip",
    "torchrun --nproc-per-node 8 -m triton_ep.cli bench moe-layer --backward --csv rows.csv",
    "triton-ep bench plot rows.csv --out rows.svg",
)
_EXAMPLES = {
    "dispatch": ("triton-ep bench dispatch --model deepseek-v3 --num-sm 8,16,24 --payload bf16,mxfp8",),
    "combine": ("triton-ep bench combine --enable-local-combine --tokens 128,4096",),
    "roundtrip": (
        "triton-ep bench roundtrip --capacity static --graph --csv rows.csv --plot rows.svg",
        "triton-ep bench roundtrip --routing zipf:1.2 --stages",
    ),
    "low-latency": ("triton-ep bench low-latency --tokens 16,128 --payload bf16,mxfp8",),
    "beside-gemm": (
        "triton-ep bench beside-gemm --sm-budget 24 --capacity static --enable-local-combine",
        "triton-ep bench beside-gemm --provider triton_ep_compact,deep_ep --num-sm 24 --sm-budget 24 --copy-engines",
    ),
    "host": ("triton-ep bench host", "triton-ep bench host --capacity static --provider triton_ep --stages"),
    "barrier": ("triton-ep bench barrier --ranks 4",),
    "quantise": ("triton-ep bench quantise --tokens 4096 --hidden 7168",),
    "moe-layer": (
        "triton-ep bench moe-layer --backward --capacity exact,static --payload bf16,mxfp8",
        "triton-ep bench moe-layer --low-latency --tokens 8,32,128 --payload bf16,mxfp8",
    ),
    "plot": (
        "triton-ep bench plot rows.csv --out rows.svg --where payload=bf16",
        "triton-ep bench plot --routing zipf:1.2 --ranks 8 --out routing.png",
    ),
    "model": ("triton-ep bench model --ranks 8,64,512 --tokens 4096",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands and options of `triton-ep bench`."""
    commands = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for name in bench.COMMANDS:
        _add_options(commands.add_parser(name, help=_HELP[name], description=_HELP[name]), name)
    plot = commands.add_parser("plot", help="draw stored rows", description="Draw stored rows.")
    plot.add_argument("rows", nargs="?", metavar="CSV", help="file that --csv wrote")
    plot.add_argument("--out", required=True, metavar="PATH", help=".png or .svg to write")
    plot.add_argument("--where", action="append", default=[], metavar="COLUMN=V,V", help="draw only these rows")
    plot.add_argument("--lines", metavar="TEXT,TEXT", help="draw only lines whose name contains one of these texts")
    plot.add_argument("--routing", metavar="SPEC", help="draw the tokens from rank to rank of this routing, not times")
    plot.add_argument("--tokens", type=int, default=4096, help="--routing: tokens per rank (default %(default)s)")
    plot.add_argument("--topk", type=int, default=8, help="--routing: experts per token (default %(default)s)")
    plot.add_argument("--experts", type=int, default=256, help="--routing: experts of all ranks (default %(default)s)")
    plot.add_argument("--ranks", type=int, default=8, help="--routing: ranks (default %(default)s)")
    plot.add_argument("--seed", type=int, default=0, help="--routing: random seed (default %(default)s)")
    text = "modelled time of an exchange, up to thousands of ranks"
    scaling.add_arguments(commands.add_parser("model", help=text, description=text))
    for name, command in commands.choices.items():
        describe(command, _EXAMPLES[name])
        command.usage = f"triton-ep bench {name} {'[CSV] --out PATH ' if name == 'plot' else ''}[options]"


def _add_options(parser: argparse.ArgumentParser, name: str) -> None:
    tokens = 128 if name == "low-latency" else 4096
    many: dict[str, Any] = {"metavar": "N,N,.."}
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    group = parser.add_argument_group("shape", "lists run every combination")
    group.add_argument("--model", choices=tuple(bench.MODELS), help="sizes of a model: hidden, top-k, experts, ffn")
    group.add_argument("--tokens", help=f"per rank (default {tokens}; {bench.SMALL['tokens']} on the CPU)", **many)
    group.add_argument("--hidden", help=f"default 7168; {bench.SMALL['hidden']} on the CPU", **many)
    group.add_argument("--topk", help=f"default 8; {bench.SMALL['topk']} on the CPU", **many)
    group.add_argument("--experts", help=f"over all ranks (default 256; {bench.SMALL['experts']} on the CPU)", **many)
    group.add_argument("--ffn", help="width of an expert, for moe-layer (default 2048)", **number)
    group.add_argument(
        "--routing", default="uniform", metavar="SPEC", help="uniform, zipf:S, one-hot, file:PATH (default uniform)"
    )
    group.add_argument("--seed", default=0, help="random seed of the routing (default %(default)s)", **number)
    group = parser.add_argument_group("exchange")
    group.add_argument("--payload", default="bf16", metavar="P,P", help="bf16, mxfp8 (default bf16)")
    group.add_argument("--num-sm", default="20", help="programs of the exchange, or auto (default 20)", **many)
    moe = name == "moe-layer"
    if name == "host":
        text = "a low-latency layer: 128 tokens by default, static"
        group.add_argument("--low-latency", action="store_true", help=text)
    if name in _BUDGETED:
        text = "multiprocessors for the layer's whole exchange (default: no budget)"
        group.add_argument("--sm-budget", help=text, **number)
        text = "copy engines send the rows of dispatches, and compact rows of exact combines"
        group.add_argument("--copy-engines", action="store_true", help=text)
    text = "exact, static, or both" if moe else "default exact; static for low-latency"
    group.add_argument("--capacity", metavar="C,C" if moe else "C", help=text)
    align = 1 if name == "low-latency" else 128
    group.add_argument("--alignment", default=align, help="of expert segments, in rows (default %(default)s)", **number)
    group.add_argument("--graph", action="store_true", help="run calls in a CUDA graph; needs --capacity static")
    text = "sum a token's rows on the expert's rank" + (" (always)" if moe else "")
    group.add_argument("--enable-local-combine", action="store_true", default=moe, help=text)
    if moe:
        group.add_argument("--backward", action="store_true", help="measure a training step as well")
        text = "measure a step that adds gradients of weights to float32, as Megatron-Core does, as well"
        group.add_argument("--main-grad", action="store_true", help=text)
        text = "decoding: 128 tokens by default, a low-latency exchange, in a CUDA graph"
        group.add_argument("--low-latency", action="store_true", help=text)
        group.add_argument("--refresh-weights", action="store_true", help="measure just-changed weights as well")
        text = f"precision of MXFP8 products: {', '.join(bench.PRECISIONS)} (default default)"
        group.add_argument("--precision", default="default", metavar="P,P", help=text)
    group = parser.add_argument_group("measurement")
    group.add_argument("--iters", help="timed calls (default 50; 3 on the CPU)", **number)
    group.add_argument("--warmup", help="untimed calls before them (default 5; 1 on the CPU)", **number)
    providers = "triton_ep" if name == "quantise" else "triton_ep,nccl,gemm-only" if moe else "triton_ep,nccl"
    text = f"{', '.join(_providers_of(name))} (default {providers})"
    group.add_argument("--provider", default=providers, metavar="P,P", help=text)
    group = parser.add_argument_group("ranks")
    group.add_argument("--ranks", help="ranks without a launcher (default: one per GPU; 4 on the CPU)", **number)
    group.add_argument("--local-world-size", help="ranks per node; fewer than per host: virtual nodes", **number)
    group.add_argument("--nodes", help="number of nodes, instead of --local-world-size", **number)
    group = parser.add_argument_group("output")
    group.add_argument("--csv", metavar="PATH", help="append the rows to this file")
    group.add_argument("--json", action="store_true", help="print JSON instead of tables")
    what = "the functions that take the most time" if name == "host" else "the time of each kernel on rank 0"
    group.add_argument("--stages", action="store_true", help=f"print {what}")
    group.add_argument("--plot", metavar="PATH", help="draw the rows of this run (.png, .svg)")
    group.add_argument("--timeline", metavar="PATH", help="draw the kernels of a call of each op (.png, .svg)")
    group.add_argument("--commit", help="commit for stored rows, without a .git (default: of this checkout)")


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark: as a rank that a launcher started, or with ranks that it starts."""
    if arguments.bench == "model":
        scaling.main(arguments)
        return 0
    from triton_ep.bench import plot, rows
    from triton_ep.runtime import launch as runtime  # before torch's Triton: decides whether kernels are interpreted

    if arguments.bench == "plot":
        plot.main(arguments)
        print(f"drawn: {arguments.out}")
        return 0
    from triton_ep.bench.run import run as run_rank
    from triton_ep.bench.run import skip_all
    from triton_ep.distributed import run_ranks
    from triton_ep.runtime.environment import read_environment

    gpus = 0
    if not runtime.INTERPRETING:
        import torch

        gpus = torch.cuda.device_count()
    environment = read_environment()
    if environment.rank in (None, 0):  # rank 0 writes the files: fail now, not after the measurement
        for picture in (arguments.plot, arguments.timeline):
            if picture is not None:
                plot.check_picture(Path(picture))
        if arguments.csv is not None:
            rows.check_file(Path(arguments.csv))
    launched = environment.world_size
    if launched is not None and arguments.ranks not in (None, launched):
        raise ConfigError(f"--ranks {arguments.ranks}, but the launcher started {launched} ranks.")
    settings = settings_of(arguments, launched or gpus or 4, interpreting=runtime.INTERPRETING)
    if launched is not None:
        run_rank(settings)
    elif gpus and settings.ranks > gpus:
        skip_all(settings, f"needs {settings.ranks} GPUs, there are {gpus}")
    else:
        run_ranks(run_rank, settings.ranks, settings)
    return 0


def settings_of(arguments: argparse.Namespace, ranks: int, *, interpreting: bool) -> bench.Settings:
    """Convert the arguments to settings of a run; ranks: number of ranks unless the arguments give it.

    Raises:
        ConfigError: the settings cannot work. InputError: nor can the file of the routing.
    """
    from triton_ep.bench import routing  # imports torch

    a = arguments
    command = a.bench
    shapes = _shapes(a, interpreting)
    decode = command == "moe-layer" and a.low_latency
    few_tokens = command == "host" and a.low_latency
    low_latency = command == "low-latency" or decode or few_tokens
    if a.nodes is not None and a.local_world_size is not None:
        raise ConfigError("--nodes and --local-world-size set the same number; pass one of them.")
    ranks = ranks if a.ranks is None else a.ranks
    if ranks < 1:
        raise ConfigError(f"--ranks is {ranks}; at least 1 is needed.")
    per_node = a.local_world_size
    if a.nodes is not None:
        if a.nodes < 1 or ranks % a.nodes:
            raise ConfigError(f"{ranks} ranks cannot be shared evenly by {a.nodes} nodes.")
        per_node = ranks // a.nodes
    settings = bench.Settings(
        command=command,
        interpreting=interpreting,
        ranks=ranks,
        local_world_size=per_node,
        shapes=shapes,
        routing=a.routing,
        payloads=("mxfp8",) if command == "quantise" else bench.parse_list(a.payload, "--payload", bench.PAYLOADS),
        num_sm=bench.parse_programs(a.num_sm, "--num-sm"),
        capacities=bench.parse_list(
            a.capacity or ("static" if low_latency else "exact"), "--capacity", bench.CAPACITIES
        ),
        alignment=a.alignment,
        graph=a.graph or (low_latency and not interpreting and not few_tokens),
        local_combine=a.enable_local_combine,
        backward=command == "moe-layer" and a.backward,
        refresh_weights=command == "moe-layer" and a.refresh_weights,
        main_grad=command == "moe-layer" and a.main_grad,
        few_tokens=few_tokens,
        sm_budget=getattr(a, "sm_budget", None),
        copy_engines=getattr(a, "copy_engines", False),
        precisions=bench.parse_list(a.precision, "--precision", bench.PRECISIONS)
        if command == "moe-layer"
        else bench.PRECISIONS[:1],
        decode=decode,
        iters=a.iters if a.iters is not None else (3 if interpreting else 50),
        warmup=a.warmup if a.warmup is not None else (1 if interpreting else 5),
        providers=bench.parse_list(a.provider, "--provider", _providers_of(command)),
        seed=a.seed,
        commit=a.commit or _commit(stored=bool(a.csv or getattr(a, "out", None))),
        csv=a.csv,
        json=a.json,
        stages=a.stages,
        plot=a.plot,
        timeline=a.timeline,
    )
    settings.check()
    routing.check_file(settings)
    return settings


def _providers_of(command: str) -> tuple[str, ...]:
    return bench.MOE_PROVIDERS if command == "moe-layer" else bench.PROVIDERS


def _shapes(a: argparse.Namespace, interpreting: bool) -> tuple[bench.Shape, ...]:
    """Every combination of the sizes: as given, else of the model, else the defaults."""
    tokens = 128 if a.bench == "low-latency" or getattr(a, "low_latency", False) else 4096
    default = bench.SMALL if interpreting else {"tokens": tokens, **bench.MODELS["deepseek-v3"]}
    default = {**default, **(bench.MODELS[a.model] if a.model else {})}
    lists = {}
    for name in ("tokens", "hidden", "topk", "experts"):
        text = getattr(a, name)
        lists[name] = (default[name],) if text is None else bench.parse_numbers(text, f"--{name}")
    return tuple(
        bench.Shape(t, h, k, e, default["ffn"] if a.ffn is None else a.ffn)
        for h in lists["hidden"]
        for k in lists["topk"]
        for e in lists["experts"]
        for t in lists["tokens"]
    )


def _commit(stored: bool) -> str:
    """Commit of this checkout, or release of the installed package.

    Raises:
        ConfigError: no checkout, but rows are to be stored.
    """
    from triton_ep.bench.rows import commit_of_checkout

    commit = commit_of_checkout()
    if commit is None and stored:
        raise ConfigError("this is no git checkout: pass --commit, which stored rows need.")
    return f"release {__version__}" if commit is None else commit
