"""`ep_kernel` on signatures: groups, order, and refused declarations."""

from typing import Any, NamedTuple

import pytest
import triton.language as tl

from triton_ep.kernels import spec


class _Group(NamedTuple):
    size: Any
    y_ptr: Any
    BLOCK: tl.constexpr


def _kernel(first, x_ptr, group: _Group, LAST: tl.constexpr):
    """Takes an integer before pointers, as a kernel may."""


@pytest.fixture(autouse=True)
def _declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Isolate the declarations of each test."""
    monkeypatch.setattr(spec, "_DECLARED", {})


def test_fields_of_groups_are_arguments() -> None:
    """Launches name the fields, pointers first; compiled kernels receive them in the kernel's order."""
    spec.ep_kernel(x_ptr="*{WORD}", y_ptr="*i32", specialised=("size",))(_kernel)
    (declared,) = spec._DECLARED.values()
    assert list(declared.arguments.items()) == [
        ("x_ptr", "*{WORD}"),
        ("y_ptr", "*i32"),
        ("first", "i32"),
        ("size", "i32"),
    ]
    assert declared.runtime_order == ("first", "x_ptr", "size", "y_ptr")
    assert declared.constexprs == ("BLOCK", "LAST")
    values = {"first": 1, "x_ptr": 2, "size": 3, "y_ptr": 4, "BLOCK": 5, "LAST": 6}
    assert [each.of(values) for each in declared.parameters] == [1, 2, _Group(3, 4, 5), 6]
    *_, group, last = declared.for_interpreter(values)
    assert isinstance(group, _Group) and (group[:2], group.BLOCK.value, last) == ((3, 4), 5, 6)


@pytest.mark.parametrize(
    ("types", "match"),
    [
        ({"x_ptr": "*i32", "y_ptr": "*i32", "z_ptr": "*i32"}, r"no run-time arguments \['z_ptr'\]"),
        ({"x_ptr": "*i32", "y_ptr": "*i32", "specialised": ("BLOCK",)}, r"no run-time arguments \['BLOCK'\]"),
        ({"x_ptr": "*i32"}, r"\['y_ptr'\] are declared without a type"),
    ],
)
def test_declarations_that_do_not_fit_are_refused(types: dict[str, Any], match: str) -> None:
    """The error names the argument."""
    with pytest.raises(TypeError, match=match):
        spec.ep_kernel(**types)(_kernel)


def test_two_arguments_of_one_name_are_refused() -> None:
    """A launch could not tell the two apart."""

    def kernel(size, group: _Group):
        """Has two sizes."""

    with pytest.raises(TypeError, match=r"two of the arguments .* have one name"):
        spec.ep_kernel(y_ptr="*i32")(kernel)
