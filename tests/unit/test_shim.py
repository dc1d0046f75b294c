"""Packages under other names for unmodified processes: written by `triton-ep shim`, as a wheel, by plugins."""

import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import triton_ep
from tests.programs import run_program
from triton_ep.cli import main
from triton_ep.integrations.deep_ep import shim

ROOT = Path(__file__).resolve().parents[2]

_WORKER = """
import sys

from deep_ep import Buffer, ElasticBuffer
from deep_ep.buffers.ep import EPBuffer, EPHandle
import deep_ep.buffers.elastic
from deep_ep.utils.event import EventOverlap
import transformer_engine
from transformer_engine.pytorch import ep
from transformer_engine.pytorch import installed
from transformer_engine.pytorch.ep import _ep_combine_raw, _ep_dispatch_raw, ep_prepare, is_symm_backed, symm_mem_alloc

assert Buffer.__module__ == "triton_ep.integrations.deep_ep.buffer"
assert deep_ep.buffers.elastic.ElasticBuffer is ElasticBuffer
assert (transformer_engine.answer, installed) == (42, True)
assert ep.__name__ == "triton_ep.integrations.te.ep"
assert transformer_engine.__file__.endswith("real/transformer_engine/__init__.py")

import torch.distributed as dist

import triton_ep.distributed

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert not triton_ep.distributed.is_initialized()
buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=4, hidden=8)  # joins the job
assert triton_ep.distributed.is_initialized()
buffer.destroy()
triton_ep.distributed.finalize_distributed()
dist.destroy_process_group()
print("served")
"""

_WITHOUT = """
try:
    import transformer_engine
except ImportError as error:
    print(error)
"""

_PLUGIN = """
from triton_ep.integrations.deep_ep import shim

shim.register()
import deep_ep

print(deep_ep.__name__)
"""
_PLUGIN_OF_VLLM = """
import sys
from triton_ep.integrations.vllm import backend

assert "triton" not in sys.modules
if "early" in sys.argv:
    import triton
backend.register()
assert ("deep_ep" in sys.modules) == ("early" not in sys.argv)
print("registered")
"""


def _python(program: str, *path: Path) -> str:
    environment = {"PYTHONPATH": ":".join(map(str, (*path, ROOT))), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = run_program(["-c", program], environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_folder_on_the_path_serves_both_packages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Modules are this package's, the installed TransformerEngine stays, and a buffer joins the job automatically."""
    written, real = tmp_path / "shim", tmp_path / "real"
    assert main(["shim", str(written), "--serve", "deep_ep,transformer_engine"]) == 0
    assert f"export PYTHONPATH={written}" in capsys.readouterr().out
    package = real / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("answer = 42\nfrom transformer_engine import pytorch\n")
    (package / "__init__.py").write_text("installed = True\n")
    assert _python(_WORKER, written, real).splitlines()[-1] == "served"
    assert "transformer_engine is not installed beside" in _python(_WITHOUT, written)
    assert main(["shim", str(written), "--serve", "deepep"]) == 1
    assert "--serve got 'deepep'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path through a file ends with its name and a remedy, not with a traceback."""
    (tmp_path / "file").write_text("")
    assert main(["shim", str(tmp_path / "file" / "shim")]) == 1
    told = capsys.readouterr().err
    assert "InputError" in told and f"{tmp_path}/file/shim/deep_ep/__init__.py cannot be written" in told
    assert "Name another path" in told


def test_plugins_give_way_to_an_installed_deep_ep(tmp_path: Path) -> None:
    """With DeepEP's own package on the path plugins change nothing; without it they serve this package's."""
    (tmp_path / "deep_ep.py").write_text("")
    assert _python(_PLUGIN, tmp_path) == "deep_ep"
    assert _python(_PLUGIN) == "triton_ep.integrations.deep_ep"


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("version", ["absent", "without the names"])
def test_the_plugin_of_vllm_says_what_it_cannot_add(tmp_path: Path, version: str, early: bool) -> None:
    """vLLM ends with what a plugin raises: a name that it lacks, and a process that can run no kernel (where Triton was
    imported early, without a GPU), are warnings."""
    if version != "absent":
        for module in ("", "config/", "platforms/"):
            (tmp_path / "vllm" / module).mkdir(parents=True)
            (tmp_path / "vllm" / module / "__init__.py").write_text("current_platform = None\n")
        for module in ("compilation", "parallel"):
            (tmp_path / "vllm/config" / f"{module}.py").write_text("")
        (tmp_path / "pydantic").mkdir()
        (tmp_path / "pydantic/dataclasses.py").write_text("rebuild_dataclass = None\n")
    program = ["-c", _PLUGIN_OF_VLLM, *["early"] * early]
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = run_program(program, environment)
    assert done.returncode == 0 and done.stdout == "registered\n", done.stderr
    missing = "No module named 'pydantic'" if version == "absent" else "'All2AllBackend'"
    assert "vLLM gets no all2all backend triton_ep" in done.stderr and missing in done.stderr
    assert ("deep_ep is not provided" in done.stderr) == early


def test_wheel_and_entry_points_name_what_there_is() -> None:
    """The shim's wheel has the file that the command writes; entry points of plugins name functions."""
    folder = ROOT / "packaging/deepep-shim"
    assert (folder / "deep_ep/__init__.py").read_text() == shim.PACKAGE
    wheel = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert wheel["version"] == triton_ep.__version__
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(points) == {"vllm.general_plugins", "sglang.srt.plugins"}
    for group in points.values():
        module, function = group["triton_ep"].split(":")
        assert callable(getattr(import_module(module), function))
