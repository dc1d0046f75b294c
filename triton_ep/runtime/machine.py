"""Facts about this machine, and what triton_ep can do with it: the basis of `doctor`.

`inspect_machine` only collects facts; `judge` decides from these facts alone, so that a test can describe any machine.
"""

import importlib.util
import os
import platform
import re
import shutil
import sys
import tomllib
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any


def version_tuple(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


SUPPORTED: dict[str, dict[str, Any]] = tomllib.loads(
    (Path(__file__).resolve().parents[1] / "supported.toml").read_text(encoding="utf-8")
)
"""triton_ep/supported.toml: the versions that this release supports."""
MIN_PYTHON = version_tuple(SUPPORTED["python"]["min"])
MIN_TORCH = version_tuple(SUPPORTED["torch"]["min"])
MIN_TRITON = version_tuple(SUPPORTED["triton"]["min"])
TESTED_TRITON = tuple(map(version_tuple, SUPPORTED["triton"]["tested"]))
TESTED_NVSHMEM = tuple(map(version_tuple, SUPPORTED["nvshmem"]["tested"]))
MIN_NUMPY, BELOW_NUMPY = (version_tuple(SUPPORTED["numpy"][name]) for name in ("min", "below"))


def nvshmem_library(major: int) -> str:
    """Requirement of the NVSHMEM library for torch of this CUDA major version."""
    return f"nvidia-nvshmem-cu{major}>={SUPPORTED['nvshmem']['min']},<{SUPPORTED['nvshmem']['below']}"


# Requirements of the extras cu12 and cu13, by the CUDA major version that torch was built for.
NVSHMEM_REQUIREMENTS = {
    12: ("nvshmem4py-cu12", nvshmem_library(12), "cuda-python<13"),
    13: ("nvshmem4py-cu13", nvshmem_library(13), "cuda-python>=13"),
}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One visible GPU. `sm` is its compute capability as in sm_90; memory in bytes."""

    name: str
    sm: int
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about this machine; versions are None where a package is not installed.

    Attributes:
        cuda: CUDA version that torch was built for, None for a CPU build.
        driver: whether an NVIDIA driver is loaded, even if torch cannot use it.
        peer_access: [n][n], whether GPU i can address the memory of GPU j.
        nvshmem: version of the NVSHMEM library package; `nvshmem_bitcode`: files of its device bitcode.
        nvshmem4py: version of the Python bindings.
        shared_memory: whether the operating system offers memfd and pidfd, which the host heap needs.
        interpret: TRITON_INTERPRET of the environment, None if unset.
        launcher: what started this process: torchrun, mpirun, srun or none.
        malformed: faults of environment variables with invalid values.
    """

    python: tuple[int, ...]
    system: str
    cores: int
    torch: str | None
    triton: str | None
    numpy: str | None
    cuda: str | None
    driver: bool
    gpus: tuple[Gpu, ...] = ()
    peer_access: tuple[tuple[bool, ...], ...] = ()
    nvshmem: str | None
    nvshmem_bitcode: tuple[str, ...] = ()
    nvshmem4py: str | None
    shared_memory: bool
    interpret: bool | None
    launcher: str
    mpirun: str | None
    torchrun: str | None
    malformed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """Something that keeps triton_ep from running here, and its remedy."""

    what: str
    remedy: str


@dataclass(frozen=True)
class Plan:
    """What a run on this machine will use, and what prevents it.

    Attributes:
        backend: symmetric heap, "nvshmem", "torch" or "host".
        transport: how rows travel inside a node and between nodes.
        execution: "interpreter" or "JIT for sm_..".
        problems: empty when the package can run here.
        hints: useful advice that prevents nothing.
    """

    backend: str
    transport: str
    execution: str
    problems: list[Problem] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)


