"""Waiting programs leave room for the programs that they wait for, and grids keep a budget of multiprocessors."""

import itertools
from dataclasses import dataclass, replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from triton_ep.config import EPConfig
from triton_ep.context.rows import RowFormat
from triton_ep.errors import ConfigError
from triton_ep.kernels.device import low_latency as turns
from triton_ep.kernels.device.codes import (
    LANDING_BF16,
    LANDING_MX,
    LANDING_ROW,
    LANDING_WORDS,
    SENT_COMPACT,
    SENT_EVENLY,
    SENT_TO_EXPERTS,
    WORDS,
)
from triton_ep.ops import tuning
from triton_ep.ops.tuning import Expanding, budgeted_combine
from triton_ep.runtime.plans import compact, exchange, low_latency
from triton_ep.runtime.plans.residency import (
    LITTLE_SHARED,
    Program,
    in_budget,
    most_waiting,
    per_multiprocessor,
    share_of_one,
)
from triton_ep.runtime.plans.shape import SENDING_PROGRAMS, Plan, Shape

PUSH, WIDE_PUSH = Program(16, 64), Program(32, 64)
EXPAND = Program(4, 128)
FORWARD, SEND = Program(16, 96), Program(16, 114)
PROGRAMS = (
    PUSH,
    WIDE_PUSH,
    EXPAND,
    FORWARD,
    SEND,
    Program(8, 64),
    Program(4, 160),
    Program(1, 32),
    Program(4, 32, 100_000),
)
H200 = 132


def test_programs_of_a_multiprocessor() -> None:
    """Registers, warps, shared memory or the number of programs limits the programs of a multiprocessor."""
    assert [per_multiprocessor(each) for each in (PUSH, WIDE_PUSH, EXPAND, FORWARD, SEND)] == [2, 1, 4, 1, 1]
    assert per_multiprocessor(Program(16, 32)) == 4  # warps
    assert per_multiprocessor(Program(1, 16, 0)) == 32  # programs
    assert per_multiprocessor(Program(1, 16, 100 * 1024)) == 2  # shared memory
    assert [per_multiprocessor(PUSH, EXPAND, times) for times in range(5)] == [2, 1, 1, 0, 0]
    assert [per_multiprocessor(SEND, EXPAND, times) for times in (0, 1)] == [1, 0]
    assert per_multiprocessor(Program(4, 121)) == per_multiprocessor(EXPAND)  # registers come in steps of eight


def test_a_plan_declares_the_most_that_its_programs_take() -> None:
    """Warps and registers come from the plan, else from the kernel, else from the hardware's limit."""
    plan = Plan("dispatch_expand_kernel", num_warps=4, maxnreg=128)
    assert Program.declared(plan, 1)[:2] == (4, 128)
    assert Program.declared(Plan("internode_send_kernel"), 16)[:2] == (16, 128)
    assert Program.declared(Plan("combine_pull_kernel"), 32, 40)[:2] == (32, 40)
    assert Program.declared(Plan("combine_free_kernel"), 1)[:2] == (1, 255)


@pytest.mark.parametrize(("waiting", "needed"), list(itertools.product(PROGRAMS, PROGRAMS)))
def test_what_is_waited_for_finds_room(waiting: Program, needed: Program) -> None:
    """For every placement of the waiting programs on a small GPU, all programs that they wait for fit as well."""
    most_on_one = per_multiprocessor(waiting)
    for multiprocessors, num_needed in ((1, 1), (2, 1), (3, 2), (3, 4)):
        found = most_waiting(multiprocessors, waiting, needed, num_needed)
        places = itertools.combinations_with_replacement(range(most_on_one + 1), multiprocessors)
        for times in (each for each in places if sum(each) <= found):
            room = sum(per_multiprocessor(needed, waiting, each) for each in times)
            assert room >= num_needed or found == 0, (times, room)


