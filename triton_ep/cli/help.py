"""Format of --help: text filled to the width of the terminal, then examples, one a line."""

import argparse
import textwrap
from collections.abc import Sequence


class _Formatter(argparse.HelpFormatter):
    """Fills paragraphs; keeps the lines of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return text
        paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))
        filled = (textwrap.fill(part, width, initial_indent=indent, subsequent_indent=indent) for part in paragraphs)
        return "\n\n".join(filled)


def describe(parser: argparse.ArgumentParser, examples: Sequence[str]) -> None:
    """Make a parser's --help end with these example commands."""
    parser.formatter_class = _Formatter
    parser.epilog = "\n".join(["examples:", *(f"  {example}" for example in examples)])
