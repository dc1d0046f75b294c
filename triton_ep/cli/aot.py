"""triton-ep aot: build the ahead-of-time library, list it, verify it; the same as `python -m triton_ep.aot`."""

import argparse

from triton_ep.aot import __main__ as aot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sub-commands build, list and verify."""
    aot.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the sub-command; returns the exit code."""
    return aot.run(arguments)
