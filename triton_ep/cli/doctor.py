"""Show what this machine has, what will be used, and what to install. Exit code 0 = triton_ep can run here."""

import argparse
import dataclasses
import json
from typing import Any

import triton_ep
from triton_ep.cli.details import Section, details
from triton_ep.errors import EPError
from triton_ep.runtime import jit_cache
from triton_ep.runtime.environment import read_what_can_be
from triton_ep.runtime.machine import SUPPORTED, Machine, Plan, Problem, inspect_machine, judge, version_tuple
from triton_ep.runtime.tuned import table as tuned_table
from triton_ep.runtime.tuned.table import TunedEntry

EXAMPLES = ("triton-ep doctor", "triton-ep doctor --full > doctor.txt", "triton-ep doctor --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `triton-ep doctor`."""
    parser.add_argument("--full", action="store_true", help="also network, variables and packages: for a report")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a page")


def run(arguments: argparse.Namespace) -> int:
    """Inspect the machine and print the findings. Returns 0 if triton_ep can run here, 1 otherwise."""
    machine = inspect_machine()
    plan = judge(machine)
    more = details(machine) if arguments.full else {}  # before the run-time sets its own variables
    heap_bytes, self_test = None, "not run: something is missing"
    tables = _tuned_tables(plan)
    if not plan.problems:
        heap_bytes, self_test = _try_runtime(plan)
    if arguments.json:
        found = as_json(machine, plan, heap_bytes, self_test, tables)
        print(json.dumps({**found, **({"details": more} if arguments.full else {})}, indent=2))
    else:
        print(page(machine, plan, heap_bytes, self_test, tables, more))
    return 1 if plan.problems else 0


def _try_runtime(plan: Plan) -> tuple[int | None, str]:
    """Load the run-time, and test the interpreter if it is used; a failure is added to the problems.

    Returns:
        Bytes of the symmetric heap in force, and the outcome of the interpreter's self-test in words.
    """
    try:
        from triton_ep.distributed import default_heap_bytes
        from triton_ep.runtime import launch as runtime

        heap_bytes = default_heap_bytes(plan.backend)
        if not runtime.INTERPRETING:
            return heap_bytes, "not needed: kernels are compiled"
        from triton_ep.runtime import interpreter

        interpreter.self_test()
    except EPError as error:
        plan.problems.append(Problem(f"the run-time does not start: {error}", "report it with this page"))
        return None, "failed"
    return heap_bytes, "passed"


def _tuned_tables(plan: Plan) -> list[tuple[str, list[TunedEntry]]]:
    """The tables that layers with num_sm=None look up, in order; an unreadable table is added to the problems."""
    try:
        return tuned_table.tables(read_what_can_be()[0])
    except EPError as error:
        plan.problems.append(Problem(str(error), "fix the table, or unset TRITON_EP_TUNED"))
        return []


def as_json(
    machine: Machine, plan: Plan, heap_bytes: int | None, self_test: str, tables: list[tuple[str, list[TunedEntry]]]
) -> dict[str, Any]:
    """All findings of `doctor` as plain JSON values."""
    facts = dataclasses.asdict(machine)
    facts["python"] = ".".join(map(str, machine.python))
    return {
        "ok": not plan.problems,
        "triton_ep": triton_ep.__version__,
        "machine": facts,
        "heap_bytes": heap_bytes,
        "interpreter_self_test": self_test,
        "tuned_tables": [{"name": name, "keys": [str(entry.key) for entry in entries]} for name, entries in tables],
        "plan": dataclasses.asdict(plan),
    }


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _tested(name: str, version: str) -> str:
    """Whether triton_ep/supported.toml lists this version as tested."""
    found = version_tuple(version)
    known = any(found[: len(tested)] == tested for tested in map(version_tuple, SUPPORTED[name]["tested"]))
    return " (tested)" if known else " (not tested)"


def _section(title: str, rows: list[tuple[str, str]]) -> list[str]:
    width = max(16, *(len(name) for name, _ in rows))
    return [title, *(f"  {name:<{width}} {value}" for name, value in rows), ""]


def page(
    machine: Machine,
    plan: Plan,
    heap_bytes: int | None,
    self_test: str,
    tables: list[tuple[str, list[TunedEntry]]],
    more: dict[str, Section],
) -> str:
    """The page as text; `more`: the sections of --full."""
    missing = "not installed"
    built = f" (CUDA {machine.cuda})" if machine.cuda else " (CPU build)"
    lines = [f"triton_ep {triton_ep.__version__}", ""]
    lines += _section(
        "Software",
        [
            ("Python", ".".join(map(str, machine.python))),
            ("system", f"{machine.system}, {machine.cores} cores"),
            ("torch", machine.torch + built + _tested("torch", machine.torch) if machine.torch else missing),
            ("triton", machine.triton + _tested("triton", machine.triton) if machine.triton else missing),
            ("numpy", machine.numpy + _tested("numpy", machine.numpy) if machine.numpy else missing),
            ("NVSHMEM", machine.nvshmem + _tested("nvshmem", machine.nvshmem) if machine.nvshmem else missing),
            ("device bitcode", ", ".join(machine.nvshmem_bitcode) or "none"),
            ("nvshmem4py", machine.nvshmem4py or missing),
        ],
    )
    gpus = [(f"GPU {i}", f"{g.name}, sm_{g.sm}, {_gib(g.memory_bytes)}") for i, g in enumerate(machine.gpus)]
    if len(machine.gpus) > 1:
        gpus.append(("peer access", "row = from, column = to"))
        gpus += [(f"  {i}", " ".join("x" if ok else "-" for ok in row)) for i, row in enumerate(machine.peer_access)]
    lines += _section("GPUs", gpus or [("none", "ranks run on the CPU")])
    lines += _section(
        "Launchers",
        [
            ("started by", machine.launcher),
            ("torchrun", machine.torchrun or "not found"),
            ("mpirun", machine.mpirun or "not found"),
        ],
    )
    lines += _section(
        "What will be used",
        [
            ("backend", plan.backend),
            ("transport", plan.transport),
            ("kernels by", plan.execution),
            *([] if plan.execution == "interpreter" else [("compiled kernels", f"kept in {jit_cache.root()}")]),
            ("symmetric heap", "unknown" if heap_bytes is None else f"{_gib(heap_bytes)} per rank"),
            ("self-test", self_test),
        ],
    )
    here = {gpu.name for gpu in machine.gpus} if plan.backend != "host" else {"cpu"}
    counts = [(name, len(entries), sum(entry.key.gpu in here for entry in entries)) for name, entries in tables]
    lines += _section(
        "Tuned tables, for layers with num_sm=None",
        [
            (f"{n}.", f"{name}: {count} entries, {mine} for this machine")
            for n, (name, count, mine) in enumerate(counts, 1)
        ],
    )
    for title, facts in more.items():
        lines += _section(title, list(facts.items()) or [("none", "")])
    lines += [f"Note: {hint}" for hint in plan.hints]
    for problem in plan.problems:
        lines += [f"Problem: {problem.what}", f"  do: {problem.remedy}"]
    if plan.problems:
        return "\n".join([*lines, "triton_ep cannot run here yet."])
    if plan.execution == "interpreter":
        lines.append(
            "On the CPU kernels are interpreted, some thousand times slower than on a GPU: to try and to test."
        )
    return "\n".join([*lines, "triton_ep can run here. Next: triton-ep demo"])
