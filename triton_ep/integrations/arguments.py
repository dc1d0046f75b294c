"""Checks of arguments that no layer checks, or that a layer knows under another name than the caller.

Hot path: they format no message unless a check fails."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy
import torch

from triton_ep.errors import ConfigError, EPError, InputError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def renamed(**names: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Decorator of a call of an interface: errors of layers get the names of its arguments."""

    def decorate(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(call)
        def renaming(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            try:
                return call(*args, **kwargs)
            except InputError as error:
                error.with_names(names)
                raise

        return renaming

    return decorate


def tensor(
    name: str,
    value: Any,
    dim: int | None = None,
    dtypes: tuple[torch.dtype, ...] = (),
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return `value` if it is a tensor with these properties.

    Args:
        dim: number of dimensions; None: any.
        dtypes: allowed dtypes; empty: any.
        device: None: any.

    Raises:
        InputError: `value` is not such a tensor.
    """
    if isinstance(value, torch.Tensor):
        if (dim is None or value.dim() == dim) and (not dtypes or value.dtype in dtypes):
            if value.layout is not torch.strided:
                raise InputError(f"{name} must be a strided tensor, got {value.layout}. Pass {name}.to_dense().")
            if device is None or value.device == device:
                return value
            raise InputError(f"{name} must be on {device}, got {value.device}.")
        wanted = "" if dim is None else f" of {dim} dimension{'s' * (dim != 1)}"
        kinds = f", {' or '.join(map(str, dtypes))}" if dtypes else ""
        raise InputError(f"{name} must be a tensor{wanted}{kinds}, got {list(value.shape)} {value.dtype}.")
    raise InputError(f"{name} must be a tensor, got {shown(value)}.")


def optional_tensor(
    name: str, value: Any, dim: int | None = None, dtypes: tuple[torch.dtype, ...] = ()
) -> torch.Tensor | None:
    """As `tensor`, or None."""
    return None if value is None else tensor(name, value, dim, dtypes)


def integer(name: str, value: Any, least: int, error: type[EPError] = InputError, most: int = 1 << 31) -> int:
    """Return `value` as an int from `least` to `most`. Integers of numpy and tensors with one integer are accepted.

    Raises:
        error: `value` is no integer, or is out of range.
    """
    if type(value) is int and least <= value <= most:
        return value
    try:
        number = operator.index(value)
    except (TypeError, RuntimeError):
        number = least - 1
    if not least <= number <= most or isinstance(value, bool):
        limit = f"at least {least}" if number <= most else f"at most {most}"
        raise error(f"{name} must be an integer of {limit}, got {shown(value)}.")
    return number


def optional_integer(name: str, value: Any, least: int, error: type[EPError] = InputError) -> int | None:
    """As `integer`, or None."""
    return None if value is None else integer(name, value, least, error)


def flag(name: str, value: Any, error: type[EPError] = InputError) -> bool:
    """Return `value` as a bool; 0, 1 and bools of numpy are accepted.

    Raises:
        error: `value` is something else.
    """
    if value is True or value is False:
        return bool(value)
    if not isinstance(value, int | numpy.bool_) or value not in (0, 1):
        raise error(f"{name} must be True or False, got {shown(value)}.")
    return bool(value)


def dtype(name: str, value: Any) -> torch.dtype:
    """Return `value` if it is a torch.dtype.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, torch.dtype):
        raise ConfigError(f"{name} must be a torch.dtype, got {shown(value)}.")
    return value


def device(name: str, value: Any) -> torch.device:
    """Return `value`, a device or its name, as a torch.device.

    Raises:
        InputError: it is neither.
    """
    try:
        return torch.device(value)
    except (TypeError, RuntimeError, ValueError) as error:
        raise InputError(f"{name} must be a device, got {shown(value)}.") from error


def sizes(name: str, value: Any) -> tuple[int, ...]:
    """Return `value` as a shape.

    Raises:
        InputError: it is no sequence of sizes.
    """
    if not isinstance(value, tuple | list) or not all(type(n) is int and 0 <= n < 1 << 48 for n in value):
        raise InputError(f"{name} must be a sequence of sizes, got {shown(value)}.")
    return tuple(value)


def seconds(name: str, value: Any) -> float:
    """Return `value` if it is a time in seconds above 0 and up to 2000.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 2000:
        raise ConfigError(f"{name} must be above 0 and at most 2000 seconds, got {shown(value)}.")
    return value


def shown(value: Any) -> str:
    """Format a value for an error message: tensors by shape and dtype, other values cut short."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} {value.dtype}"
    text = repr(value)
    kind = "" if isinstance(value, int | float | str | torch.dtype | None) else f"{type(value).__name__} "
    return f"{kind}{text if len(text) <= 60 else text[:57] + '...'}"
