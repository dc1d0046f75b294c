"""Generated functions that make noted launches again (triton_ep/runtime/repeat.py), interpreted and compiled."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from triton_ep.runtime import repeat as repeats
from triton_ep.runtime.launch import Launch

STREAM = 77
Passed = list[tuple[Any, ...]]


@dataclass
class _Launcher:
    """Stand-in for a `Launcher` of a kernel with two tensors and two integers; notes what it launches."""

    passed: Passed = field(default_factory=list)
    names: tuple[str, ...] = ("x_ptr", "y_ptr", "rows", "hidden")
    specialised: tuple[str, ...] = ()
    compiled: bool = True

    def launch_in_order(self, grid: int, args: tuple[Any, ...], stream: None) -> None:
        self.passed.append((grid, *args))

    def start_of(self, args: tuple[Any, ...]) -> Any:
        return (lambda *given: self.passed.append(given)) if self.compiled else None


def _launch(launcher: _Launcher, *args: Any, grid: int = 3, stream: Any = None) -> Launch:
    return Launch(launcher, grid, args, stream)


@pytest.fixture(params=["interpreted", "compiled"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Kernels are interpreted, and get tensors, or compiled, and get a stream and addresses."""
    is_compiled = bool(request.param == "compiled")
    monkeypatch.setattr(repeats, "INTERPRETING", not is_compiled)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(repeats, "raw_stream", lambda device: STREAM + device)
    return is_compiled


def _told(compiled: bool, grid: int, *args: Any) -> tuple[Any, ...]:
    """What a launch gets."""
    if not compiled:
        return (grid, *args)
    return (grid, STREAM + 1, *[arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args])


def _same(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    alike = [
        (one.data_ptr(), one.dtype) == (two.data_ptr(), two.dtype) if isinstance(one, torch.Tensor) else one == two
        for one, two in zip(found, wanted, strict=True)
    ]
    return all(alike)


def test_tensors_and_numbers_that_change(compiled: bool) -> None:
    """New tensors take the places of the noted ones, others and other numbers stay, in the order of the launches."""
    launcher, other = _Launcher(), _Launcher()
    first, second, table = (torch.zeros(8) for _ in range(3))
    noted = [_launch(launcher, first, table, 5, 7), _launch(other, second, first, 6, 8, grid=2)]
    again = repeats.repeat(noted, {"a": first, "b": second}, {"rows": "count"})
    assert again is not None
    for _ in range(2):
        new_first, new_second = torch.ones(8), torch.ones(8)
        again(new_first, new_second, 9)
        assert _same(launcher.passed.pop(), _told(compiled, 3, new_first, table, 9, 7))
        assert _same(other.passed.pop(), _told(compiled, 2, new_second, new_first, 9, 8))


def test_other_dtypes_of_the_same_memory(compiled: bool) -> None:
    """Interpreted kernels get views with the dtypes of the noted launch."""
    launcher, tensor = _Launcher(), torch.zeros(8, dtype=torch.bfloat16)
    again = repeats.repeat([_launch(launcher, tensor.view(torch.int64), tensor, 1, 1)], {"x": tensor}, {})
    assert again is not None
    new = torch.ones(8, dtype=torch.bfloat16)
    again(new)
    assert _same(launcher.passed[0], _told(compiled, 3, new.view(torch.int64), new, 1, 1))


def test_memory_of_other_tensors_is_kept(compiled: bool) -> None:
    """A tensor that does not change lives as long as the function."""
    launcher, tensor = _Launcher(), torch.zeros(8)
    again = repeats.repeat([_launch(launcher, tensor, torch.full((8,), 3.0), 1, 1)], {"x": tensor}, {})
    assert again is not None
    kept = [value for value in again.__globals__.values() if isinstance(value, torch.Tensor)]
    assert len(kept) == 1 and bool((kept[0] == 3).all())


def test_grids_of_no_program_launch_nothing(compiled: bool) -> None:
    """As in the noted call."""
    launcher, tensor = _Launcher(), torch.zeros(8)
    again = repeats.repeat([_launch(launcher, tensor, tensor, 1, 1, grid=0)], {"x": tensor}, {})
    assert again is not None
    again(torch.zeros(8))
    assert launcher.passed == []


def test_kernels_without_arguments(compiled: bool) -> None:
    """Those of a layer may take only what is the same in all of its launches."""
    launcher, tensor = _Launcher(names=()), torch.zeros(8)
    again = repeats.repeat([_launch(launcher)], {"x": tensor}, {})
    assert again is not None
    again(tensor)
    assert launcher.passed == [_told(compiled, 3)]


@pytest.mark.parametrize("why", ["stream", "inside", "empty", "twice", "unaligned", "specialised", "boxes"])
def test_launches_that_may_differ_are_not_repeated(compiled: bool, why: str) -> None:
    """Side streams, parts of changing tensors, tensors that cannot be told apart, kernels for other arguments."""
    launcher = _Launcher(specialised=("rows",) if why == "specialised" else ())
    memory = torch.zeros(64)
    tensor, table = memory[:8], torch.zeros(8)
    args: list[Any] = [tensor, table, 1, 1]
    tensors = {"x": tensor}
    if why == "inside":
        args[1] = memory[16:24]
    elif why == "empty":
        tensors["y"] = torch.zeros(0)
    elif why == "twice":
        tensors["y"] = memory[:4]
    elif why == "unaligned":
        args[1] = torch.zeros(8)[1:]
    elif why == "boxes":
        args[1] = object()
    noted = _launch(launcher, *args, stream=object() if why == "stream" else None)
    assert repeats.repeat([noted], tensors, {"rows": "rows"}) is None


def test_kernels_that_look_at_each_launch_are_not_repeated(compiled: bool) -> None:
    """Compiled ones without a function that starts them; interpreted ones need none."""
    launcher, tensor = _Launcher(compiled=False), torch.zeros(8)
    found = repeats.repeat([_launch(launcher, tensor, tensor, 1, 1)], {"x": tensor}, {})
    assert (found is None) == compiled
