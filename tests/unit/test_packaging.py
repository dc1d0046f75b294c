"""The package map: wheel, editable install and bare checkout all provide `triton_ep.kernels`, and nothing else.

No test here needs a network: the wheel is built with the installed setuptools.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.patience import LIMIT_S
from tests.programs import environment_of_programs, run_program

ROOT = Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
WHERE = "import triton_ep, triton_ep.kernels as k, triton_ep.aot as a; print(k.__file__, a.__file__, sep='\\n')"


def _run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Output of a command that must succeed; `environment` is its whole environment."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that the build reads: building in place would leave files and find stale ones."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in ("triton_ep", "kernels", "aot"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as it would be published."""
    out = tmp_path_factory.mktemp("wheel")
    _run(*PIP, "wheel", "--no-index", "--no-build-isolation", "--no-deps", "-w", out, checkout, cwd=out)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the wheel is installed."""
    target = tmp_path_factory.mktemp("installed") / "site"
    _run(*PIP, "install", "--no-index", "--no-deps", "--target", target, wheel, cwd=target.parent)
    return target


def _sources() -> set[str]:
    """Every module of the source tree, by its path in the wheel."""
    installed = {"triton_ep": "triton_ep", "kernels": "triton_ep/kernels", "aot": "triton_ep/aot"}
    return {
        f"{target}/{path.relative_to(ROOT / folder)}"
        for folder, target in installed.items()
        for path in (ROOT / folder).rglob("*.py")
    }


def test_package_list_is_complete() -> None:
    """The explicit list in pyproject.toml names each folder with an __init__.py."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {name.removesuffix("/__init__.py").replace("/", ".") for name in _sources() if "__init__" in name}
    assert sorted(listed) == sorted(there)


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """Every path of the wheel starts with triton_ep/ or is metadata, and no module is left out."""
    names = zipfile.ZipFile(wheel).namelist()
    assert [n for n in names if not n.startswith("triton_ep/") and ".dist-info/" not in n] == []
    assert {n for n in names if n.endswith(".py")} == _sources()
    assert "triton_ep/py.typed" in names
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_installed_wheel_imports_its_own_kernels(site: Path, tmp_path: Path) -> None:
    """The installed files are imported, and no top-level `kernels` or `aot` appears."""
    code = f"{WHERE}; import importlib.util as u; print(u.find_spec('kernels'), u.find_spec('aot'))"
    lines = _run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(site)).split("\n")
    assert lines[:3] == [
        str(site / "triton_ep/kernels/__init__.py"),
        str(site / "triton_ep/aot/__init__.py"),
        "None None",
    ]
    assert (site / "bin/triton-ep").is_file()


def test_the_readmes_program_runs_from_the_wheel(site: Path, tmp_path: Path) -> None:
    """Outside any checkout: 4 CPU ranks, kernels from the wheel, every token returns."""
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    where = "import triton_ep.kernels\nassert triton_ep.kernels.__file__.startswith(sys.path[1])\n"
    (tmp_path / "first.py").write_text(f"import sys\n{where}{program}")
    environment = environment_of_programs() | {"PYTHONPATH": str(site)}
    done = run_program([tmp_path / "first.py"], environment, tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert sorted(re.findall(r"rank (\d): \d+ rows came, 32 tokens are back", done.stdout)) == ["0", "1", "2", "3"]


def test_editable_install_imports_the_checkout(checkout: Path, tmp_path: Path) -> None:
    """`pip install -e .` maps the two folders into triton_ep."""
    home = tmp_path / "venv"
    venv.create(home, system_site_packages=True, symlinks=True)
    python = home / "bin/python"
    purelib = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    # This Python may be a virtual environment itself: let the new one use its setuptools.
    Path(purelib, "host.pth").write_text(sysconfig.get_path("purelib") + "\n")
    options = ["--no-index", "--no-build-isolation", "--no-deps"]
    _run(*PIP, "--python", python, "install", *options, "-e", checkout, cwd=tmp_path)
    assert _run(python, "-c", WHERE, cwd=tmp_path).split() == [
        str(checkout / "kernels/__init__.py"),
        str(checkout / "aot/__init__.py"),
    ]


def test_a_build_fills_a_folder_of_the_checkout(checkout: Path, tmp_path: Path) -> None:
    """`make aot` writes into a folder that .gitignore lists and a layer searches."""
    code = "from triton_ep.runtime.library import build_folder, default_folder; print(build_folder(), default_folder())"
    folders = _run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(checkout)).split()
    assert folders == [str(checkout / "aot/cubins")] * 2
    assert "/aot/cubins/" in (ROOT / ".gitignore").read_text().splitlines()


