"""Write packages that frameworks import in place of the originals: `deep_ep` over triton_ep, and expert parallelism of
TransformerEngine. Put the folder first on PYTHONPATH, so that worker processes of a framework find it too."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from triton_ep.errors import ConfigError
from triton_ep.runtime.files import cannot_write

EXAMPLES = (
    "triton-ep shim ~/triton-ep-shim",
    "triton-ep shim ~/triton-ep-shim --serve deep_ep,transformer_engine",
)
_PACKAGES = ("deep_ep", "transformer_engine")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `triton-ep shim`."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder to write to; created if missing")
    parser.add_argument(
        "--serve",
        metavar="NAMES",
        default="deep_ep",
        help="packages, separated by commas: deep_ep, transformer_engine (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the packages, and print the command that puts them first on the path."""
    names = [name.strip() for name in arguments.serve.split(",")]
    unknown = [name for name in names if name not in _PACKAGES]
    if unknown:
        raise ConfigError(f"--serve got {unknown[0]!r}; it takes {' and '.join(_PACKAGES)}.")
    for name in names:
        package = arguments.folder / name / "__init__.py"
        try:
            package.parent.mkdir(parents=True, exist_ok=True)
            package.write_text(_text_of(name))
        except OSError as error:
            raise cannot_write(package, error) from error
        print(f"wrote {package}")
    print(f"next: export PYTHONPATH={shlex.quote(str(arguments.folder.resolve()))}${{PYTHONPATH:+:$PYTHONPATH}}")
    return 0


def _text_of(name: str) -> str:
    from triton_ep.integrations.deep_ep import shim as deep_ep
    from triton_ep.integrations.te import shim as transformer_engine

    return {"deep_ep": deep_ep, "transformer_engine": transformer_engine}[name].PACKAGE
