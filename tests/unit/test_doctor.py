"""`triton-ep doctor`: its report on this machine, and its verdict on other machines."""

import dataclasses
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.patience import LIMIT_S
from tests.programs import run_program
from triton_ep.cli import doctor, main
from triton_ep.cli.details import details
from triton_ep.runtime.machine import NVSHMEM_REQUIREMENTS, Gpu, Machine, inspect_machine, judge, version_tuple

ROOT = Path(__file__).resolve().parents[2]
H200 = Gpu(name="NVIDIA H200", sm=90, memory_bytes=141 * 2**30)
CPU_ONLY = Machine(
    python=(3, 12, 1),
    system="Linux 6.1 x86_64",
    cores=2,
    torch="2.13.0+cpu",
    triton="3.7.1",
    numpy="2.4.0",
    cuda=None,
    driver=False,
    nvshmem=None,
    nvshmem4py=None,
    shared_memory=True,
    interpret=None,
    launcher="none",
    mpirun=None,
    torchrun="/usr/bin/torchrun",
)
EIGHT_GPUS = dataclasses.replace(
    CPU_ONLY,
    torch="2.11.0+cu130",
    triton="3.6.0",
    cuda="13.0",
    driver=True,
    gpus=(H200,) * 8,
    peer_access=((True,) * 8,) * 8,
    nvshmem="3.4.5",
    nvshmem_bitcode=("/site-packages/nvidia/nvshmem/lib/libnvshmem_device.bc",),
    nvshmem4py="0.4.1",
)


def test_cpu_machine_interprets_on_the_host_heap() -> None:
    """Without a GPU: CPU ranks over shared memory, kernels in the interpreter, nothing to install."""
    plan = judge(CPU_ONLY)
    assert (plan.backend, plan.execution, plan.problems, plan.hints) == ("host", "interpreter", [], [])


def test_gpu_machine_compiles_over_nvshmem() -> None:
    """GPUs with everything that NVSHMEM needs: compiled kernels, nothing to install."""
    plan = judge(EIGHT_GPUS)
    assert (plan.backend, plan.execution, plan.problems, plan.hints) == ("nvshmem", "JIT for sm_90", [], [])


@pytest.mark.parametrize(
    ("cuda", "command"),
    [
        ("13.0", "pip install nvshmem4py-cu13 'nvidia-nvshmem-cu13>=3.4.5,<4' 'cuda-python>=13'"),
        ("12.8", "pip install nvshmem4py-cu12 'nvidia-nvshmem-cu12>=3.4.5,<4' 'cuda-python<13'"),
    ],
)
def test_gpus_without_nvshmem4py_take_the_memory_of_torch(cuda: str, command: str) -> None:
    """One host needs only torch; the packages for several hosts are a hint."""
    plan = judge(dataclasses.replace(EIGHT_GPUS, nvshmem4py=None, nvshmem=None, cuda=cuda))
    assert (plan.backend, plan.problems) == ("torch", [])
    assert [command in hint for hint in plan.hints] == [True]


@pytest.mark.parametrize(
    ("base", "change", "command"),
    [
        (CPU_ONLY, {"torch": None}, "pip install 'torch>=2.11' 'triton>=3.6'"),
        (CPU_ONLY, {"torch": "2.10.1"}, "pip install 'torch>=2.11' 'triton>=3.6'"),
        (CPU_ONLY, {"triton": None}, "pip install 'torch>=2.11' 'triton>=3.6'"),
        (CPU_ONLY, {"triton": "3.5.1"}, "pip install 'torch>=2.11' 'triton>=3.6'"),
        (CPU_ONLY, {"numpy": None}, "pip install 'numpy>=1.26,<2.6'"),
        (CPU_ONLY, {"numpy": "1.25.2"}, "pip install 'numpy>=1.26,<2.6'"),
        (CPU_ONLY, {"numpy": "2.6.0"}, "pip install 'numpy>=1.26,<2.6'"),
        (CPU_ONLY, {"python": (3, 10, 4)}, "use Python 3.11 or later"),
        (CPU_ONLY, {"shared_memory": False}, "use Linux 5.3 or later"),
        (CPU_ONLY, {"interpret": False}, "unset TRITON_INTERPRET"),
        (EIGHT_GPUS, {"nvshmem": None}, "pip install 'nvidia-nvshmem-cu13>=3.4.5,<4'"),
        (EIGHT_GPUS, {"nvshmem_bitcode": ()}, "pip install --force-reinstall 'nvidia-nvshmem-cu13>=3.4.5,<4'"),
        (EIGHT_GPUS, {"cuda": "11.8"}, "install a torch built for CUDA 12 and 13"),
    ],
)
def test_each_lack_is_one_problem_with_its_remedy(base: Machine, change: dict[str, Any], command: str) -> None:
    """For each single missing or outdated part the page names exactly one remedy."""
    plan = judge(dataclasses.replace(base, **change))
    assert [problem.remedy for problem in plan.problems] == [command]


