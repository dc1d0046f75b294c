"""Create the Makefile's virtual environment: torch and Triton for this machine, this checkout, and later its tools.

If this machine's Python has torch, Triton and a CUDA GPU, the environment uses them and downloads nothing. Otherwise it
installs them; without an NVIDIA driver it takes torch's CPU build, a fifth of the download. `--tools` adds the packages
that the tests need, so that the first run does not wait for them. Runs on a bare Python.
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
LEAST_PYTHON = (3, 11)  # checked before reading supported.toml: tomllib needs 3.11, too
_SOURCES = ("index-url", "extra-index-url", "find-links", "no-index")
_CPU_SIZE, _CUDA_SIZE = "0.5 GB", "3 GB"  # pip's downloads of torch, Triton and their dependencies
_READY, _TOOLS = ".ready", ".tools"  # marks for the Makefile: the environment exists; its tools exist
_FOR_DEMO, _FOR_TESTS = "bench", "test"  # extras of this package
_HOST_PROBE = "import sys, torch, triton; sys.exit(not torch.cuda.is_available())"
_COMMAND = """#!{python}
import sys

from triton_ep.cli import main

sys.exit(main())
"""


def has_driver() -> bool:
    """Whether an NVIDIA driver is loaded, or nvidia-smi is installed."""
    return (
        Path("/proc/driver/nvidia/version").exists()
        or Path("/dev/nvidiactl").exists()
        or shutil.which("nvidia-smi") is not None
    )


def own_sources(pip_config: str) -> bool:
    """Whether pip is configured to use sources other than PyPI.

    pip_config: output of `pip config list`, which covers files and environment variables.
    """
    keys = (line.split("=", 1)[0].rsplit(".", 1)[-1] for line in pip_config.splitlines())
    return any(key in _SOURCES for key in keys)


def torch_requirements(torch: str, triton: str, *, driver: bool, own_index: bool) -> list[list[str]]:
    """Arguments of `pip install` for torch and Triton, in the order in which to try them.

    torch, triton: versions.
    driver: an NVIDIA driver is present, so take the index's default build, with CUDA.
    own_index: pip is configured to look elsewhere; the owner of that index has chosen the build.

    The CPU build is requested by its local version, `+cpu`, which exists only on torch's CPU index: the extra index
    cannot change any other package.
    """
    plain = [f"torch=={torch}", f"triton=={triton}"]
    if driver or own_index:
        return [plain]
    # Two tries of 15 s suffice to detect a firewall.
    cpu = ["--retries", "1", "--timeout", "15", "--extra-index-url", CPU_WHEELS, f"torch=={torch}+cpu", plain[1]]
    return [cpu, plain]


def _say(text: str) -> None:
    print(text, flush=True)


def _lend(folder: Path) -> None:
    """Create an environment that sees the packages of this Python, and this checkout."""
    _say(f"using the torch of {sys.executable}; nothing is downloaded")
    command = [sys.executable, "-m", "venv", "--clear", "--without-pip", "--system-site-packages", str(folder)]
    subprocess.run(command, check=True)
    python = folder / "bin/python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    # If this Python is itself a virtual environment, system site packages do not include torch.
    code = "import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])"
    of_torch = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    Path(site, "checkout-and-torch.pth").write_text(f"{ROOT}\n{of_torch}\n")
    program = folder / "bin/triton-ep"
    program.write_text(_COMMAND.format(python=python.absolute()))
    program.chmod(0o755)


def _pip(folder: Path) -> list[str]:
    return [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check"]


def _install_checkout(folder: Path, extra: str) -> None:
    """Install this checkout, editable, with one of its extras."""
    this = f".[{extra}]"
    _say(f"pip install -e '{this}'")
    # Python compiles modules at import; compiling every installed file takes longer than the demo.
    subprocess.run([*_pip(folder), "install", "--no-compile", "-e", this], cwd=ROOT, check=True)


def _install(folder: Path, requirements: str | None) -> None:
    """Create an environment with packages of its own."""
    begun = time.monotonic()
    driver = has_driver()
    # Report before the first slow step.
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
    """Install the packages for lint, types and tests; a lent environment keeps its machine's packages."""
    if (folder / _READY).read_text().strip() == "own":
        _install_checkout(folder, _FOR_TESTS)
    (folder / _TOOLS).touch()


def main() -> None:
    """Create the environment, and note in its `.ready` whether it is lent ("host") or its own ("own"); or add tools."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the environment")
    parser.add_argument("--torch", metavar="REQUIREMENTS", help="use these in place of the choice for this machine")
    parser.add_argument("--tools", action="store_true", help="add the packages of the tests to an existing environment")
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
