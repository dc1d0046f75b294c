"""Build kernels ahead of time, list a library, verify it, pack it; the same as `python -m triton_ep.aot`."""

import argparse

from triton_ep.aot import __main__ as aot
from triton_ep.cli.help import describe

_EXAMPLES = {
    "build": (
        "triton-ep aot build --arch sm_90",
        "triton-ep aot build --arch sm_90,sm_100 --for-config layer.toml --out /opt/ep",
    ),
    "list": ("triton-ep aot list --out /opt/ep",),
    "verify": ("triton-ep aot verify --out /opt/ep",),
    "wheel": ("triton-ep aot wheel --out /opt/ep --to dist",),
}
EXAMPLES = tuple(examples[0] for examples in _EXAMPLES.values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sub-commands build, list, verify and wheel."""
    for name, command in aot.add_arguments(parser).items():
        describe(command, _EXAMPLES[name])


def run(arguments: argparse.Namespace) -> int:
    """Run the sub-command; returns the exit code."""
    return aot.run(arguments)