@pytest.mark.parametrize(
    ("base", "change", "part"),
    [
        (CPU_ONLY, {"triton": "3.8.0"}, "has not been tested"),
        (CPU_ONLY, {"driver": True}, "torch was built for CPUs"),
        (EIGHT_GPUS, {"interpret": True}, "Unset it"),
        (EIGHT_GPUS, {"nvshmem": "3.8.0"}, "NVSHMEM 3.8.0 has not been tested"),
        (EIGHT_GPUS, {"peer_access": ((True, False), (False, True))}, "cannot address each other"),
    ],
)
def test_what_stops_nothing_is_a_hint(base: Machine, change: dict[str, Any], part: str) -> None:
    """Hints do not make the exit code 1."""
    plan = judge(dataclasses.replace(base, **change))
    assert plan.problems == []
    assert [part in hint for hint in plan.hints] == [True]


def test_interpreting_on_gpus_needs_no_nvshmem() -> None:
    """TRITON_INTERPRET=1 makes a machine with GPUs a CPU machine."""
    plan = judge(dataclasses.replace(EIGHT_GPUS, interpret=True, nvshmem4py=None))
    assert (plan.backend, plan.execution, plan.problems) == ("host", "interpreter", [])


def test_versions_are_compared_as_numbers() -> None:
    """Local and development parts are left out: 2.13.0+cpu is newer than 2.9."""
    assert version_tuple("2.13.0+cpu") == (2, 13, 0) > version_tuple("2.9.1.dev3")
    assert version_tuple("unknown") == ()


def test_requirements_are_those_of_the_extras() -> None:
    """The command that doctor prints installs the requirements of the extra, as `pip install triton-ep[cu13]` does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {major: list(needs) for major, needs in NVSHMEM_REQUIREMENTS.items()} == {
        12: extras["cu12"],
        13: extras["cu13"],
    }
    plan = judge(dataclasses.replace(CPU_ONLY, torch=None, numpy=None))
    commands = " ".join(problem.remedy for problem in plan.problems)
    assert [need for need in project["dependencies"] if f"'{need}'" not in commands] == []


def test_this_machine_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    """triton_ep can run on the tests' machine; page and JSON agree on that."""
    assert main(["doctor"]) == 0
    page = capsys.readouterr().out
    assert page.rstrip().endswith("triton_ep can run here. Next: triton-ep demo")
    assert ("to try and to test" in page) == ("interpreter" in page)
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["plan"]["backend"] in page
    assert report["machine"]["torch"] == inspect_machine().torch
    assert report["heap_bytes"] > 0
    assert (report["interpreter_self_test"] == "passed") == (report["plan"]["execution"] == "interpreter")


