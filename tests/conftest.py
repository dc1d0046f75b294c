"""Ranks for tests: options, fixtures, and the order in which tests run.

A test that needs ranks takes the fixture `run_ranks` and names its topology in the parameters `nodes` and
`ranks_per_node`. The ranks run a function at the top level of the test's module; its name starts with an
underscore, its first arguments are (rank, nodes, ranks_per_node), and it makes its own assertions.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import triton_ep.runtime.launch  # noqa: F401  before triton: decides whether kernels are interpreted or compiled
from tests.patience import LIMIT_S
from triton_ep.distributed import most_gpu_ranks
from triton_ep.testing import RankPool

# Tests start dozens of processes, each of which compiles all of torch that it imports if the environment forbids Python
# to store bytecode (container images often do). As in the Makefile.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Longest files, which run first: a process that begins one last would work alone while the others are idle.
LONG_FILES = (
    "layer/test_layer.py",
    "layer/test_life.py",
    "unit/test_examples.py",
    "layer/test_low_latency.py",
    "unit/test_docs.py",
    "aot/test_build.py",
    "unit/test_rank_pool.py",
    "layer/test_held.py",
    "layer/test_errors.py",
    "unit/test_bitcode.py",
    "unit/test_bench.py",
    "layer/test_autograd_compiled.py",
    "layer/test_autograd.py",
    "unit/test_packaging.py",
    "unit/test_distributed.py",
    "layer/test_overlap.py",
    "unit/test_imports.py",
    "layer/test_call_tags.py",
    "te/test_moe.py",
    "integrations/test_hybrid_ep.py",
    "ops/test_library.py",
    "nn/test_late_counts.py",
    "integrations/test_arguments.py",
    "nn/test_moe.py",
    "unit/test_add_a_kernel.py",
    "integrations/test_deep_ep_elastic.py",
    "layer/test_empty_ranks.py",
    "nn/test_expert_block.py",
    "aot/test_jit_cache.py",
    "nn/test_changed_weights.py",
    "mx/test_formats.py",
    "nn/test_parallel.py",
    "nn/test_compiled.py",
    "layer/test_recovery.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this suite."""
    group = parser.getgroup("triton_ep")
    group.addoption(
        "--backend",
        choices=("host", "nvshmem", "torch"),
        help="backend of the ranks of run_ranks; host by default where there is no GPU, else it must be said",
    )
    group.addoption(
        "--replays", type=int, default=500, help="replays of captured pairs on GPUs (layer/test_replays.py)"
    )
    group.addoption(
        "--sequences", type=int, default=3, help="random sequences of calls (test_random_calls, test_random_modules)"
    )
    group.addoption(
        "--chaos-seeds",
        default="",
        help='e.g. "1,2": repeat tests with ranks in the interpreter\'s chaos mode',
    )


def _world_size(item: pytest.Item) -> int:
    """Number of ranks of a test, from its parameters; 1 without them."""
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec is not None else {}
    return int(params.get("nodes", 1)) * int(params.get("ranks_per_node", 1))


def _seed_of(item: pytest.Item) -> int | None:
    """The chaos seed of a test, or None."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("chaos_seed")


def _place_of_file(item: pytest.Item) -> tuple[int, str]:
    """Place of a test's file in the order of files."""
    name = item.path.relative_to(Path(__file__).parent).as_posix()
    return LONG_FILES.index(name) if name in LONG_FILES else len(LONG_FILES), name


