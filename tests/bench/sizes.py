"""Options that the benchmarks of an exchange have in common: its sizes."""

from __future__ import annotations

import argparse


def sizes_parser(doc: str | None, tokens: str | int = 4096) -> argparse.ArgumentParser:
    """A parser with --ranks, --tokens, --hidden, --topk and --experts; DeepSeek-V3's sizes by default.

    doc: the program's docstring. tokens: default; of its type are the tokens (a str where several are listed).
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="of one GPU each; all GPUs if left out")
    parser.add_argument("--tokens", type=type(tokens), default=tokens, help="per rank (default %(default)s)")
    for name, default, meaning in (
        ("hidden", 7168, "elements per row"),
        ("topk", 8, "experts per token"),
        ("experts", 256, "over all ranks"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default %(default)s)")
    return parser
