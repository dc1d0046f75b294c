"""Speed-ups of Triton's interpreter that change no result.

As shipped, each launch and each call of a device function searches triton.language for members to patch, each integer
addition is repeated in int64 for a check whose result is discarded, each dtype look-up builds a table, and each value
creates nested objects for its shape. Here the search is done once and replayed, the check is off, and tables and shapes
are kept. shortcuts.py, operators.py and memory.py speed up single operations; pure.py leaves out repeated ones.
"""

import dataclasses
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

from . import memory, operators, pure, shortcuts


def apply() -> None:
    """Change the interpreter's module. Once per process."""
    interpreter._get_np_dtype = _cached_np_dtype(interpreter._get_np_dtype)
    options = interpreter.interpreter_builder.options
    if not options.debug:  # without debug the check ends in a device_assert that returns at once
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    interpreter._patch_lang = LanguagePatch(interpreter._patch_lang, _quick)
    _keep_shapes()
    _keep_integers()
    shortcuts.apply()
    pure.apply()


def translate_kernels() -> None:
    """Rewrite the functions of all loaded kernel modules, which Triton otherwise does at their first call."""
    for name, module in list(sys.modules.items()):
        if name.startswith("triton_ep.kernels."):
            for value in list(vars(module).values()):  # rewriting adds names to the module
                if isinstance(value, interpreter.InterpretedFunction):
                    value.rewrite()


def _quick(owner: Any, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    if owner is tl.tensor:
        return operators.quick(name, stock)
    return memory.quick(name, stock) if owner in (tl, tl.core) else stock


def _keep_shapes() -> None:
    """Let values of one shape share the objects that describe the shape; no code changes these objects."""
    stock_type, stock_value = tl.block_type.__init__, tl.tensor.__init__
    lengths_of: dict[tuple[int, ...], Any] = {}
    types: dict[tuple[Any, ...], tuple[Any, Any, str]] = {}
    values: dict[int, tuple[Any, Any, Any]] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        lengths = tuple([extent.value if isinstance(extent, tl.constexpr) else extent for extent in shape])
        known = types.get((lengths, element_ty.name))
        if known is None:
            stock_type(self, element_ty, shape)
            self.shape = lengths_of.setdefault(lengths, self.shape)
            types[lengths, element_ty.name] = self.shape, self.numel, self.name
            return
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known

    def init_value(self: Any, handle: Any, type: Any) -> None:
        lengths = type.shape if type.is_block() else None
        known = values.get(id(lengths))
        if known is None or known[0] is not lengths:
            stock_value(self, handle, type)
            values[id(lengths)] = lengths, self.shape, self.numel  # keeps `lengths` alive, whose id is the key
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        _, self.shape, self.numel = known

    tl.block_type.__init__ = init_type
    tl.tensor.__init__ = init_value


def _keep_integers() -> None:
    """Convert an integer argument of a kernel only once; no code changes a value's data."""
    stock = interpreter._implicit_cvt
    known: dict[int, tuple[Any, Any]] = {}

    def convert(arg: Any) -> Any:
        if type(arg) is not int:
            return stock(arg)
        kept = known.get(arg)
        if kept is None:
            value = stock(arg)
            value.handle.data.flags.writeable = False
            kept = value.handle.data, value.type
            operators.keep(known, arg, kept)
        return tl.tensor(interpreter.TensorHandle(*kept), kept[1])

    interpreter._implicit_cvt = convert


def _cached_np_dtype(stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter's map from Triton's dtypes to numpy's, remembered by name."""
    known: dict[str, Any] = {}

    def get_np_dtype(tt_dtype: Any) -> Any:
        if isinstance(tt_dtype, tl.block_type):
            tt_dtype = tt_dtype.element_ty
        if isinstance(tt_dtype, tl.pointer_type):
            return stock(tt_dtype)
        name = tt_dtype.name
        if name not in known:
            known[name] = stock(tt_dtype)
        return known[name]

    return get_np_dtype


class LanguagePatch:
    """Replaces the interpreter's `_patch_lang`: finds the same changes once, and applies them once per launch.

    A device function called inside a launch finds the language already patched.
    """

    def __init__(self, stock: Callable[[Any], Any], quick: Callable[..., Any]) -> None:
        """quick: returns a builtin that tries a fast path before the given one, by its owner and name."""
        self._stock, self._quick = stock, quick
        self._changes: list[tuple[Any, str, Any, Any]] | None = None
        self._applied = False

    def __call__(self, fn: Any) -> Any:
        """Patch the language for `fn`; the result's `restore()` undoes what this call did."""
        if self._applied:
            return _NOTHING
        if self._changes is None:
            self._changes = self.find_changes()
        for owner, name, _, new in self._changes:
            setattr(owner, name, new)
        self._applied = True
        return self

    def restore(self) -> None:
        """Restore the language to its state before the launch."""
        for owner, name, old, _ in self._changes or ():
            if old is interpreter._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
        self._applied = False

    def find_changes(self) -> list[tuple[Any, str, Any, Any]]:
        """(owner, name, before, after) of all changes of the stock patch, for a function that uses all members."""
        probe = FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
        scope = self._stock(probe)
        first: dict[tuple[int, str], tuple[Any, str, Any, Any]] = {}
        for owner, name, old in scope._changes:
            new = getattr(owner, name)
            builtin = (getattr(new, "__kwdefaults__", None) or {}).get("member")
            if builtin is not None:
                new = self._quick(owner, name, shortcuts.direct(builtin, interpreter.interpreter_semantic))
            first.setdefault((id(owner), name), (owner, name, old, new))
        scope.restore()
        # 3.6 converts the whole array, which numpy 2.4 refuses: `range(n)` and slices need one number.
        key = (id(tl.tensor), "__index__")
        owner, name, old, _ = first[key]
        first[key] = (owner, name, old, lambda self: int(self.handle.data.item()))
        return list(first.values())


class _Nothing:
    """The patch of a call that changed nothing."""

    def restore(self) -> None:
        """Do nothing: no change to undo."""


_NOTHING = _Nothing()