def _version(*distributions: str) -> str | None:
    """Version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _nvshmem_bitcode() -> tuple[str, ...]:
    """Device bitcode files of the installed NVSHMEM package; its folder is found without importing it."""
    if importlib.util.find_spec("nvidia") is None or (spec := importlib.util.find_spec("nvidia.nvshmem")) is None:
        return ()
    folders = [Path(place) / "lib" for place in spec.submodule_search_locations or ()]
    return tuple(str(path) for folder in folders for path in sorted(folder.glob("libnvshmem_device*.bc")))


def _find_torchrun() -> str | None:
    """torchrun of this Python, else of the PATH, else its module."""
    beside = Path(sys.executable).parent / "torchrun"
    found = str(beside) if beside.is_file() else shutil.which("torchrun")
    if found is None and _version("torch") is not None:
        return f"{sys.executable} -m torch.distributed.run"
    return found


def inspect_machine() -> Machine:
    """Collect facts about this machine. Imports torch if installed; starts no rank and allocates nothing."""
    from triton_ep.runtime.environment import read_what_can_be

    cuda = None
    gpus: tuple[Gpu, ...] = ()
    peers: tuple[tuple[bool, ...], ...] = ()
    if importlib.util.find_spec("torch") is not None:
        import torch

        cuda = torch.version.cuda
        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            found = [torch.cuda.get_device_properties(i) for i in range(count)]
            gpus = tuple(Gpu(name=p.name, sm=10 * p.major + p.minor, memory_bytes=p.total_memory) for p in found)
            peers = tuple(
                tuple(i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)) for i in range(count)
            )
    environment, malformed = read_what_can_be()
    return Machine(
        python=sys.version_info[:3],
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)),
        torch=_version("torch"),
        triton=_version("triton"),
        numpy=_version("numpy"),
        cuda=cuda,
        driver=Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists(),
        gpus=gpus,
        peer_access=peers,
        nvshmem=_version("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"),
        nvshmem_bitcode=_nvshmem_bitcode(),
        nvshmem4py=_version("nvshmem4py-cu13", "nvshmem4py-cu12"),
        shared_memory=hasattr(os, "memfd_create") and hasattr(os, "pidfd_open"),
        interpret=environment.triton_interpret,
        launcher=environment.launcher,
        mpirun=shutil.which("mpirun"),
        torchrun=_find_torchrun(),
        malformed=tuple(malformed),
    )


def _install(*requirements: str) -> str:
    """The pip command for these requirements, quoted for a shell."""
    quoted = (f"'{text}'" if re.search(r"[<>=]", text) else text for text in requirements)
    return f"pip install {' '.join(quoted)}"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _package_problems(machine: Machine) -> list[Problem]:
    """Missing or unsupported versions of Python, torch, Triton and numpy."""
    problems = []
    if machine.python < MIN_PYTHON:
        problems.append(Problem(f"Python is {_dotted(machine.python)}", f"use Python {_dotted(MIN_PYTHON)} or later"))
    torch_and_triton = _install(f"torch>={_dotted(MIN_TORCH)}", f"triton>={_dotted(MIN_TRITON)}")
    for name, version, least in (("torch", machine.torch, MIN_TORCH), ("triton", machine.triton, MIN_TRITON)):
        if version is None:
            problems.append(Problem(f"{name} is not installed", torch_and_triton))
        elif version_tuple(version) < least:
            problems.append(Problem(f"{name} is {version}, the least is {_dotted(least)}", torch_and_triton))
    numpy = _install(f"numpy>={_dotted(MIN_NUMPY)},<{_dotted(BELOW_NUMPY)}")
    if machine.numpy is None:
        problems.append(Problem("numpy is not installed", numpy))
    elif not MIN_NUMPY <= version_tuple(machine.numpy) < BELOW_NUMPY:
        problems.append(Problem(f"numpy {machine.numpy} is outside the supported range", numpy))
    return problems


def _nvshmem_problems(machine: Machine) -> list[Problem]:
    """Missing parts of the NVSHMEM heap on a machine with GPUs."""
    major = version_tuple(machine.cuda or "13")[0]
    if major not in NVSHMEM_REQUIREMENTS:
        known = " and ".join(map(str, sorted(NVSHMEM_REQUIREMENTS)))
        return [
            Problem(f"torch was built for CUDA {machine.cuda}", f"install a torch built for CUDA {known}"),
        ]
    problems = []
    if machine.nvshmem is None:
        problems.append(
            Problem(
                "there are GPUs, but the NVSHMEM library is not installed",
                _install(nvshmem_library(major)),
            )
        )
    elif not machine.nvshmem_bitcode:
        problems.append(
            Problem(
                f"NVSHMEM {machine.nvshmem} is installed without device bitcode (libnvshmem_device*.bc)",
                _install("--force-reinstall", nvshmem_library(major)),
            )
        )
    return problems


def judge(machine: Machine) -> Plan:
    """Decide what a run on this machine uses, and collect what prevents it."""
    interpreting = machine.interpret if machine.interpret is not None else not machine.gpus
    problems = [Problem(what, "mend the variable, or unset it") for what in machine.malformed]
    problems += _package_problems(machine)
    hints = []
    if machine.triton and version_tuple(machine.triton)[:2] not in TESTED_TRITON:
        tested = ", ".join(map(_dotted, TESTED_TRITON))
        hints.append(f"Triton {machine.triton} has not been tested with this version; tested are {tested}.")
    if interpreting:
        backend, transport = "host", "shared memory; virtual nodes: the same, by the inter-node path"
        execution = "interpreter"
        if not machine.shared_memory:
            problems.append(Problem("this system lacks memfd_create or pidfd_open", "use Linux 5.3 or later"))
        if machine.gpus:
            hints.append("TRITON_INTERPRET=1 is set, so the GPUs are left alone. Unset it to use them.")
        elif machine.driver and machine.cuda is None and machine.torch:
            hints.append("There is an NVIDIA driver, but torch was built for CPUs; a CUDA build would use the GPUs.")
    else:
        sms = sorted({gpu.sm for gpu in machine.gpus})
        backend, transport = "nvshmem", "NVLink peer stores inside a node, NVSHMEM puts between nodes"
        execution = f"JIT for {', '.join(f'sm_{sm}' for sm in sms)}" if sms else "JIT"
        if not machine.gpus:
            problems.append(Problem("TRITON_INTERPRET=0 is set and there is no GPU", "unset TRITON_INTERPRET"))
        elif machine.nvshmem4py is None:
            backend, transport = "torch", "NVLink peer stores inside a node, over torch's symmetric memory; one host"
            requirements = NVSHMEM_REQUIREMENTS.get(version_tuple(machine.cuda or "13")[0], ("nvshmem4py-cu13",))
            hints.append(f"nvshmem4py is not installed: ranks of several hosts need it. {_install(*requirements)}")
        else:
            problems += _nvshmem_problems(machine)
        if machine.nvshmem and version_tuple(machine.nvshmem) not in TESTED_NVSHMEM:
            tested = ", ".join(map(_dotted, TESTED_NVSHMEM))
            hints.append(f"NVSHMEM {machine.nvshmem} has not been tested with this version; tested are {tested}.")
        if not all(all(row) for row in machine.peer_access):
            hints.append("Some GPUs cannot address each other's memory; ranks on such a pair cannot share a node.")
    return Plan(backend, transport, execution, problems, hints)
