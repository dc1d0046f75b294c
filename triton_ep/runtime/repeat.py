"""Make launches again, with other tensors and a few other numbers, in one call.

Most of the host time of a call is that of Python code that works out what each kernel is launched with, and of looking
at the arguments of each launch. When a call has the same kinds of arguments as an earlier one, only addresses and a few
numbers differ. So the launches of that one are noted (`Launcher.noted`), and `repeat` generates a function that makes
them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from triton_ep.runtime.launch import INTERPRETING, Launch

ALIGNED = 16
"""Bytes: kernels are compiled for addresses that are multiples of this."""


class _Differs(Exception):
    """A launch whose repetition could differ from what the call itself would launch."""


def repeat(
    launches: Sequence[Launch], tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, str]
) -> Callable[..., None] | None:
    """A function that makes these launches again on the current stream.

    It takes the tensors by the names in `tensors`, in place of the noted ones, then the numbers, each once, by the
    values of `numbers`; all in this order. The new tensors must have the dtypes of the noted ones, and lie at multiples
    of `ALIGNED` bytes. Nothing is checked.

    tensors: of the noted launches: those that change. All other tensors are passed again, and kept.
    numbers: names of integers of kernels that change, and under which name the function takes their values.

    Returns None if that would not be the same: launches on other streams, tensors that overlap a changing one without
    being at its start, or that have no memory, kernels that look at each launch.
    """
    scope: dict[str, Any] = {"stream": raw_stream, "device": None if INTERPRETING else torch.cuda.current_device()}
    given = [*tensors, *dict.fromkeys(numbers.values())]
    lines = [f"def again({', '.join(given)}):"]
    if not INTERPRETING:
        lines.append("    where = stream(device)")
    try:
        if len({tensor.data_ptr() for tensor in tensors.values()} | {0}) <= len(tensors):
            raise _Differs
        for number, launch in enumerate(launches):
            lines.append(f"    {_written(number, launch, tensors, numbers, scope)}")
    except _Differs:
        return None
    exec("\n".join([*lines, "    return"]), scope)
    made: Callable[..., None] = scope["again"]
    return made


def raw_stream(device: int) -> int:
    """Address of the current stream. Its public counterparts take microseconds."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def _written(
    number: int,
    launch: Launch,
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, str],
    scope: dict[str, Any],
) -> str:
    """One launch as text; what it names besides the arguments of the function is added to `scope`."""
    launcher, grid, args, stream = launch
    if stream is not None or any(name in numbers for name in launcher.specialised):
        raise _Differs
    texts = []
    for name, arg in zip(launcher.names, args, strict=True):
        if isinstance(arg, torch.Tensor):
            texts.append(_tensor(f"{name}_{number}", arg, tensors, scope))
        elif isinstance(arg, int):
            texts.append(numbers.get(name, str(int(arg))))
        else:
            raise _Differs
    if grid == 0:
        return "pass"
    if INTERPRETING:
        scope[f"launch_{number}"] = launcher.launch_in_order
        return f"launch_{number}({grid}, ({''.join(f'{text}, ' for text in texts)}), None)"
    start = scope[f"start_{number}"] = launcher.start_of(args)
    if start is None:
        raise _Differs
    return f"start_{number}({', '.join([str(grid), 'where', *texts])})"


def _tensor(name: str, arg: torch.Tensor, tensors: Mapping[str, torch.Tensor], scope: dict[str, Any]) -> str:
    """A tensor of a launch as text: interpreted kernels take tensors, compiled ones addresses."""
    address = arg.data_ptr()
    if address % ALIGNED:
        raise _Differs
    for given, tensor in tensors.items():
        if tensor.data_ptr() == address:
            if not INTERPRETING:
                return f"{given}.data_ptr()"
            if tensor.dtype == arg.dtype:
                return given
            scope[f"dtype_of_{name}"] = arg.dtype
            return f"{given}.view(dtype_of_{name})"
        if tensor.untyped_storage().data_ptr() == arg.untyped_storage().data_ptr():
            raise _Differs
    scope[name] = arg  # keeps its memory
    return name if INTERPRETING else str(address)
