"""Options shared by the benchmarks of an exchange: its sizes."""

from __future__ import annotations

import argparse


def sizes_parser(doc: str | None, tokens: str | int = 4096) -> argparse.ArgumentParser:
    """A parser with --ranks, --tokens, --hidden, --topk and --experts; DeepSeek-V3's sizes by default.

    doc: the program's docstring. tokens: default of --tokens, whose type it sets (a str for lists).
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="number of ranks, one GPU each (default: all GPUs)")
    parser.add_argument("--tokens", type=type(tokens), default=tokens, help="per rank (default %(default)s)")
    for name, default, meaning in (
        ("hidden", 7168, "elements per row"),
        ("topk", 8, "experts per token"),
        ("experts", 256, "over all ranks"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default %(default)s)")
    return parser
