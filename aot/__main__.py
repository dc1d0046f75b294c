"""`python -m triton_ep.aot`: build, list, verify and pack the ahead-of-time library, without GPU, driver or torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from triton_ep.aot import manifest
from triton_ep.errors import ConfigError, EPError
from triton_ep.runtime.library import Library, architectures, build_folder, default_folder

_SHOWN_ERRORS = 3


def add_arguments(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Add the arguments of all commands; returns the parser of each, by name."""
    commands = parser.add_subparsers(dest="aot_command", required=True, metavar="COMMAND")
    build = commands.add_parser("build", help="compile the variants of a manifest, a configuration or a list")
    build.add_argument("--arch", required=True, help="e.g. sm_90, or sm_90,sm_100")
    what = build.add_mutually_exclusive_group()
    what.add_argument("--manifest", type=Path, help="TOML; default: the one of the package")
    what.add_argument("--for-config", metavar="FILE", help="only what one EPConfig needs: TOML or JSON file, or JSON")
    what.add_argument("--variant", metavar="FILE", help="single variants, as AotMiss prints them, or a file of them")
    build.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; default: as many as cores")
    build.add_argument("--force", action="store_true", help="compile existing variants again")
    build.add_argument("--only", action="store_true", help="remove all other variants")
    build.add_argument("--no-nvshmem", action="store_true", help="leave out kernels that need NVSHMEM's bitcode")
    listed = commands.add_parser("list", help="list the contents of a library")
    verified = commands.add_parser("verify", help="check files, parameters, widths of stores; exit code 1 on any fault")
    wheel = commands.add_parser("wheel", help="pack a library into the wheel triton-ep-cubins")
    wheel.add_argument("--to", type=Path, default=Path("dist"), help="folder of the wheel (default %(default)s)")
    for command in (build, listed, verified, wheel):
        command.add_argument(
            "--out", type=Path, help="folder of the library; default: TRITON_EP_AOT_DIR, or the package"
        )
    return commands.choices


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen command; returns the exit code."""
    if arguments.aot_command == "build":
        return _build(arguments, arguments.out or build_folder())
    out = arguments.out or default_folder()
    if not architectures(out):
        print(f"no library in {out}", file=sys.stderr)
        return 1
    if arguments.aot_command == "list":
        return _list(out)
    if arguments.aot_command == "wheel":
        return _wheel(out, arguments.to)
    from triton_ep.aot.verify import verify

    faults, checked = verify(out)
    for fault in faults:
        print(f"FAULT {fault}")
    print(f"{checked} variants checked, {len(faults)} faults")
    return 1 if faults else 0


def _build(arguments: argparse.Namespace, out: Path) -> int:
    if arguments.jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {arguments.jobs}.")
    # Before kernels are imported: Triton reads this variable at import, and must compile them.
    os.environ["TRITON_INTERPRET"] = "0"
    from triton_ep.aot.build import build

    if arguments.for_config is not None:
        wanted = manifest.read_config(arguments.for_config)
    elif arguments.variant is not None:
        wanted = manifest.read_variants(arguments.variant)
    else:
        wanted = manifest.read_manifest(arguments.manifest or manifest.default_manifest())
    if arguments.no_nvshmem:
        wanted = [request for request in wanted if not request.calls_nvshmem]
    archs = list(dict.fromkeys(arguments.arch.split(",")))
    done = build(
        wanted, archs, out, jobs=arguments.jobs, force=arguments.force, only=arguments.only, progress=_progress
    )
    failed = False
    for summary in done:
        print(
            f"{summary.arch}: {summary.built} built, {summary.kept} kept, {summary.dropped} of older sources dropped, "
            f"{len(summary.errors)} failed; {summary.nbytes / 2**20:.1f} MiB of cubins in {summary.folder}"
        )
        for request, text in summary.errors[:_SHOWN_ERRORS]:
            print(f"{request.kernel} {request.text()} for {summary.arch}:\n{text}", file=sys.stderr)
        failed = failed or bool(summary.errors)
    return 1 if failed else 0


def _need_bitcode() -> None:
    """Raise before any compilation if NVSHMEM's device bitcode is missing, and name the remedies."""
    from triton_ep.heap.bitcode import find_bitcode

    try:
        find_bitcode()
    except EPError as error:
        raise ConfigError(
            f"{error} `pip install 'triton-ep[aot]'` installs it and a progress bar; --no-nvshmem skips such kernels."
        ) from error


def _progress(steps: Iterable[Any], total: int) -> Iterable[Any]:
    """Show a progress bar of tqdm; without tqdm, a line per tenth of the kernels."""
    if total == 0:
        return steps
    try:
        from tqdm import tqdm
    except ImportError:
        return _lines(steps, total)
    bar: Iterable[Any] = tqdm(steps, total=total, desc="compiling", unit="kernel", mininterval=1, file=sys.stderr)
    return bar


def _lines(steps: Iterable[Any], total: int) -> Iterable[Any]:
    for number, step in enumerate(steps, 1):
        yield step
        if number == total or number % max(total // 10, 1) == 0:
            print(f"compiling: {number} of {total} kernels", file=sys.stderr)


def _list(out: Path) -> int:
    for arch in architectures(out):
        library = Library(out, arch)
        versions = ", ".join(f"{name} {version}" for name, version in sorted(library.versions.items()))
        print(f"{arch}: {len(library.entries)} variants, {versions}")
        for entry in library.entries:
            request = entry.request
            what = {**request.constexprs, **request.types}
            text = " ".join(f"{name}={value}" for name, value in what.items())
            warps, nvshmem = entry.threads // 32, f" nvshmem {entry.nvshmem}" if entry.nvshmem else ""
            print(f"  {request.kernel} [{text}] {warps} warps, {entry.shared} bytes shared{nvshmem}")
    return 0


def _wheel(out: Path, to: Path) -> int:
    from triton_ep.aot.wheel import write_wheel

    path = write_wheel(out, to)
    archs = ", ".join(architectures(out))
    print(f"{path}: {archs}, {path.stat().st_size / 2**20:.1f} MiB. Install it: pip install {path}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, or 1 on any fault. Wrong usage ends the process with 2."""
    parser = argparse.ArgumentParser(prog="python -m triton_ep.aot", description=__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except EPError as error:
        print(f"triton_ep.aot: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
