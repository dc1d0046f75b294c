"""autocast, recipes and their state: always restored, whatever ends a region and in whatever order."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch

import triton_ep.integrations.te as te
from tests.patience import LIMIT_S
from triton_ep.errors import InputError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
State = te.FP8GlobalStateManager
pytestmark = pytest.mark.filterwarnings("ignore:MXFP8 is emulated")


def _recipe(index: int) -> te.MXFP8BlockScaling:
    """A distinguishable recipe."""
    return te.MXFP8BlockScaling(margin=index, fp8_format=te.Format.HYBRID if index % 2 else te.Format.E4M3)


def _seen() -> tuple[bool, int | None, int]:
    """Whether modules quantise, the margin of the recipe, and the depth."""
    recipe = State.FP8_RECIPE
    return State.is_fp8_enabled(), None if recipe is None else recipe.margin, State.AUTOCAST_DEPTH


OUTSIDE = (False, None, 0)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    assert _seen() == OUTSIDE
    yield
    assert _seen() == OUTSIDE


def test_defaults_and_queries() -> None:
    """Outside all regions nothing is enabled; inside, queries answer for the innermost region."""
    assert not State.is_fp8_calibration() and State.get_fp8_group() is None
    assert State.get_fp8_recipe() == te.MXFP8BlockScaling() == te.get_default_fp8_recipe()
    group = object()
    with te.autocast(calibrating=True, recipe=_recipe(3), amax_reduction_group=group):
        assert _seen() == (True, 3, 1)
        assert State.is_fp8_calibration() and State.get_fp8_group() is group
        assert not State.fp8_graph_capturing()
        assert [State.is_first_fp8_module() for _ in range(3)] == [True, False, False]
        with te.autocast():
            assert not State.is_first_fp8_module() and not State.is_fp8_calibration()
            assert State.get_fp8_recipe() == te.MXFP8BlockScaling()
    with te.autocast():
        assert State.is_first_fp8_module()


def test_nesting_to_depth_5_with_a_gap() -> None:
    """Five nested recipes, one region disabled; each recipe is restored when the inner region ends."""

    def enter(depth: int) -> None:
        on = depth != 3
        with te.autocast(enabled=on, recipe=_recipe(depth)):
            assert _seen() == (on, depth, depth)
            if depth < 5:
                enter(depth + 1)
            assert _seen() == (on, depth, depth)

    enter(1)


def test_an_exception_in_the_body_restores() -> None:
    """State is restored at any depth, and the exception propagates."""
    with te.autocast(recipe=_recipe(1)):
        with pytest.raises(KeyError), te.autocast(recipe=_recipe(2)), te.autocast(enabled=False):
            raise KeyError
        assert _seen() == (True, 1, 1)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failing_enter_changes_nothing(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a recipe, another family, a refused device: raised before any state changes."""

    class Delayed(te.Recipe):
        @classmethod
        def delayed(cls) -> bool:
            return True

    def check() -> None:
        before = _seen()
        for region in (te.autocast(recipe="mxfp8"), te.autocast(recipe=Delayed())):  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="recipe is"):
                region.__enter__()
            assert _seen() == before
        monkeypatch.setattr(te.support, "_refusal", lambda device: te.support.TOO_NEW)
        with pytest.raises(RuntimeError, match=r"not supported on 12\.0\+ architectures yet"):
            te.autocast(strict=True).__enter__()
        assert _seen() == before
        with te.autocast(enabled=False, recipe=Delayed(), strict=True):  # a disabled region checks nothing
            assert not State.is_fp8_enabled()

    if depth:
        with te.autocast(recipe=_recipe(1)):
            check()
    else:
        check()


def test_an_instance_is_one_region_at_a_time() -> None:
    """An instance can be entered again after its end, but not inside itself; the refusal leaves the state alone."""
    region = te.autocast(recipe=_recipe(1))
    for _ in range(2):
        with region:
            assert _seen() == (True, 1, 1)
            with pytest.raises(RuntimeError, match="cannot be entered more than once concurrently"):
                region.__enter__()
            assert _seen() == (True, 1, 1)
    with pytest.raises(KeyError), region:
        raise KeyError
    with region:
        pass


def test_a_decorator_opens_a_region_per_call() -> None:
    """Also for a recursive function, with the instance's own region open or not."""
    region = te.autocast(recipe=_recipe(3))

    @region
    def depth(calls: int) -> list[tuple[bool, int | None, int]]:
        """Depth of open regions."""
        return [_seen(), *(depth(calls - 1) if calls else [])]

    assert depth.__doc__ == "Depth of open regions."
    assert depth(2) == [(True, 3, 1), (True, 3, 2), (True, 3, 3)]
    with region:
        assert depth(0) == [(True, 3, 2)]


