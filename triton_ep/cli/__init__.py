"""The command line: `triton-ep doctor` shows what this machine can run, `demo` runs a small MoE layer, `bench`
measures, `tune` finds the fastest settings, `memory` computes the size of buffers, `shim` writes packages for
frameworks to import, `aot` builds kernels ahead of time, `completion` sets up shell completion."""

import argparse
import sys
from collections.abc import Sequence

from triton_ep import __version__
from triton_ep.errors import EPError

_NEEDED = ("torch", "triton", "numpy")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command.

    Args:
        argv: arguments after the program's name; None = the arguments of this process.

    Returns:
        Exit code: 0 = success, 1 = the sub-command found a problem or failed. Wrong usage ends the process with 2, as
        argparse does.
    """
    from triton_ep.cli.completion import complete

    parser = make_parser()
    complete(parser)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except EPError as error:
        print(f"triton-ep {arguments.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        print(
            f"triton-ep {arguments.command}: {error.name} is not installed here ({sys.executable}). `triton-ep doctor` "
            "shows what is missing, and how to install it.",
            file=sys.stderr,
        )
        return 1


def make_parser() -> argparse.ArgumentParser:
    """Parser of all sub-commands; each module adds its options, and its EXAMPLES to the end of its --help."""
    from triton_ep.cli import aot, bench, completion, demo, doctor, memory, shim, tune
    from triton_ep.cli.help import describe

    parser = argparse.ArgumentParser(prog="triton-ep", description="Expert parallelism in Triton.")
    describe(parser, ("triton-ep doctor", "triton-ep demo", "triton-ep bench roundtrip --help"))
    parser.add_argument("--version", action="version", version=f"triton-ep {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module, name, help_text in (
        (doctor, "doctor", "what this machine has, what will be used, what to install"),
        (demo, "demo", "a small MoE layer over several ranks, compared with a dense computation"),
        (bench, "bench", "times of dispatch, combine and related calls, compared with other providers"),
        (tune, "tune", "find the fastest num_sm and kernel settings for this machine and a shape"),
        (memory, "memory", "symmetric memory of an exchange, and the heap size to pass; computed without a GPU"),
        (shim, "shim", "write a package deep_ep that frameworks and their worker processes import"),
        (aot, "aot", "build kernels ahead of time, list and verify them"),
        (completion, "completion", "print a script that makes a shell complete commands and options"),
    ):
        command = commands.add_parser(name, help=help_text, description=module.__doc__)
        module.add_arguments(command)
        describe(command, module.EXAMPLES)
        command.set_defaults(run=module.run)
    return parser