VARIANT = json.dumps(
    {
        "kernel": "barrier_kernel",
        "constexprs": {"EPOCH": 2, "FLAG_BUFFER": 9, "LWP": 2, "NETWORK": 0, "SAME_NODE_ONLY": False, "WP": 2},
    }
)
BUILD_AND_PACK = """
import sys
from pathlib import Path
from triton_ep.aot.__main__ import main
library, variant, *folders = sys.argv[1:]
built = main(["build", "--arch", "sm_90", "--variant", variant, "--out", library])
print("packed:")
packed = [main(["wheel", "--out", library, "--to", folder]) for folder in folders]
next(Path(library).glob("sm_90/*.cubin")).write_bytes(b"")
sys.stderr = sys.stdout
print("refused:", main(["wheel", "--out", library]))
sys.exit(built or any(packed))
"""
FIND = """
import triton_ep
from triton_ep.aot.verify import verify
from triton_ep.runtime.cubins import choose
from triton_ep.runtime.library import default_folder
folder = default_folder()
library = choose("require", None, lambda: "sm_90").compiled.library
print(folder, [entry.request.kernel for entry in library.entries], verify(folder), sep="\\n")
"""


def test_the_wheel_of_cubins_is_found(site: Path, tmp_path: Path) -> None:
    """Cubins built by an installed package pack twice to the same bytes, install next to it, are found and verify."""
    target, library = tmp_path / "site", tmp_path / "library"
    shutil.copytree(site, target)
    environment = {"PYTHONPATH": str(target), "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PATH": os.environ["PATH"]}
    program = [sys.executable, "-c", BUILD_AND_PACK, library, VARIANT, "one", "two"]
    *packed, refused = _run(*program, cwd=tmp_path, **environment).split("packed:\n")[1].split("\n", 2)
    for to, said in zip(("one", "two"), packed, strict=True):
        assert said.startswith(f"{to}/triton_ep_cubins-") and "sm_90" in said
    (path,) = tmp_path.glob("one/*.whl")
    assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    _run(*PIP, "install", "--no-index", "--no-deps", "--target", target, path, cwd=tmp_path)
    folder, kernels, verdict = _run(sys.executable, "-c", FIND, cwd=tmp_path, **environment).splitlines()
    assert folder == str(target / "triton_ep_cubins/cubins")
    assert (kernels, verdict) == ("['barrier_kernel']", "([], 1)")
    metadata = next(target.glob("triton_ep_cubins-*.dist-info")).joinpath("METADATA").read_text()
    assert re.search(r"^Requires-Dist: triton-ep==\d", metadata, re.MULTILINE)
    assert "is not packed" in refused and refused.endswith("refused: 1\n")


def test_bare_checkout_imports_its_own_kernels(checkout: Path, tmp_path: Path) -> None:
    """Without an installation the checkout's root on sys.path is enough."""
    assert _run(sys.executable, "-c", WHERE, cwd=tmp_path, PYTHONPATH=str(checkout)).split() == [
        str(checkout / "kernels/__init__.py"),
        str(checkout / "aot/__init__.py"),
    ]