def test_threads_have_their_own_state() -> None:
    """Two threads with different recipes at the same time, a third with none."""
    together, seen = threading.Barrier(3), {}

    def work(index: int) -> None:
        together.wait(LIMIT_S)
        if index == 0:
            together.wait(LIMIT_S)
            seen[0] = [_seen()]
            together.wait(LIMIT_S)
            return
        with te.autocast(recipe=_recipe(index)):
            together.wait(LIMIT_S)
            seen[index] = [_seen()]
            together.wait(LIMIT_S)
            seen[index].append(_seen())
        seen[index].append(_seen())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    with te.autocast(recipe=_recipe(9)):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
    assert seen == {0: [OUTSIDE], 1: [(True, 1, 1)] * 2 + [OUTSIDE], 2: [(True, 2, 1)] * 2 + [OUTSIDE]}


def test_async_tasks_have_their_own_state() -> None:
    """Tasks alternate inside their regions."""

    async def work(index: int, turns: int) -> list[tuple[bool, int | None, int]]:
        seen = []
        with te.autocast(recipe=_recipe(index)):
            for _ in range(turns):
                await asyncio.sleep(0)
                seen.append(_seen())
            with te.autocast(enabled=False):
                await asyncio.sleep(0)
                seen.append(_seen()[:1] + _seen()[2:])
        return [*seen, _seen()]

    async def main() -> list[list[tuple[bool, int | None, int]]]:
        return await asyncio.gather(*(work(index, turns) for index, turns in ((1, 3), (2, 1), (3, 2))))

    for index, turns, seen in zip((1, 2, 3), (3, 1, 2), asyncio.run(main()), strict=True):
        assert seen == [(True, index, 1)] * turns + [(False, 2), OUTSIDE]


def test_generators_may_end_in_any_order() -> None:
    """Regions of two generators that end in the order in which they began; one is closed, one is dropped."""

    def steps(index: int) -> Iterator[None]:
        with te.autocast(recipe=_recipe(index)):
            yield
            yield

    first, second = steps(1), steps(2)
    next(first)
    next(second)
    assert _seen() == (True, 2, 2)
    assert list(first) == [None]
    assert _seen() == (True, 2, 1)
    assert list(second) == [None]
    assert _seen() == OUTSIDE
    third, fourth = steps(3), steps(4)
    next(third)
    next(fourth)
    third.close()
    assert _seen() == (True, 4, 1)
    del fourth
    assert _seen() == OUTSIDE


def test_a_region_that_ends_in_another_thread_leaves_both_alone() -> None:
    """The region's entry belongs to the thread that opened it."""
    region = te.autocast(recipe=_recipe(1))
    thread = threading.Thread(target=region.__enter__)
    thread.start()
    thread.join(LIMIT_S)
    with te.autocast(recipe=_recipe(2)):
        region.__exit__(None, None, None)
        assert _seen() == (True, 2, 1)


def test_state_can_be_saved_and_set() -> None:
    """get_autocast_state and set_autocast_state; the end of a region restores the state outside it."""
    with te.autocast(recipe=_recipe(1)):
        saved = State.get_autocast_state()
        with te.autocast(enabled=False):
            State.set_autocast_state(saved)
            assert _seen() == (True, 1, 2)
        assert _seen() == (True, 1, 1)
    assert State.get_unique_autocast_key(_recipe(1)) == State.get_unique_autocast_key(_recipe(1))
    State.autocast_enter(enabled=True, fp8_recipe=_recipe(5))
    assert _seen() == (True, 5, 1)
    State.autocast_exit()
    State.autocast_enter(enabled=True)
    State.reset()


def test_recipes_check_their_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invalid values, at construction and later; results of queries; the environment's default."""
    recipe = te.MXFP8BlockScaling()
    assert (recipe.margin, recipe.fp8_format, recipe.fp8_dpa, recipe.fp8_mha) == (0, te.Format.E4M3, False, False)
    assert recipe.backward_override is None and recipe.enable_2d_quantization is False
    assert recipe.mxfp8() and te.MXFP8BlockScaling.mxfp8()
    assert not any((recipe.delayed(), recipe.nvfp4(), recipe.float8_current_scaling(), recipe.float8_block_scaling()))
    assert not te.Recipe().mxfp8()
    assert te.Format.HYBRID.value == (448, 57344) and te.Format.E4M3.value.max_bwd == 448
    with pytest.raises(AssertionError, match=r"Pure E5M2 training is not supported\."):
        te.MXFP8BlockScaling(fp8_format=te.Format.E5M2)
    with pytest.raises(ValueError, match="Pure E5M2"):
        recipe.fp8_format = te.Format.E5M2
    with pytest.raises(AssertionError, match="'high_precision', 'dequantized'"):
        te.MXFP8BlockScaling(backward_override="none")
    with pytest.raises(ValueError, match="fp8_dpa"):
        te.MXFP8BlockScaling(fp8_dpa=True)
    assert recipe == te.MXFP8BlockScaling() and "format=E4M3" in repr(recipe)
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "dequantized")
    assert te.MXFP8BlockScaling().backward_override == "dequantized"
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "sometimes")
    with pytest.raises(AssertionError, match="NVTE_BACKWARD_OVERRIDE"):
        te.MXFP8BlockScaling()


