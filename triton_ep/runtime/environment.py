"""The environment variables of triton_ep, read only here.

All are optional. Launchers set theirs:

    torchrun    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
                TORCHELASTIC_USE_AGENT_STORE; or any other launcher of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    mpirun      OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}, PMIX_NAMESPACE; or PMI_RANK, PMI_SIZE,
                MPI_LOCALRANKID, MPI_LOCALNRANKS (MPICH, Intel MPI)
    srun        SLURM_STEP_ID, SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE

and these override a default:

    TRITON_INTERPRET                  1 interprets kernels on CPU ranks, 0 compiles them
    TRITON_EP_HEAP                    symmetric heap of GPU ranks if the program names none: nvshmem, torch
    TRITON_EP_HEAP_SIZE               bytes of the symmetric heap per rank; suffixes K, M, G (powers of 1024)
    NVSHMEM_SYMMETRIC_SIZE            the same, under NVSHMEM's name; TRITON_EP_HEAP_SIZE wins
    TRITON_EP_RANKS_PER_GPU           most ranks that may share a GPU, in time slices; unset: 1. For tests
    TRITON_EP_AOT                     1: all kernels, of layers and others, come from the ahead-of-time library;
                                      prefer: those that it has; 0: only in layers that request it
    TRITON_EP_AOT_DIR                 folder of the ahead-of-time library
    TRITON_EP_JIT_CACHE               0: keep no compiled kernels for later processes, and use none of earlier ones
    TRITON_EP_NVTX                    1: calls of a layer are NVTX ranges, for Nsight Systems
    TRITON_EP_TUNED                   path of a table of tuned settings, which precedes those of the package
    NVTE_BACKWARD_OVERRIDE            default of `backward_override` of MXFP8 recipes (triton_ep.integrations.te)
    MASTER_ADDR, MASTER_PORT          where rank 0 listens, for jobs over several hosts without torchrun
    TRITON_*, LLVM_*, MLIR_* ...      Triton's own; cached kernels are valid for the same settings (CompilerSettings)
    NVSHMEM_*                         NVSHMEM's own; heap/nvshmem.py sets defaults for a few that are unset
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton_ep.errors import ConfigError

_SLURM_OWN_STEPS = 0xFFFFFFF0  # from here on: steps that srun did not start, such as the shell of an salloc
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SHOWN = (
    "TRITON_",
    "NVSHMEM_",
    "NCCL_",
    "GLOO_",
    "UCX_",
    "FI_",
    "CUDA_",
    "OMP_",
    "MASTER_",
    "PYTORCH_",
    "TORCH_",
    "NVTE_",
)
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")
_OF_TRITON = ("TRITON_", "LLVM_", "MLIR_", "NVPTX_", "PTXAS_", "DISABLE_", "ALLOW_LHS_", "USE_IR_LOC")
"""Prefixes of the variables that may change what Triton's compiler generates."""
_NOT_OF_CODE = ("TRITON_EP_", "TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_INTERPRET", "TRITON_LIBCUDA_PATH")
_WATCHING = (
    "TRITON_ALWAYS_COMPILE",
    "TRITON_CACHE_MANAGER",
    "TRITON_DEBUG",
    "TRITON_DUMP_PTXAS_LOG",
    "TRITON_FRONT_END_DEBUGGING",
    "TRITON_INSTRUMENTATION_MODE",
    "TRITON_KERNEL_DUMP",
    "TRITON_KERNEL_OVERRIDE",
    "TRITON_OVERRIDE_ARCH",
    "TRITON_PLUGIN_PATHS",
    "TRITON_REMOTE_CACHE_BACKEND",
    "TRITON_REPRODUCER_PATH",
    "LLVM_ENABLE_TIMING",
    "LLVM_IR_ENABLE_DUMP",
    "MLIR_DUMP_PATH",
    "MLIR_ENABLE_DUMP",
    "MLIR_ENABLE_TIMING",
    "NVPTX_ENABLE_DUMP",
)
"""Variables with which a user watches a compilation or replaces its result."""
_OFF = ("", "0", "false", "off", "n", "no")
MOST_BYTES = 2**46
"""Largest symmetric heap: half of the address space of a process."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Settings of this process from the environment; None = not set.

    Attributes:
        triton_interpret: TRITON_INTERPRET as a truth value.
        launcher: "torchrun", "mpirun", "srun" or "none".
        rank, world_size, local_rank, local_size: this process in its job, and on its host.
        job: a name that all processes of this job share and no other running job has.
        master_addr, master_port: where the ranks meet.
        agent_listens: a process of the launcher listens there; otherwise rank 0 has to.
        heap: name of the symmetric heap of GPU ranks.
        heap_bytes: bytes of the symmetric heap per rank.
        ranks_per_gpu: most ranks that may share a GPU.
        nvshmem: NVSHMEM's own variables that are set.
        tuned: path of a table of tuned settings.
        backward_override: NVTE_BACKWARD_OVERRIDE, which recipes check.
        aot: "require", "prefer" or None: whether kernels come from the ahead-of-time library.
        aot_dir: folder of the ahead-of-time library.
        jit_cache: whether kernels that the JIT compiles are kept for later processes.
        nvtx: whether calls of a layer are NVTX ranges.
    """

    triton_interpret: bool | None = None
    launcher: str = "none"
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    job: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    agent_listens: bool = False
    heap: str | None = None
    heap_bytes: int | None = None
    ranks_per_gpu: int = 1
    nvshmem: tuple[str, ...] = ()
    tuned: str | None = None
    backward_override: str | None = None
    aot: str | None = None
    aot_dir: str | None = None
    jit_cache: bool = True
    nvtx: bool = False


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the environment of this process, or `variables` instead.

    Raises:
        ConfigError: a variable has an invalid value.
    """
    env = os.environ if variables is None else variables
    size = next((name for name in ("TRITON_EP_HEAP_SIZE", "NVSHMEM_SYMMETRIC_SIZE") if env.get(name)), None)
    port = _integer(env, "MASTER_PORT")
    if port is not None and not 0 < port < 2**16:
        raise ConfigError(f"MASTER_PORT={port} in the environment is no port: 1 to {2**16 - 1}.")
    ranks_per_gpu = _integer(env, "TRITON_EP_RANKS_PER_GPU")
    if ranks_per_gpu is not None and ranks_per_gpu < 1:
        raise ConfigError(f"TRITON_EP_RANKS_PER_GPU={ranks_per_gpu} in the environment; a GPU takes at least 1 rank.")
    return Environment(
        triton_interpret=_truth(env, "TRITON_INTERPRET"),
        master_addr=env.get("MASTER_ADDR") or None,
        master_port=port,
        agent_listens=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        heap=_heap(env),
        heap_bytes=parse_bytes(size, env[size]) if size else None,
        ranks_per_gpu=ranks_per_gpu or 1,
        nvshmem=tuple(sorted(name for name in env if name.startswith("NVSHMEM_"))),
        tuned=env.get("TRITON_EP_TUNED") or None,
        backward_override=env.get("NVTE_BACKWARD_OVERRIDE") or None,
        aot=_aot(env),
        aot_dir=env.get("TRITON_EP_AOT_DIR") or None,
        jit_cache=_truth(env, "TRITON_EP_JIT_CACHE") is not False,
        nvtx=_truth(env, "TRITON_EP_NVTX") or False,
        **_read_launcher(env),
    )


@dataclass(frozen=True)
class CompilerSettings:
    """Settings of Triton's compiler from the environment.

    Attributes:
        cache: folder of Triton's compiled kernels.
        deciding: variables that may change the generated code, with their values; for a path also the file's size and
            time.
        watched: the user watches compilations or replaces their results, so no compilation may be skipped.
    """

    cache: Path
    deciding: tuple[tuple[str, ...], ...]
    watched: bool


def read_compiler_settings(variables: Mapping[str, str] | None = None) -> CompilerSettings:
    """Read the settings that Triton's compiler would read, without loading Triton."""
    env = os.environ if variables is None else variables
    home = Path(env.get("TRITON_HOME") or os.path.expanduser("~"))
    names = [name for name in sorted(env) if name.startswith(_OF_TRITON) and not name.startswith(_NOT_OF_CODE)]
    return CompilerSettings(
        cache=Path(env.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"),
        deciding=tuple((name, env[name], *_state_of_file(env[name])) for name in names),
        watched=any(env.get(name, "").strip().lower() not in _OFF for name in _WATCHING),
    )


def _state_of_file(path: str) -> tuple[str, ...]:
    if not os.path.isfile(path):
        return ()
    found = os.stat(path)
    return (str(found.st_size), str(found.st_mtime_ns))


def shown_variables(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that affect a run, for a problem report. Filtered by name, so that no key or token is included."""
    env = os.environ if variables is None else variables
    return {name: env[name] for name in sorted(env) if name.startswith(_SHOWN) and not _SECRET.search(name)}


def read_what_can_be(variables: Mapping[str, str] | None = None) -> tuple[Environment, list[str]]:
    """`read_environment` without the variables that have invalid values, and the fault of each of these.

    For `triton-ep doctor`, which reports all faults at once.
    """
    env, faults = dict(os.environ if variables is None else variables), list[str]()
    while True:
        try:
            return read_environment(env), faults
        except ConfigError as error:
            faults.append(str(error))
            # Every error names its variable first.
            named = [found for found in re.findall(r"\w+", str(error)) if found in env]
            if not named:
                return Environment(), faults
            del env[named[0]]


def set_defaults(defaults: Mapping[str, str]) -> None:
    """Set the variables that the user has not set, for a library that reads them in this process.

    For NVSHMEM, which has no other interface for its settings.
    """
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def parse_bytes(name: str, text: str) -> int:
    """Bytes of "2G", "512M", "1073741824"; `name` names the value in the error.

    Raises:
        ConfigError: `text` is not a size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE)
    size = float(found[1]) * _UNITS[found[2].lower()] if found else 0.0
    if size < 1:
        raise ConfigError(f"{name}={_short(text)!r} is no size in bytes. Write a number, or one with K, M, G or T: 2G.")
    if size > MOST_BYTES:
        raise ConfigError(f"{name}={_short(text)!r} is more than a symmetric heap may have, {MOST_BYTES} bytes (64T).")
    return int(size)


def as_integer(name: str, value: Any, least: int = 1) -> int:
    """Convert an integer, also of numpy or a one-element tensor, to int.

    Raises:
        ConfigError: `value` is no integer, or below `least`.
    """
    try:
        number = operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # also from tensors without data
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}.")
    return number


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}... ({len(text)} characters)"