def test_grids_that_would_hang_are_not_made() -> None:
    """400 waiting programs would leave no room for a push, nor 168 for one of 32 warps: two layers launch fewer."""
    assert most_waiting(H200, EXPAND, PUSH, 20) == 356
    assert most_waiting(H200, EXPAND, WIDE_PUSH, 20) == H200 - 20
    assert Expanding(H200, 20, None, True, True).programs(EXPAND, (PUSH,)) == 356 // 2
    assert Expanding(H200, 20, None, True, True).programs(Program(4, 80), (PUSH,)) == 2 * (H200 - 20)
    assert Expanding(H200, 20, None, True, True).programs(EXPAND, (WIDE_PUSH,)) == (H200 - 20) // 2
    assert Expanding(H200, 64, None, False, True).programs(EXPAND, (PUSH, SEND, FORWARD)) == 68
    assert Expanding(H200, 20, None, True, False).programs(EXPAND, (PUSH,)) == 2 * H200


@pytest.mark.parametrize("multiprocessors", [16, 108, 132, 148])
@pytest.mark.parametrize("budget", [1, 2, 3, 8, 20, 24, 64, 1000])
@pytest.mark.parametrize("senders", [(PUSH,), (WIDE_PUSH,), (Program(8, 64),), (PUSH, SEND, FORWARD)])
def test_a_dispatch_keeps_its_budget(multiprocessors: int, budget: int, senders: tuple[Program, ...]) -> None:
    """Sending and expanding programs together keep the budget, expanding ones get a part of it, and nothing hangs."""
    one_node = len(senders) == 1
    config = EPConfig(4096, 7168, 8, 256, 0, 8, 8 if one_node else 4, num_sm=20, sm_budget=budget)
    largest = max(share_of_one(each) for each in senders)
    for overlapped in {False, budget > 1 and multiprocessors - config.num_sm > 1}:
        grid = Expanding(multiprocessors, config.num_sm, budget, one_node, overlapped)
        number = grid.programs(EXPAND, senders)
        assert number >= 1
        if not overlapped:
            assert number == 4 * min(budget, multiprocessors)
            continue
        # No plan lets a push within a node take a whole multiprocessor, as the last test shows.
        taken = config.num_sm * largest + number * share_of_one(EXPAND)
        assert taken <= budget or (number == 1 and senders == (WIDE_PUSH,)), (config.num_sm, number)
        for sender in senders:
            assert number * (2 if one_node else 1) <= most_waiting(multiprocessors, EXPAND, sender, config.num_sm)


@pytest.mark.parametrize("budget", [1, 2, 3, 8, 20, 24, 64])
@pytest.mark.parametrize("pull", [Program(32, 64), Program(8, 80)])
@pytest.mark.parametrize("reduce", [Program(32, 64), Program(8, 80), Program(4, 160)])
def test_a_combine_keeps_its_budget(budget: int, reduce: Program, pull: Program) -> None:
    """Sums and pulls keep the budget together if they overlap, else each by itself."""
    both = budgeted_combine(budget, reduce, pull, True)
    assert both.publishing >= 1 and both.pulling >= 1
    shares = both.publishing * share_of_one(reduce), both.pulling * share_of_one(pull)
    assert (sum(shares) if both.overlapped else max(shares)) <= budget
    assert both.overlapped == (budget > 1)
    after = budgeted_combine(budget, reduce, pull, False)
    assert not after.overlapped and after.pulling == in_budget(budget, pull)
    assert after.publishing == in_budget(budget, reduce)


def test_a_budget_limits_the_programs_of_a_layer() -> None:
    """num_sm is at most the budget, or half of it between nodes; low-latency layers have no budget."""
    sizes = {"max_tokens": 8, "hidden": 64, "topk": 2, "num_experts": 8, "rank": 0, "world_size": 4}
    assert EPConfig(**sizes, local_world_size=4, num_sm=20, sm_budget=24).num_sm == 20
    assert EPConfig(**sizes, local_world_size=4, num_sm=20, sm_budget=8).num_sm == 8
    assert [EPConfig(**sizes, local_world_size=2, num_sm=20, sm_budget=n).num_sm for n in (1, 8, 64)] == [1, 4, 20]
    with pytest.raises(ConfigError, match="sm_budget"):
        EPConfig(**sizes, local_world_size=4, sm_budget=0)
    with pytest.raises(ConfigError, match="low_latency"):
        EPConfig(**sizes, local_world_size=4, low_latency=True, recv_capacity=64, sm_budget=8)