def test_recipe_state_makes_quantisers() -> None:
    """New quantisers, E4M3 forward; backward E4M3, or E5M2 with HYBRID; tiles only for weights of the forward pass."""
    hybrid = te.MXFP8BlockScaling(fp8_format=te.Format.HYBRID, enable_2d_quantization=True)
    state = te.RecipeState.create(hybrid, mode="forward", num_quantizers=3, roles=("input", "weight", "output"))
    assert isinstance(state, te.MXFP8BlockScalingRecipeState) and state.dtype == E4M3
    first, second = state.make_quantizers(), state.make_quantizers()
    assert [q.with_2d_quantization for q in first] == [False, True, False]
    assert all(isinstance(q, te.MXFP8Quantizer) and q.dtype == E4M3 for q in first)
    assert not {id(q) for q in first} & {id(q) for q in second}
    backward = te.RecipeState.create(hybrid, mode="backward", num_quantizers=2)
    assert [q.dtype for q in backward.make_quantizers()] == [E5M2, E5M2]
    assert te.RecipeState.create(te.MXFP8BlockScaling(), mode="backward").make_quantizers()[0].dtype == E4M3
    with pytest.raises(RuntimeError, match=r"Unexpected recipe mode \(sideways\)"):
        te.RecipeState.create(hybrid, mode="sideways")
    with pytest.raises(ValueError, match="2 roles for 3"):
        te.RecipeState.create(hybrid, mode="forward", num_quantizers=3, roles=("input", "weight"))
    with pytest.raises(ValueError, match="not supported"):
        te.RecipeState.create(te.Recipe(), mode="forward")


def test_quantized_model_init_is_restored() -> None:
    """State is restored on exceptions too; regions nest; an invalid recipe changes nothing."""
    assert not State.with_fp8_parameters()
    with te.quantized_model_init(preserve_high_precision_init_val=True):
        assert State.with_fp8_parameters() and State.with_high_precision_init_val()
        with te.quantized_model_init(enabled=False):
            assert not State.with_fp8_parameters()
        with pytest.raises(KeyError), te.quantized_model_init():
            raise KeyError
        with pytest.raises(InputError), te.quantized_model_init(recipe=te.Recipe()):
            pass
        assert State.with_fp8_parameters() and State.with_high_precision_init_val()
    assert not State.with_fp8_parameters()


@pytest.mark.parametrize(
    ("refusal", "mode"),
    [("", "native"), ("TOO_OLD", "emulated"), ("TOO_NEW", "emulated")],
)
def test_devices(refusal: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulation is available and reported; strict answers and raises with TransformerEngine's messages."""
    text = getattr(te.support, refusal) if refusal else ""
    monkeypatch.setattr(te.support, "_refusal", lambda device: text)
    assert te.is_mxfp8_available() is True and te.mxfp8_mode() == mode
    available, reason = te.is_mxfp8_available(return_reason=True)
    assert available and (reason == "" if not refusal else reason == f"emulated: {text}")
    assert te.is_mxfp8_available(True, strict=True) == (not refusal, text)
    if refusal:
        with pytest.raises(RuntimeError) as caught:
            te.mxfp8_mode(strict=True)
        assert str(caught.value) == text


def test_texts_of_transformer_engine() -> None:
    """Messages equal TransformerEngine's word for word."""
    assert te.support.TOO_OLD == "Device compute capability 10.0 or higher required for MXFP8 execution."
    assert te.support.TOO_NEW == "MXFP8 (for all gemm layouts) is not supported on 12.0+ architectures yet."


def test_emulation_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning per process, for any number of regions, quantisers and threads; no warning if strict refuses."""
    monkeypatch.setattr(te.support, "_refusal", lambda device: te.support.TOO_OLD)
    te.support._warn_emulated.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="capability"):
            te.autocast(strict=True).__enter__()
        assert not caught
        for _ in range(3):
            with te.autocast(), te.autocast():
                te.MXFP8Quantizer(torch.float8_e4m3fn)(torch.zeros(32, 32))
        thread = threading.Thread(target=lambda: te.autocast().__enter__())
        thread.start()
        thread.join(LIMIT_S)
    assert [str(each.message).split(":")[0] for each in caught] == ["MXFP8 is emulated on this device"]


def test_recipes_are_checked_by_name() -> None:
    """MXFP8 runs and needs rows in multiples of 32; another recipe is refused."""
    te.check_recipe_support(te.MXFP8BlockScaling())
    assert te.get_align_size_for_quantization(te.MXFP8BlockScaling()) == 32
    assert te.get_align_size_for_quantization(te.Recipe()) == 16
    with pytest.raises(InputError, match="runs MXFP8BlockScaling"):
        te.check_recipe_support(te.Recipe())
    assert te.is_symm_backed(torch.zeros(1)) is False
