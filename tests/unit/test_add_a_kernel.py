"""docs/how-to/add-a-kernel.md: with its files in a copy of the checkout, a new kernel is complete."""

import re
import shutil
from pathlib import Path

import pytest

from tests.aot.library import facts_of, run_aot
from tests.programs import environment_of_programs, run_program

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "add-a-kernel.md"
_FILE = re.compile(r"^```python no-run \(the file ([\w/.]+)\)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LIST = """
from triton_ep.aot.manifest import declared_variants
print("\\n".join(one.text() for one in declared_variants() if one.kernel == "scale_rows_kernel"))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with the files of the page."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("triton_ep", "kernels", "aot", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "cubins"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    files = dict(_FILE.findall(PAGE.read_text()))
    assert [name.split("/")[0] for name in files] == ["kernels", "triton_ep", "tests"]
    for name, text in files.items():
        assert not (folder / name).exists()
        (folder / name).write_text(text)
    return folder


def _python(copy: Path, *words: str) -> str:
    """Output of a program that runs on the copy."""
    done = run_program(words, environment_of_programs() | {"PYTHONPATH": str(copy)}, copy)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.plain
def test_its_test_and_the_checks_of_style_pass(copy: Path) -> None:
    """The kernel's own test passes, and the style checks see the kernel and find no fault."""
    pytest_of_copy = ("-m", "pytest", "-v", "-p", "no:cacheprovider")
    of_kernel = ("tests/ops/test_scale_rows.py", "tests/unit/test_style.py")  # its rules cover all files
    shown = _python(copy, *pytest_of_copy, *of_kernel)
    assert len(re.findall(r"^tests/ops/test_scale_rows.py::.* PASSED", shown, re.MULTILINE)) == 7, shown
    for rule in ("kernel_files_state_their_protocols", "kernels_have_few_parameters"):
        assert re.search(rf"^tests/unit/test_style.py::test_{rule} PASSED", shown, re.MULTILINE), shown


@pytest.mark.plain
def test_it_is_built_ahead_of_time(copy: Path, tmp_path: Path) -> None:
    """Its declaration alone makes the build compile it, with wide stores and no spills."""
    listed = tmp_path / "variants"
    listed.write_text(_python(copy, "-c", _LIST))
    out = tmp_path / "library"
    done = run_aot("build", "--arch", "sm_90", "--variant", listed, "--out", out, "--jobs", "1", root=copy)
    assert done.returncode == 0, done.stderr
    (facts,) = facts_of(out)
    assert (facts["kernel"], facts["narrow"], facts["local_bytes"]) == ("scale_rows_kernel", [], 0)
    assert facts["moves_rows"] and facts["wide_stores"]
