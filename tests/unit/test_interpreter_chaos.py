"""Chaos mode finds errors that a CPU hides, and lets correct kernels pass."""

import json
import os
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import triton

from tests.programs import Program, environment_of_programs
from triton_ep.runtime import interpreter
from triton_ep.runtime.interpreter.held import HeapRanges, HeldStores

if not triton.knobs.runtime.interpret:
    pytest.skip("kernels are compiled in this process", allow_module_level=True)

from triton_ep.kernels.device import spin
from triton_ep.runtime.interpreter import spinning

from . import interpreter_kernels as kernels
from . import ping_pong, wrong_kernels

SEEDS = range(10)
BLOCK = 64


@pytest.fixture(autouse=True)
def _plain_afterwards() -> Iterator[None]:
    interpreter.install()
    yield
    interpreter.set_chaos(None)


@pytest.fixture
def heap() -> Iterator[torch.Tensor]:
    """[4 * BLOCK] int32 zeros, registered as symmetric memory."""
    memory = torch.zeros(4 * BLOCK, dtype=torch.int32)
    interpreter.register_heap(memory.data_ptr(), memory.nbytes)
    yield memory
    interpreter.unregister_heap(memory.data_ptr())


def _ping_pong(cases: list[tuple[str, int | None]], rounds: int) -> list[list[int]]:
    """Run cases in two fresh processes; returns each rank's count of wrong words per case."""
    fd = os.memfd_create("ping_pong")
    os.ftruncate(fd, len(cases) * ping_pong.PAGE)
    words = ["-m", ping_pong.__name__]
    more = [f"/proc/{os.getpid()}/fd/{fd}", str(rounds), json.dumps(cases)]
    environment = {**environment_of_programs(), "TRITON_INTERPRET": "1"}
    ranks = [Program([*words, str(rank), *more], environment, imported=True) for rank in range(2)]
    done = [rank.wait() for rank in ranks]
    os.close(fd)
    assert [each.returncode for each in done] == [0, 0], done
    return [json.loads(each.stdout) for each in done]


def test_two_processes_under_ten_seeds() -> None:
    """A correct kernel passes with every seed; every wrong one is caught with every seed.

    Without chaos mode all but the flag before the data pass on x86: that is why there is a chaos mode.
    """
    wrong = [way for way in wrong_kernels.WAYS if way != "correct"]
    forgiven = [way for way in wrong if way not in ("flag_first", "plain_flag")]
    cases: list[tuple[str, int | None]] = [(way, None) for way in ("correct", *forgiven)]
    cases += [(way, seed) for seed in SEEDS for way in wrong_kernels.WAYS]
    results = _ping_pong(cases, rounds=3)
    for case, bad in zip(cases, zip(*results, strict=True), strict=True):
        way, seed = case
        if way == "correct" or seed is None:
            assert bad == (0, 0), f"{case}: {bad}"
        else:
            assert bad != (0, 0), f"chaos mode with seed {seed} does not catch {way}"
        if way != "plain_flag":
            assert min(bad) >= 0, f"{case}: a flag did not come"


@pytest.fixture
def visible_at_pause(heap: torch.Tensor) -> Iterator[list[list[int]]]:
    """Contents of the heap that a peer would see at every pause of a kernel, read past the interpreter."""
    seen: list[list[int]] = []
    spin.call_on_pause(lambda: seen.append(heap.tolist()))
    yield seen
    spin.call_on_pause(spinning.while_waiting)


# barrier, sem, scope, last arriver -> is the store visible to peers while the kernel still runs?
VISIBILITY = [
    (True, "release", "sys", False, True),
    (True, "acq_rel", "sys", False, True),
    (True, "relaxed", "sys", False, False),
    (True, "acquire", "sys", False, False),
    (True, "release", "gpu", False, False),
    (True, "release", "cta", False, False),
    (False, "release", "sys", False, False),
    (True, "acq_rel", "gpu", True, True),
    (True, "release", "cta", True, False),
    (True, "relaxed", "gpu", True, False),
]


@pytest.mark.parametrize(("barrier", "sem", "scope", "last_arriver", "visible"), VISIBILITY)
def test_what_makes_a_store_visible(
    heap: torch.Tensor,
    visible_at_pause: list[list[int]],
    barrier: bool,
    sem: str,
    scope: str,
    last_arriver: bool,
    visible: bool,
) -> None:
    """A system-scope release after a barrier; or a GPU-scope release, then a system-scope one by any program."""
    flags = torch.zeros(2, dtype=torch.int32)
    for seed in (None, *range(3)):
        heap.zero_()
        flags.zero_()
        visible_at_pause.clear()
        interpreter.set_chaos(seed)
        programs = 4 if last_arriver else 1
        wrong_kernels.visibility_kernel[(programs,)](
            heap, flags, MAKE_BARRIER=barrier, SEM=sem, SCOPE=scope, LAST_ARRIVER=last_arriver, BLOCK=BLOCK
        )
        stored = list(range(1, programs * BLOCK + 1))
        other = [0] * (heap.numel() - len(stored))
        # The last arriver's own system-scope release covers its own stores, whatever came before.
        mine = BLOCK if last_arriver and not visible else 0
        expected_now = len(stored) if visible or seed is None else mine
        assert sum(word != 0 for word in visible_at_pause[-1]) == expected_now
        assert heap.tolist() == stored + other  # after the kernel has ended