def test_sums_within_a_budget_take_a_part_of_a_multiprocessor() -> None:
    """Inside a node programs that send sums take a quarter, those that add them a third, without a budget a half and a
    third; compact rows have programs of a whole one; plans for several nodes and for short rows ignore the budget."""
    shape = Shape(4096, 7168, 8, 256, 8, 8, enable_local_combine=True)
    within = replace(shape, budgeted=True)
    for plan in (exchange.reduce(within, False, 1), exchange.pull(within, False, True, copies=1)):
        assert share_of_one(Program.declared(plan, 32)) == 1
    sending = (lambda s: exchange.reduce(s, False)), Fraction(1, 4), Fraction(1, 2)
    adding = (lambda s: exchange.pull(s, False, True)), Fraction(1, 3), Fraction(1, 3)
    for plan, budgeted, free in (sending, adding):
        assert share_of_one(Program.declared(plan(replace(shape, budgeted=True)), 32)) == budgeted
        assert share_of_one(Program.declared(plan(shape), 32)) == free
        for other in (replace(shape, local_world_size=4), replace(shape, hidden=128)):
            assert plan(replace(other, budgeted=True)) == plan(other)


@pytest.mark.parametrize(("ranks", "part"), [(2, Fraction(1, 2)), (4, 1), (8, 1)])
def test_sums_of_rows_that_copy_engines_sent_copy_ahead(ranks: int, part: Fraction) -> None:
    """Within a budget their programs take a multiprocessor, or of two ranks half of one, for the rows ahead."""
    shape = Shape(4096, 7168, 8, 256, ranks, ranks, budgeted=True, copy_engines=True)
    plan = exchange.pull(shape, False, True, copies=1)
    assert plan.constexprs["STAGES"] > 1 and share_of_one(Program.declared(plan, 32)) == part
    assert exchange.pull(replace(shape, copy_engines=False), False, True, copies=1).constexprs["STAGES"] == 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sums_of_rows_that_have_arrived_take_all_places(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """They wait for no program, so they leave room for none; a budget limits them."""
    monkeypatch.setattr(tuning, "INTERPRETING", False)
    monkeypatch.setattr(tuning, "multiprocessors", lambda device: H200)
    shape = Shape(4096, 7168, 8, 256, ranks, ranks, copy_engines=True)
    for budget in (None, 24, 200):
        add = Program.declared(exchange.pull(replace(shape, budgeted=budget is not None), False, True, copies=1), 32)
        config = EPConfig(4096, 7168, 8, 256, 0, ranks, ranks, num_sm=20, sm_budget=budget, copy_engines=True)
        places = min(budget or H200, H200) * per_multiprocessor(add)
        assert tuning.summing_programs(config, torch.device("cpu"), add) == places


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_programs_that_lay_out_rows_of_copy_engines_leave_room(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Wherever those of two layers wait, the kernels of one of them that count and place rows fit on the GPU."""
    monkeypatch.setattr(tuning, "INTERPRETING", False)
    monkeypatch.setattr(tuning, "multiprocessors", lambda device: H200)
    config = EPConfig(4096, 7168, 8, 256, 0, ranks, ranks, num_sm=20, copy_engines=True)
    shape = config.shape(0)
    declared = Program.declared(compact.copy_out(shape, False, True, True, 1792), 1)
    counts, places = (
        Program.declared(plan, 8, 128) for plan in (exchange.splits(shape, False), exchange.place(shape, True, False))
    )
    for copy, least in ((declared, 2 * H200), (Program(1, 96, declared.shared_bytes), 3 * H200)):
        fmt = cast(RowFormat, SimpleNamespace(grids={}, shape=shape, programs=lambda *names: ()))
        ctx = cast(Any, SimpleNamespace(config=config, device=torch.device("cpu")))
        programs = tuning.expanding_programs(ctx, fmt, cast(Any, _Launched(copy)), False, "compact")
        assert programs >= least
        for needed in (counts, places):
            assert 2 * programs <= most_waiting(H200, copy, needed, 1)


@pytest.mark.parametrize("hidden", [64, 1024, 4096, 7168])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("tokens", [64, 4096])
def test_programs_that_add_sums_leave_room_for_those_that_send_them(
    monkeypatch: pytest.MonkeyPatch, hidden: int, ranks: int, tokens: int
) -> None:
    """Wherever the programs of two layers wait, half as many that send as there are multiprocessors fit; programs with
    little shared memory, which may keep a multiprocessor to themselves, leave some multiprocessors free."""
    monkeypatch.setattr(tuning, "INTERPRETING", False)
    monkeypatch.setattr(tuning, "multiprocessors", lambda device: H200)
    config = EPConfig(tokens, hidden, 8, 64, 0, ranks, ranks, enable_local_combine=True)
    shape = config.shape(interpreted=False)
    plans = exchange.reduce(shape, False), exchange.pull(shape, False, True)
    send, add = (Program.declared(plan, 32) for plan in plans)
    combining = tuning.combining_programs(config, torch.device("cpu"), send, add, True)
    assert combining.publishing == H200 and 1 <= combining.pulling <= H200
    assert combining.overlapped == (tokens == 4096)
    assert 2 * combining.pulling <= most_waiting(H200, add, send, H200 // 2)
    if add.shared_bytes < LITTLE_SHARED:
        assert 2 * combining.pulling <= H200 - H200 // 8
    else:
        assert combining.pulling == H200, "sums are added on fewer multiprocessors than there are"


def test_a_combine_of_low_latency_has_no_more_programs_than_its_kernel_counts() -> None:
    """Half of the smallest programs that fit on 256 multiprocessors, more than any GPU has, twice if it is split."""
    assert 2**turns._TURN.value == turns._ONE_TURN.value > 2 * tuning.half_of(256, Program(1, 1))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 32])
def test_two_low_latency_layers_fit_on_a_gpu(ranks: int) -> None:
    """The waiting programs of a dispatch and of a combine, which may be of two layers, fit next to each other."""
    shape = Shape(128, 7168, 8, 256, ranks, ranks)
    dispatch = low_latency.dispatch(shape, WORDS, True, 1792, 1792, slabs=False, columns=False)
    plans = [dispatch, low_latency.combine(shape, 0)]
    programs = [Program.declared(plan, 4, 128) for plan in plans]
    for one, other in itertools.product(programs, repeat=2):
        taken = [tuning.half_of(1, program) * share_of_one(program) for program in (one, other)]
        assert sum(taken) <= 1


@dataclass(eq=False)
class _Launched:
    """The part of a launcher that grids use."""

    program: Program


def test_grids_of_a_gpu_follow_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of 24 allows 20 pushing and 56 expanding programs, or 112 once these turn out to be half as large."""
    monkeypatch.setattr(tuning, "INTERPRETING", False)
    monkeypatch.setattr(tuning, "multiprocessors", lambda device: H200)
    device = torch.device("cpu")
    plain = EPConfig(4096, 7168, 8, 256, 0, 4, 4, num_sm=20)
    config = replace(plain, sm_budget=24)
    fmt = RowFormat(config.shape(), torch.bfloat16)
    fmt.launchers["push", 0] = cast(Any, _Launched(PUSH))
    fmt.launchers["expand", 0] = expand = cast(Any, _Launched(EXPAND))
    ctx = cast(Any, SimpleNamespace(config=config, device=device))
    assert tuning.expanding_programs(ctx, fmt, expand, True, "experts") == 56
    expand.program = Program(4, 64)
    assert tuning.expanding_programs(ctx, fmt, expand, True, "experts") == 56
    monkeypatch.setattr(tuning.Launcher, "num_compiled", tuning.Launcher.num_compiled + 1)
    assert tuning.expanding_programs(ctx, fmt, expand, True, "experts") == 112
    assert len(fmt.grids) == 2, "a number that is out of date is kept"  # another one is of the push
    whole = Program(32, 64)
    # Within a node only programs that send compact rows take a multiprocessor each.
    assert tuning.combining_programs(config, device, whole, whole, True) == (14, 10, True)
    between = replace(config, local_world_size=2)
    assert tuning.combining_programs(between, device, whole, whole, True) == (18, 6, True)
    third = Program(8, 80)
    assert tuning.combining_programs(config, device, third, third, True) == (54, 18, True)
    assert tuning.combining_programs(plain, device, whole, whole, True) == (H200, 33, True)
    assert tuning.combining_programs(plain, device, whole, whole, False) == (H200, 20, False)
    splits = cast(Any, _Launched(Program(8, 128)))
    assert [tuning.packing_programs(each, splits, 3584) for each in (plain, config)] == [3584, 2 * 24]
    assert [tuning.overlaps(replace(config, sm_budget=n), device) for n in (1, 2)] == [False, True]


def test_two_kernels_between_nodes_leave_room_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between nodes twice as many programs communicate, if that leaves half of the GPU; those that wait are fewer."""
    monkeypatch.setattr(tuning, "INTERPRETING", False)
    monkeypatch.setattr(tuning, "multiprocessors", lambda device: H200)
    device = torch.device("cpu")
    nodes = EPConfig(4096, 7168, 8, 256, 0, 4, 2, num_sm=32)
    one_node, few = replace(nodes, local_world_size=4), replace(nodes, max_tokens=512)
    many, budgeted = replace(nodes, num_sm=34), replace(nodes, sm_budget=64)
    for config, aside in ((nodes, True), (one_node, False), (few, False), (many, False), (budgeted, False)):
        assert tuning.sends_aside(config, device) == aside
        assert tuning.sending_programs(config, device) == config.num_sm * (1 + aside)
    whole = Program(16, 128)
    combining = tuning.combining_programs(nodes, device, whole, whole, True)
    assert combining == (H200 - 2 * 32, 32, True)
    expanding = Expanding(H200, 32 + 44, None, False, True)
    assert expanding.programs(whole, (PUSH, SEND, FORWARD)) == H200 - 32 - 44


@pytest.mark.parametrize(("num_sm", "forwarding"), [(12, 24), (20, 40), (24, 44), (32, 44), (34, 34)])
def test_more_programs_forward_rows_than_push_them(
    monkeypatch: pytest.MonkeyPatch, num_sm: int, forwarding: int
) -> None:
    """They have flags of their own, and the kernels that run at the same time leave room to lay rows out."""
    monkeypatch.setattr(tuning, "INTERPRETING", False)
    monkeypatch.setattr(tuning, "multiprocessors", lambda device: H200)
    config = EPConfig(4096, 7168, 8, 256, 0, 4, 2, num_sm=num_sm)
    assert tuning.forwarding_programs(config, torch.device("cpu")) == forwarding
    assert forwarding <= config.shape(0).senders
    budgeted = replace(config, sm_budget=64)
    assert tuning.forwarding_programs(budgeted, torch.device("cpu")) == budgeted.num_sm


def test_programs_between_nodes_do_the_work_of_four() -> None:
    """Fewer programs lay rows out there, each with four times the rows, and still fit on a multiprocessor."""
    one_node = Shape(512, 7168, 8, 256, 4, 4, payload="mxfp8")  # with more tokens rows are copied in bulk
    for landing, words in ((0, 1792), (1, 896), (2, 1792), (3, 1792)):
        plans = [exchange.expand(replace(one_node, local_world_size=n), landing, True, True, words) for n in (4, 2)]
        few, many = (plan.constexprs["ROWS"] * plan.constexprs["BLOCK_H"] for plan in plans)
        assert many == 4 * few
        assert per_multiprocessor(Program.declared(plans[1], 1)) >= 1
        budgeted = replace(one_node, local_world_size=2, budgeted=True)
        assert exchange.expand(budgeted, landing, True, True, words).num_warps == plans[0].num_warps


@pytest.mark.parametrize("warps", [1, 4, 8, 16, 32])
def test_tuned_warps_change_nothing_of_it(warps: int) -> None:
    """Tuned warps have limited registers, so that a push still takes at most half a multiprocessor."""
    tuned = (("push", 2, warps), ("expand", 1, min(warps, 16)))
    shape = Shape(4096, 7168, 8, 256, 8, 8, tuned=tuned)
    push = Program.declared(exchange.push(shape, 0, 1792), 1)
    expand = Program.declared(exchange.expand(shape, 0, False, False, 1792), 1)
    assert share_of_one(push) <= share_of_one(PUSH) and share_of_one(expand) <= share_of_one(EXPAND)
    # With one warp more fit than are wanted.
    assert Expanding(H200, 20, None, True, True).programs(expand, (push,)) == (178 if warps > 1 else 224)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_small_programs_that_push_find_room_next_to_those_that_expand(ranks: int) -> None:
    """Also next to those of a second layer, wherever the waiting programs are; and most multiprocessors have one."""
    shape = Shape(4096, 7168, 8, 256, ranks, ranks)
    times = 2 if ranks == 2 else 1
    assert shape.spreads and shape.most_sending == times and shape.senders == times * SENDING_PROGRAMS
    push = Program.declared(exchange.push(shape, WORDS, 1792, True), 1)
    expand = Program.declared(exchange.expand(shape, LANDING_WORDS, False, True, 1792), 1)
    for sending in (SENDING_PROGRAMS, times * SENDING_PROGRAMS):
        number = Expanding(H200, sending, None, True, True, True).programs(expand, (push,))
        assert H200 < number <= 3 * H200
        assert 2 * number <= most_waiting(H200, expand, push, sending)


def test_more_programs_push_rows_for_their_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two ranks twice as many as of compact or converted rows; the steps of each kind end elsewhere."""
    monkeypatch.setattr(tuning, "INTERPRETING", False)
    monkeypatch.setattr(tuning, "multiprocessors", lambda device: H200)

    def pushing(ranks: int, laid: tuning.Laid, payload: str | None = None, beside: bool = True) -> tuple[int, ...]:
        config = EPConfig(4096, 7168, 8, 256, 0, ranks, ranks, num_sm=20, payload=payload)
        ctx = cast(Any, SimpleNamespace(config=config, device=torch.device("cpu")))
        fmt = RowFormat(config.shape(), torch.bfloat16)
        found = tuning.pushing_programs(ctx, fmt, beside, laid)
        assert found.spread == beside and found.flags <= fmt.shape.senders
        return found.programs, found.flags, found.sent

    assert pushing(2, "experts") == pushing(2, "experts", "mxfp8") == (256, 256, SENT_TO_EXPERTS)
    assert pushing(4, "experts") == pushing(16, "experts") == (128, 128, SENT_TO_EXPERTS)
    assert pushing(2, "compact") == pushing(4, "compact") == (128, 128, SENT_COMPACT)
    # Ranks watch as many flags, whatever programs raise them: others may convert rows, or leave room for a hook.
    assert pushing(2, "converted", "mxfp8") == (128, 256, SENT_EVENLY)
    assert pushing(2, "experts", beside=False) == (20, 256, SENT_TO_EXPERTS)
    assert pushing(4, "compact", beside=False) == (20, 128, SENT_COMPACT)


@pytest.mark.parametrize("payload", [None, "mxfp8"])
def test_rows_are_copied_in_bulk_if_their_format_allows(payload: str | None) -> None:
    """Within a node, without a budget or where copy engines send them, rows of multiples of 16 bytes that are not
    converted, unless settings are tuned or two rows do not fit; the plan counts the shared memory that the compiler
    does not see."""
    shape = Shape(4096, 7168, 8, 256, 4, 4, payload=payload)
    landing = LANDING_WORDS if payload is None else LANDING_MX

    def slots(s: Shape, words: int = 896, **push: Any) -> list[int]:
        plans = [
            exchange.push(s, WORDS, words, True, **push),
            exchange.expand(s, landing, False, True, words),
            compact.copy_out(s, payload is not None, True, True, words),
        ]
        for plan in plans:
            room = per_multiprocessor(Program.declared(plan, 1))
            assert (plan.ring_bytes > 0) == (plan.constexprs["SLOTS"] > 0)
            assert plan.ring_bytes == 0 or (plan.num_warps == 1 and plan.shared_bytes > plan.ring_bytes and room >= 4)
        return [plan.constexprs["SLOTS"] for plan in plans]

    assert slots(shape) == [2, 2, 2]
    assert slots(shape, aligned=False) == [0, 2, 2]
    # About as many bytes of shorter rows are on their way.
    assert slots(replace(shape, hidden=4096)) == ([2, 2, 2] if payload is None else [4, 4, 4])
    assert slots(replace(shape, hidden=512)) == [8, 8, 8]
    for other in ({"budgeted": True}, {"max_tokens": 512}, {"local_world_size": 2}, {"hidden": 2**17}):
        assert slots(replace(shape, **other)) == [0, 0, 0]
    assert slots(replace(shape, budgeted=True, copy_engines=True))[1:] == [2, 2]  # nothing is pushed then
    assert slots(replace(shape, world_size=16, local_world_size=16)) == [0, 0, 0]
    tuned = (("push", 1, 8), ("expand", 1, 4))
    assert slots(replace(shape, tuned=tuned)) == [0, 0, 0]
    # Rows of MXFP8 travel in multiples of 128 bytes; their scales are stored apart.
    assert slots(replace(shape, hidden=7168 + 32)) == ([2, 2, 2] if payload is None else [2, 0, 0])
    assert slots(replace(shape, hidden=7168 + 4)) == ([0, 0, 0] if payload is None else [2, 0, 0])
    for kind in (LANDING_ROW, LANDING_BF16):
        assert exchange.expand(shape, kind, False, True, 1792).constexprs["SLOTS"] == 0


def test_rows_are_sent_from_everywhere_only_within_a_node() -> None:
    """Not between nodes, within a budget, for few tokens, or to more than 16 ranks; then `num_sm` programs do."""
    shape = Shape(4096, 7168, 8, 256, 4, 4, num_sm=24)
    assert [replace(shape, world_size=n, local_world_size=n).spreads for n in (16, 17, 32)] == [True, False, False]
    others = [{"local_world_size": 2}, {"budgeted": True}, {"max_tokens": 1023}]
    assert [replace(shape, **other).spreads for other in [{}, {"payload": "mxfp8"}, *others]] == [
        True,
        True,
        *[False] * 3,
    ]
    # Rows of both formats raise flags at the same places.
    assert replace(shape, payload="mxfp8").senders == shape.senders


@pytest.mark.parametrize("payload", [None, "mxfp8"])
@pytest.mark.parametrize("budgeted", [False, True])
@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_kernels_that_wait_for_each_other_divide_multiprocessors_alike(
    ranks_per_node: int, budgeted: bool, payload: str | None
) -> None:
    """No program of a kernel that prefers more shared memory starts next to a waiting one that prefers less."""
    shape = Shape(4096, 7168, 8, 256, 4, ranks_per_node, budgeted=budgeted, payload=payload)
    plans = [
        exchange.push(shape, WORDS, 924),
        exchange.push(shape, WORDS, 924, True),
        exchange.expand(shape, LANDING_WORDS if payload is None else LANDING_MX, False, True, 896),
        compact.copy_out(shape, payload is not None, True, True, 896),
    ]
    assert len({plan.side_by_side for plan in plans}) == 1
    # Only kernels that prefer all shared memory load rows ahead, into it, or copy them in bulk.
    for values in (plan.constexprs for plan in plans[2:]):
        assert plans[0].side_by_side == (values["STAGES"] > 1 or values["SLOTS"] > 0)
