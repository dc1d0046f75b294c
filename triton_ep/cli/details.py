"""Sections that `triton-ep doctor --full` adds to the page: network, memory, variables, packages, checkout."""

import re
import resource
from importlib import metadata
from pathlib import Path

from triton_ep.runtime.environment import shown_variables
from triton_ep.runtime.machine import Machine

Section = dict[str, str]
_PACKAGES = re.compile(
    r"(torch|triton|numpy|nvidia-|nvshmem|cuda-|deep.ep|megatron|vllm|sglang|flashinfer|transformer.engine|mpi4py)",
    re.I,
)
_UNLIMITED = "unlimited"


def details(machine: Machine, sys_class: Path = Path("/sys/class")) -> dict[str, Section]:
    """Sections of facts by name. With GPUs, this creates a CUDA context to query free memory.

    machine: result of `inspect_machine`.
    sys_class: the Linux kernel's list of devices.
    """
    return {
        "Network": {**_adapters(sys_class / "infiniband"), **_interfaces(sys_class / "net")},
        "Memory": _memory(machine),
        "Variables": shown_variables(),
        "Packages": _packages(),
        "Sources": _sources(machine),
    }


def _read(path: Path) -> str:
    """First line of a file of the Linux kernel; "?" if reading fails, which happens in many ways for such files."""
    try:
        return path.read_text().split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError):
        return "?"


def _adapters(folder: Path) -> Section:
    """Ports of InfiniBand and RoCE adapters, which carry rows between nodes."""
    found = {}
    for port in sorted(folder.glob("*/ports/*")):
        link, rate, state = (_read(port / name) for name in ("link_layer", "rate", "state"))
        found[f"{port.parents[1].name} port {port.name}"] = f"{link}, {rate}, {state.rpartition(': ')[2].lower()}"
    return found or {"adapters": "no InfiniBand or RoCE adapter"}


def _interfaces(folder: Path) -> Section:
    """Network interfaces; rendezvous and bootstrap use one of them."""
    found = {}
    for path in sorted(folder.glob("*")):
        speed = _read(path / "speed")
        rate = f", {speed} Mbit/s" if speed.isdigit() else ""
        found[path.name] = f"{_read(path / 'operstate')}{rate}"
    return found


def _memory(machine: Machine) -> Section:
    facts = dict(re.findall(r"^(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = {
        "host": " of ".join(f"{int(facts[name]) / 2**20:.1f} GiB" for name in ("MemAvailable", "MemTotal")) + " free",
        "locked, at most": _UNLIMITED if locked == resource.RLIM_INFINITY else f"{locked / 2**20:.0f} MiB",
    }
    if machine.gpus:
        import torch

        for i in range(len(machine.gpus)):
            free, total = torch.cuda.mem_get_info(i)
            found[f"GPU {i}"] = f"{free / 2**30:.1f} GiB of {total / 2**30:.1f} GiB free"
        found["driver"] = _read(Path("/proc/driver/nvidia/version"))
    return found


def _packages() -> Section:
    found = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
    return {name: found[name] for name in sorted(found, key=str.lower) if name and _PACKAGES.match(name)}


def _sources(machine: Machine) -> Section:
    package = Path(__file__).resolve().parents[1]
    found = {"package": str(package)}
    if (package.parent / ".git").exists() and machine.torch:
        from triton_ep.bench.rows import commit_of_checkout

        found["commit"] = commit_of_checkout() or "unknown"
    return found