def test_a_release_covers_its_own_program_only(heap: torch.Tensor, visible_at_pause: list[list[int]]) -> None:
    """Program 0 releases, the other three do not: their stores stay hidden, in whatever order they ran."""
    flag = torch.zeros(1, dtype=torch.int32)
    for seed in SEEDS:
        heap.zero_()
        interpreter.set_chaos(seed)
        wrong_kernels.one_program_releases_kernel[(4,)](heap, flag, BLOCK=BLOCK)
        assert visible_at_pause[-1] == list(range(1, BLOCK + 1)) + [0] * (3 * BLOCK)
        assert heap.tolist() == list(range(1, 4 * BLOCK + 1))


def test_memory_outside_heaps_is_written_at_once(visible_at_pause: list[list[int]], heap: torch.Tensor) -> None:
    """Stores are held back only in registered ranges, and no longer after a range is unregistered."""
    interpreter.set_chaos(0)
    interpreter.unregister_heap(heap.data_ptr())
    flags = torch.zeros(2, dtype=torch.int32)
    wrong_kernels.visibility_kernel[(1,)](
        heap, flags, MAKE_BARRIER=False, SEM="relaxed", SCOPE="sys", LAST_ARRIVER=False, BLOCK=BLOCK
    )
    interpreter.register_heap(heap.data_ptr(), heap.nbytes)
    assert visible_at_pause[-1][:BLOCK] == list(range(1, BLOCK + 1))


def test_a_process_sees_its_own_stores(heap: torch.Tensor) -> None:
    """Loads and atomics find held stores, and stores to the same place keep their order."""
    offs = np.arange(BLOCK)
    first = np.where(offs % 2 == 0, offs + 100, offs)
    second = offs + 200
    for seed in SEEDS:
        heap.zero_()
        out = torch.zeros(2 * BLOCK + 1, dtype=torch.int32)
        interpreter.set_chaos(seed)
        kernels.own_stores_kernel[(1,)](heap, out, BLOCK=BLOCK)
        assert out[-1].item() == second[3]
        after = second + (offs == 3)
        assert out[:-1].tolist() == [*first, *after]
        assert heap[:BLOCK].tolist() == after.tolist()


