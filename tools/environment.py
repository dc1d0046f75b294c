"""Make the Makefile's virtual environment: torch and Triton that fit this machine, and this checkout; later its tools.

A machine whose Python has torch, Triton and a CUDA GPU lends them: nothing is downloaded. Elsewhere they are installed;
where there is no NVIDIA driver, torch's build for CPUs, a fifth of the download. What the tests need comes with
`--tools`, so that a first look does not wait for it. Runs on a bare Python.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
LEAST_PYTHON = (3, 11)  # before supported.toml can be read: tomllib is as old
_SOURCES = ("index-url", "extra-index-url", "find-links", "no-index")
_CPU_SIZE, _CUDA_SIZE = "0.5 GB", "3 GB"  # torch, Triton and what they need, as pip downloads them
_READY, _TOOLS = ".ready", ".tools"  # the Makefile's marks that an environment, and its tools, are there
_FOR_DEMO, _FOR_TESTS = "bench", "test"  # extras of this package
_HOST_PROBE = "import sys, torch, triton; sys.exit(not torch.cuda.is_available())"
_COMMAND = """#!{python}
import sys

from triton_ep.cli import main

sys.exit(main())
"""


def has_driver() -> bool:
    """Whether an NVIDIA driver is loaded here, or its tool is there."""
    return (
        Path("/proc/driver/nvidia/version").exists()
        or Path("/dev/nvidiactl").exists()
        or shutil.which("nvidia-smi") is not None
    )


def own_sources(pip_config: str) -> bool:
    """Whether pip looks anywhere but on PyPI.

    pip_config: what `pip config list` prints: files and variables of the environment alike.
    """
    keys = (line.split("=", 1)[0].rsplit(".", 1)[-1] for line in pip_config.splitlines())
    return any(key in _SOURCES for key in keys)


def torch_requirements(torch: str, triton: str, *, driver: bool, own_index: bool) -> list[list[str]]:
    """Arguments of `pip install` that bring torch and Triton, in the order in which to try them.

    torch, triton: versions.
    driver: whether there is an NVIDIA driver; then the build of the index, with CUDA, is the one to take.
    own_index: pip is configured to look elsewhere; which build is there, its owner has decided.

    The build for CPUs is asked for by its local version, `+cpu`, which is on torch's index for CPUs alone: the second
    index can change no other package.
    """
    plain = [f"torch=={torch}", f"triton=={triton}"]
    if driver or own_index:
        return [plain]
    # Two tries and 15 s are enough to see that a firewall hides the index.
    cpu = ["--retries", "1", "--timeout", "15", "--extra-index-url", CPU_WHEELS, f"torch=={torch}+cpu", plain[1]]
    return [cpu, plain]


def _say(text: str) -> None:
    print(text, flush=True)


def _lend(folder: Path) -> None:
    """An environment that sees the packages of this Python, and this checkout."""
    _say(f"using the torch of {sys.executable}; nothing is downloaded")
    command = [sys.executable, "-m", "venv", "--clear", "--without-pip", "--system-site-packages", str(folder)]
    subprocess.run(command, check=True)
    python = folder / "bin/python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    # Where this Python is an environment itself, its packages are not those of the system.
    code = "import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])"
    of_torch = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    Path(site, "checkout-and-torch.pth").write_text(f"{ROOT}\n{of_torch}\n")
    program = folder / "bin/triton-ep"
    program.write_text(_COMMAND.format(python=python.absolute()))
    program.chmod(0o755)


def _pip(folder: Path) -> list[str]:
    return [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check"]


def _install_checkout(folder: Path, extra: str) -> None:
    """This checkout, editable, with one of its extras."""
    this = f".[{extra}]"
    _say(f"pip install -e '{this}'")
    # Python compiles what it imports; compiling all that pip unpacks takes longer than the demo.
    subprocess.run([*_pip(folder), "install", "--no-compile", "-e", this], cwd=ROOT, check=True)


def _install(folder: Path, requirements: str | None) -> None:
    """An environment of its own."""
    begun = time.monotonic()
    driver = has_driver()
    # Said before anything that takes a second.
    if requirements:
        _say(f"creating {folder} with {requirements}, as TORCH says")
    elif driver:
        _say(f"creating {folder}: there is an NVIDIA driver, so torch with CUDA; pip downloads about {_CUDA_SIZE}")
    else:
        _say(
            f"creating {folder}: no NVIDIA driver, so torch for CPUs; pip downloads about {_CPU_SIZE} "
            f"(or {_CUDA_SIZE} where its index has torch with CUDA only). Others: make TORCH='torch==... triton==...'"
        )
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if requirements:
        tries = [requirements.split()]
    else:
        import tomllib

        supported = tomllib.loads((ROOT / "triton_ep/supported.toml").read_text(encoding="utf-8"))
        config = subprocess.run([*_pip(folder), "config", "list"], check=True, capture_output=True, text=True).stdout
        tries = torch_requirements(
            supported["torch"]["make"], supported["triton"]["make"], driver=driver, own_index=own_sources(config)
        )
    for number, arguments in enumerate(tries, 1):
        _say(f"pip install {' '.join(arguments)}")
        done = subprocess.run([*_pip(folder), "install", "--no-compile", *arguments], check=False)
        if done.returncode == 0:
            break
        if number == len(tries):
            sys.exit(done.returncode)
        _say(f"torch's index of CPU wheels did not answer; next its build on PyPI, {_CUDA_SIZE}")
    _install_checkout(folder, _FOR_DEMO)
    _say(f"{folder} is ready after {time.monotonic() - begun:.0f} s")


def _add_tools(folder: Path) -> None:
    """What lint, types and tests need; a lent environment has what its machine has."""
    if (folder / _READY).read_text().strip() == "own":
        _install_checkout(folder, _FOR_TESTS)
    (folder / _TOOLS).touch()


def main() -> None:
    """Make the environment, and note in its `.ready` whether it is lent ("host") or its own ("own"); or add tools."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the environment")
    parser.add_argument("--torch", metavar="REQUIREMENTS", help="in place of the choice by what this machine has")
    parser.add_argument("--tools", action="store_true", help="add what the tests need to the environment that is there")
    arguments = parser.parse_args()
    if arguments.tools:
        _add_tools(arguments.folder)
        return
    _say(f"looking whether {sys.executable} has torch, Triton and a GPU")
    probe = subprocess.run([sys.executable, "-c", _HOST_PROBE], check=False, capture_output=True)
    if probe.returncode == 0 and not arguments.torch:
        _lend(arguments.folder)
        kind = "host"
    else:
        _install(arguments.folder, arguments.torch)
        kind = "own"
    (arguments.folder / _READY).write_text(f"{kind}\n")


if __name__ == "__main__":
    if sys.version_info < LEAST_PYTHON:
        least = ".".join(map(str, LEAST_PYTHON))
        sys.exit(f"{sys.executable} is older than {least}; name a newer one: make PYTHON=python3.12 ...")
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{os.path.basename(str(error.cmd[0]))} failed with exit code {error.returncode}: {error.cmd}")