def test_exit_code_is_1_where_something_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page names the problem and the command, and the process fails."""
    monkeypatch.setattr(doctor, "inspect_machine", lambda: dataclasses.replace(EIGHT_GPUS, nvshmem4py=None))
    assert main(["doctor"]) == 1
    page = capsys.readouterr().out
    assert "nvshmem4py-cu13" in page
    assert "cannot run here" in page
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_the_full_page_is_for_a_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The full page has network, memory, relevant variables without secrets, packages, sources; the JSON too."""
    monkeypatch.setenv("NVSHMEM_DEBUG", "WARN")
    monkeypatch.setenv("NCCL_SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("HOME_MADE", "no")
    assert main(["doctor", "--full"]) == 0
    page = capsys.readouterr().out
    for text in ("Network", "Memory", "NVSHMEM_DEBUG", "WARN", "Packages", "Sources", str(ROOT / "triton_ep")):
        assert text in page
    assert "hunter2" not in page and "HOME_MADE" not in page
    assert main(["doctor", "--full", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["details"]["Variables"]["NVSHMEM_DEBUG"] == "WARN"
    assert told["details"]["Packages"]["torch"] == told["machine"]["torch"]
    assert main(["doctor", "--json"]) == 0
    assert "details" not in json.loads(capsys.readouterr().out)


def test_the_full_page_names_the_adapters(tmp_path: Path) -> None:
    """Ports have link, rate and state; interfaces have state and, if the kernel reports it, speed."""
    port = tmp_path / "infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    for name, text in {"link_layer": "InfiniBand", "rate": "400 Gb/sec (4X NDR)", "state": "4: ACTIVE"}.items():
        (port / name).write_text(f"{text}\n")
    (tmp_path / "net/eth0").mkdir(parents=True)
    (tmp_path / "net/eth0/operstate").write_text("up\n")
    network = details(CPU_ONLY, tmp_path)["Network"]
    assert network == {"mlx5_0 port 1": "InfiniBand, 400 Gb/sec (4X NDR), active", "eth0": "up"}
    (tmp_path / "net/eth0/speed").write_text("100000\n")
    assert details(CPU_ONLY, tmp_path)["Network"]["eth0"] == "up, 100000 Mbit/s"
    assert "no InfiniBand" in details(CPU_ONLY, tmp_path / "none")["Network"]["adapters"]


def test_doctor_runs_as_a_program() -> None:
    """`python -m triton_ep.cli doctor` is the same command; wrong usage has an exit code of its own."""
    command = ["-m", "triton_ep.cli"]
    done = run_program([*command, "doctor"], imported=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "What will be used" in done.stdout
    done = run_program([*command, "surgeon"], imported=True)
    assert done.returncode == 2


def test_doctor_works_where_nothing_is_installed() -> None:
    """Without torch, Triton and numpy the page still appears, and says what to install."""
    code = """if True:
        import sys
        from importlib import metadata

        def version(name):
            raise metadata.PackageNotFoundError(name)

        metadata.version = version
        sys.modules.update(torch=None, triton=None, numpy=None)
        from triton_ep.cli import main

        sys.exit(main(["doctor"]))
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1, done.stderr
    assert "pip install 'torch>=2.11' 'triton>=3.6'" in done.stdout
    assert "pip install 'numpy>=1.26,<2.6'" in done.stdout


@pytest.mark.parametrize(
    "variable",
    ["TRITON_EP_HEAP_SIZE=x", "MASTER_PORT=x", "OMPI_COMM_WORLD_RANK=x", "TRITON_EP_AOT=maybe", "MASTER_PORT=0"],
)
def test_a_malformed_variable_is_a_problem_of_the_page(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Page and JSON still appear, with every malformed variable among the problems."""
    name, _, value = variable.partition("=")
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRITON_EP_RANKS_PER_GPU", "0")
    assert main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    problems = [problem["what"] for problem in told["plan"]["problems"]]
    assert len(problems) == 2 and not told["ok"]
    for each in (name, "TRITON_EP_RANKS_PER_GPU"):
        assert any(what.startswith(f"{each}=") for what in problems), problems
    assert told["tuned_tables"] and told["machine"]["torch"]
    assert main(["doctor"]) == 1
    page = capsys.readouterr().out
    assert f"Problem: {name}=" in page and "do: mend the variable, or unset it" in page and "Software" in page