def test_masked_lanes_hold_garbage() -> None:
    """Masked lanes must not be conveniently zero; `other` is honoured."""
    for dtype, garbage in ((torch.int32, 0x7F7F7F7F), (torch.int64, 0x7F7F7F7F7F7F7F7F), (torch.uint8, 0x7F)):
        x = torch.arange(16).to(dtype)
        out = torch.zeros(32, dtype=dtype)
        atomic_out, counter = torch.zeros(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
        interpreter.set_chaos(1)
        kernels.masked_kernel[(1,)](x, counter, out, atomic_out, 5, BLOCK=16)
        assert out.tolist() == [*range(5)] + [garbage] * 11 + [*range(5)] + [7] * 11
        assert atomic_out.tolist() == [0] * 5 + [0x7F7F7F7F] * 11
        assert counter.tolist() == [1] * 5 + [0] * 11
        interpreter.set_chaos(None)
        kernels.masked_kernel[(1,)](x, counter, out, atomic_out, 5, BLOCK=16)
        assert out.tolist() == [*range(5)] + [0] * 11 + [*range(5)] + [7] * 11


def _order(grid: tuple[int, int, int]) -> list[int]:
    ticket, out = torch.zeros(1, dtype=torch.int32), torch.full(grid, -1, dtype=torch.int32)
    kernels.order_kernel[grid](ticket, out)
    return out.flatten().tolist()


def test_programs_run_once_each_in_an_order_of_the_seed() -> None:
    """The same seed gives the same order; another seed or the next launch, another; without chaos, the usual order."""
    grid = (4, 3, 2)
    usual = list(range(24))
    assert _order(grid) == usual
    interpreter.set_chaos(1)
    first, again = _order(grid), _order(grid)
    interpreter.set_chaos(1)
    assert _order(grid) == first
    interpreter.set_chaos(2)
    assert len({tuple(order) for order in (usual, first, again, _order(grid))}) == 4
    assert sorted(first) == usual
    interpreter.set_chaos(None)
    assert _order(grid) == usual


def test_a_kernel_that_fails_leaves_nothing_back(heap: torch.Tensor) -> None:
    """The held stores of a failed launch are written, not kept for the next launch."""

    def fail() -> None:
        raise RuntimeError("hook")

    interpreter.set_chaos(0)
    spin.call_on_pause(fail)
    try:
        with pytest.raises(triton.runtime.errors.InterpreterError, match="hook"):
            wrong_kernels.one_program_releases_kernel[(1,)](heap, torch.zeros(1, dtype=torch.int32), BLOCK=BLOCK)
    finally:
        spin.call_on_pause(spinning.while_waiting)
    assert heap[:BLOCK].tolist() == list(range(1, BLOCK + 1))


def _held(memory: np.ndarray, base: int, linger: Callable[[], None] = lambda: None) -> HeldStores:
    """Held stores that write to `memory` [n] uint8 at address `base`."""

    def write(addrs: np.ndarray, values: np.ndarray) -> None:
        raw = values.view(np.uint8).reshape(addrs.size, -1)
        for addr, data in zip(addrs.astype(np.int64) - base, raw, strict=True):
            memory[addr : addr + data.size] = data

    return HeldStores(write, np.random.default_rng(0), linger)


def test_any_mixture_of_widths_keeps_program_order() -> None:
    """Compare 200 random runs of stores, loads, barriers and releases with a memory without delay."""
    base = 1 << 40
    for seed in range(200):
        draw = random.Random(seed)
        memory, model = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
        held = _held(memory, base)
        for _ in range(draw.randrange(1, 30)):
            size = draw.choice([1, 2, 4, 8])
            index = np.array(draw.sample(range(64 // size), draw.randrange(1, 64 // size)), dtype=np.uint64)
            addrs = np.uint64(base) + index * np.uint64(size)
            action: Callable[[], None] | None = draw.choice(
                [None, None, None, held.barrier, held.release_gpu, held.release_system, held.next_program]
            )
            if action is not None:
                action()
                continue
            at = (addrs[:, None].astype(np.int64) - base + np.arange(size)).astype(np.int64)
            if draw.random() < 0.6:
                data = np.array([[draw.randrange(256) for _ in range(size)] for _ in index], dtype=np.uint8)
                held.hold(addrs, data.view(f"u{size}").ravel())
                model[at] = data
            else:
                held.settle(addrs, size)
                assert np.array_equal(memory[at], model[at])
        held.end_of_kernel()
        assert len(held) == 0
        assert np.array_equal(memory, model)


def test_only_what_overlaps_is_settled() -> None:
    """A load settles the elements that it reads, not their neighbours."""
    memory = np.zeros(64, np.uint8)
    held = _held(memory, 1 << 40)
    addrs = np.uint64(1 << 40) + np.arange(16, dtype=np.uint64) * np.uint64(4)
    held.hold(addrs, np.arange(1, 17, dtype=np.uint32))
    held.settle(addrs[4:5] - np.uint64(2), 4)  # two bytes of element 3, two of element 4
    assert memory.view(np.uint32).tolist() == [0, 0, 0, 4, 5] + [0] * 11
    held.end_of_kernel()
    assert memory.view(np.uint32).tolist() == [*range(1, 17)]


def test_the_end_of_a_kernel_gives_peers_time_to_go_wrong() -> None:
    """A kernel with unreleased stores lingers once, before the last of them; a release does not linger."""
    memory = np.zeros(8, np.uint8)
    missing: list[int] = []
    held = _held(memory, 1 << 40, lambda: missing.append(8 - np.count_nonzero(memory)))
    addrs = np.uint64(1 << 40) + np.arange(8, dtype=np.uint64)
    held.end_of_kernel()
    assert missing == []
    for _ in range(20):
        memory[:] = 0
        for addr in addrs:
            held.hold(addr[None], np.ones(1, dtype=np.uint8))
        held.end_of_kernel()
    assert len(missing) == 20
    assert min(missing) >= 1
    assert len(set(missing)) > 1
    held.hold(addrs[:1], np.full(1, 2, dtype=np.uint8))
    held.release_system()
    assert memory[0] == 2
    assert len(missing) == 20


def test_heap_ranges() -> None:
    """Ends are exclusive, ranges may touch, and a removed one is gone."""
    ranges = HeapRanges()
    addrs = np.array([99, 100, 199, 200, 299, 300, 1000], dtype=np.uint64)
    assert not ranges.contains(addrs).any()
    ranges.add(200, 100)
    ranges.add(100, 100)
    assert ranges.contains(addrs).tolist() == [False, True, True, True, True, False, False]
    assert ranges.contains(addrs[1:3]).all()
    ranges.remove(100)
    assert ranges.contains(addrs).tolist() == [False, False, False, True, True, False, False]
    with pytest.raises(KeyError):
        ranges.remove(100)


def test_programs_that_wait_come_last_and_see_stores_bit_by_bit(heap: torch.Tensor) -> None:
    """Unreleased stores become visible gradually to waiting programs: at each pause one element or more."""
    for seed in SEEDS:
        heap.zero_()
        ticket, out = torch.zeros(1, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
        seen: list[int] = []
        spin.call_on_pause(lambda seen=seen: (spinning.while_waiting(), seen.append(int((heap != 0).sum()))))
        interpreter.set_chaos(seed)
        try:
            kernels.announced_stores_kernel[(6,)](heap, ticket, out, 4, BLOCK=BLOCK)
        finally:
            spin.call_on_pause(spinning.while_waiting)
        assert sorted(out[:4].tolist()) == [0, 1, 2, 3] and sorted(out[4:].tolist()) == [4, 5]
        assert seen == sorted(seen) and 0 < seen[0] < seen[-1] == 4 * BLOCK
        assert heap.tolist() == list(range(1, 4 * BLOCK + 1))