def _read_launcher(env: Mapping[str, str]) -> dict[str, Any]:
    """Fields of Environment that the launcher sets. The innermost launcher wins, such as mpirun inside sbatch."""
    if "RANK" in env and ("LOCAL_RANK" in env or {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(env)):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return _launcher(env, "torchrun", names, "TORCHELASTIC_RUN_ID")
    if "OMPI_COMM_WORLD_RANK" in env:
        ompi = tuple(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
        job = "PMIX_NAMESPACE" if "PMIX_NAMESPACE" in env else "OMPI_MCA_ess_base_jobid"
        return _launcher(env, "mpirun", ompi, job)
    # If srun started the daemons of an mpirun, PMI_* describe the rank and SLURM_* its daemon.
    in_daemon = "PMI_RANK" in env and env.get("PMI_SIZE") != env.get("SLURM_STEP_NUM_TASKS")
    step = _integer(env, "SLURM_STEP_ID")  # the script of sbatch has none
    if "SLURM_PROCID" in env and step is not None and step < _SLURM_OWN_STEPS and not in_daemon:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
        fields = _launcher(env, "srun", names, "SLURM_JOB_ID")
        per_node = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
        fields["local_size"] = int(per_node[0]) if per_node else None
        fields["job"] = f"{fields['job']}.{step}"
        return fields
    if "PMI_RANK" in env:
        return _launcher(env, "mpirun", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), "")
    return {}


def _launcher(env: Mapping[str, str], launcher: str, names: tuple[str, ...], job: str) -> dict[str, Any]:
    rank, world_size, local_rank, local_size = (_integer(env, name) for name in names)
    if rank is None or world_size is None:
        raise ConfigError(f"{launcher} set {names[0]} but not {names[1]}: start the program by {launcher} itself.")
    return {
        "launcher": launcher,
        "rank": rank,
        "world_size": world_size,
        "local_rank": local_rank,
        "local_size": local_size,
        # The parent is the launcher's daemon, which is different for every job.
        "job": env.get(job) or f"parent{os.getppid()}",
    }


def _heap(env: Mapping[str, str]) -> str | None:
    name = env.get("TRITON_EP_HEAP") or None
    if name not in (None, "nvshmem", "torch"):
        raise ConfigError(f"TRITON_EP_HEAP={_short(str(name))!r} in the environment is neither nvshmem nor torch.")
    return name


def _integer(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={_short(text)!r} in the environment is no integer.") from None


def _aot(env: Mapping[str, str]) -> str | None:
    if env.get("TRITON_EP_AOT", "").strip().lower() == "prefer":
        return "prefer"
    try:
        return "require" if _truth(env, "TRITON_EP_AOT") else None
    except ConfigError:
        raise ConfigError(
            f"TRITON_EP_AOT={env['TRITON_EP_AOT']!r} in the environment is none of 1, 0, prefer."
        ) from None


def _truth(env: Mapping[str, str], name: str) -> bool | None:
    text = env.get(name, "").strip().lower()
    if text in ("1", "true", "on", "y", "yes"):
        return True
    if text in ("0", "false", "off", "n", "no"):
        return False
    if text:
        raise ConfigError(f"{name}={text!r} in the environment is neither 1 nor 0.")
    return None