def _left_out(item: pytest.Item, on_gpus: bool, num_gpus: int) -> bool:
    """Whether parameters are marked `plain` and have a chaos seed, or are marked `on_gpus` and would run on CPUs."""
    if _seed_of(item) is not None and item.get_closest_marker("plain"):
        return True
    interpreted = num_gpus == 0 or ("run_ranks" in getattr(item, "fixturenames", ()) and not on_gpus)
    return interpreted and item.get_closest_marker("on_gpus") is not None


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by the hardware they need, and order them by file and world size.

    On GPUs only one pool, of one world size, runs at a time, so there the world size comes first.
    """
    num_gpus = most_gpu_ranks()
    on_gpus = config.getoption("--backend") not in (None, "host")
    for item in items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if on_gpus and "run_ranks" in getattr(item, "fixturenames", ()):
            needed = _world_size(item)
            item.add_marker("gpu" if needed == 1 else "multi_gpu")
        if needed == 0:
            item.add_marker("cpu")
        if needed > num_gpus:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} or more GPUs, there are {num_gpus}"))
    chosen = [item for item in items if not _left_out(item, on_gpus, num_gpus)]
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
        items[:] = chosen
    items.sort(key=lambda item: (_world_size(item) if on_gpus else 0, _place_of_file(item), _world_size(item)))


def pytest_collection_finish() -> None:
    """Leave what has been imported out of garbage collections, which take 4 % of the time otherwise."""
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat tests with ranks under every seed of --chaos-seeds, after a plain run."""
    text = metafunc.config.getoption("--chaos-seeds")
    plain = any(mark.name == "plain" for mark in metafunc.definition.iter_markers())
    if text and "chaos_seed" in metafunc.fixturenames and not plain:
        seeds = [None, *(int(seed) for seed in text.split(","))]
        ids = ["plain" if seed is None else f"chaos{seed}" for seed in seeds]
        metafunc.parametrize("chaos_seed", seeds, ids=ids, indirect=True)


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    """Backend of ranks: "host" (CPU, interpreter), or on GPUs the symmetric heap, "nvshmem" or "torch"."""
    return _backend(request.config.getoption("--backend"), most_gpu_ranks())


def _backend(given: str | None, num_gpus: int) -> str:
    """The backend that was given. Where there are GPUs it must be: ranks on CPUs would pass for a run on GPUs."""
    if given is None and num_gpus:
        pytest.fail(
            f"this machine has room for {num_gpus} ranks on GPUs: pass --backend nvshmem or --backend torch to run "
            "them there, or --backend host for ranks on CPUs.",
            pytrace=False,
        )
    return given or "host"


@pytest.fixture
def chaos_seed(request: pytest.FixtureRequest, backend: str) -> int | None:
    """Seed of chaos mode; None: the interpreter's usual order. `run_ranks` applies it."""
    seed = getattr(request, "param", None)
    if seed is not None and backend != "host":
        pytest.skip("compiled kernels have no chaos mode")
    return seed


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[tuple[int, str], RankPool]]:
    """The running pools, by (world size, backend). Idle CPU ranks cost nothing; on GPUs one pool takes all GPUs."""
    pools: dict[tuple[int, str], RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def run_ranks(
    _pools: dict[tuple[int, str], RankPool], backend: str, chaos_seed: int | None
) -> Callable[..., list[Any]]:
    """Call as run_ranks(function, nodes, ranks_per_node, *args, **kwargs).

    Runs function(rank, nodes, ranks_per_node, *args, **kwargs) in nodes * ranks_per_node ranks and returns
    their results. Keywords of `RankPool.run` are accepted as well.
    """

    def run(function: Callable[..., Any], nodes: int, ranks_per_node: int, *args: Any, **kwargs: Any) -> list[Any]:
        key = (nodes * ranks_per_node, backend)
        if backend != "host" and key[0] > most_gpu_ranks():
            pytest.skip(f"needs {key[0]} GPUs, there are {most_gpu_ranks()}")
        if key not in _pools:
            while _pools and backend != "host":
                _pools.popitem()[1].close()
            _pools[key] = RankPool(*key)
        if backend == "host":  # on GPUs a hang is too costly for long limits
            kwargs.setdefault("timeout_s", LIMIT_S)
            kwargs.setdefault("grace_s", 60.0)
        return _pools[key].run(function, nodes, ranks_per_node, *args, chaos_seed=chaos_seed, **kwargs)

    return run
