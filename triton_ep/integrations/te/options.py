"""TransformerEngine's keyword arguments that have no named parameter here: used, ignored, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from triton_ep.errors import InputError
from triton_ep.integrations import arguments as check

_PARALLEL = ("sequence_parallel", "tp_group", "tp_size", "parallel_mode")
_PARALLEL_MODES = (None, "column", "row")
_REFUSED = (
    "parameters_split",
    "single_grouped_bias",
    "single_grouped_weight",
    "symmetric_ar_type",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
    "ub_overlap_ag",
    "ub_overlap_rs",
    "ub_overlap_rs_dgrad",
)
"""Arguments that must be left out, or be None or False."""
_WITHOUT_EFFECT = ("ub_name", "use_grouped_tensor")
"""Ignored arguments: the name of a user buffer, and the choice between TransformerEngine's grouped GEMMs."""


def refuse(module: str, **given: Any) -> None:
    """Raise InputError if an argument of a call is neither None nor False."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise InputError(
                f"{module} got {name}={check.shown(value)}: results and gradients are high-precision tensors of their "
                "own in triton_ep.integrations.te. Leave it out, and quantise or copy the result."
            )


@dataclass(frozen=True)
class Options:
    """The arguments that a module uses.

    Attributes:
        fuse_wgrad_accumulation: add gradients of weights to their `main_grad` in place of `grad`.
        delay_wgrad_compute: compute gradients of weights in `backward_dw`.
        save_original_input: save the unquantised input for the backward pass, not the quantised one.
        get_rng_state_tracker, rng_tracker_name: the tracker whose random state fills the weights.
        parallel_mode: stored; no effect over one rank.
    """

    fuse_wgrad_accumulation: bool = False
    delay_wgrad_compute: bool = False
    save_original_input: bool = False
    get_rng_state_tracker: Callable[[], Any] | None = None
    rng_tracker_name: str | None = None
    parallel_mode: str | None = None

    @contextmanager
    def rng(self) -> Iterator[None]:
        """Context that draws from the tracker's random state, if a tracker is given."""
        if self.get_rng_state_tracker is None:
            yield
            return
        names = () if self.rng_tracker_name is None else (self.rng_tracker_name,)
        with self.get_rng_state_tracker().fork(*names):
            yield


def parse(module: str, given: dict[str, Any]) -> Options:
    """Parse the keyword arguments `given` to the class named `module`.

    Raises:
        TypeError: a name that TransformerEngine does not have either.
        InputError: a value that requests an unsupported feature.
    """
    used = Options.__dataclass_fields__
    unknown = sorted(set(given) - set(used) - set(_PARALLEL) - set(_REFUSED) - set(_WITHOUT_EFFECT))
    if unknown:
        raise TypeError(f"{module}() got an unexpected keyword argument {unknown[0]!r}")
    refused = sorted(name for name in _REFUSED if given.get(name) not in (None, False))
    if refused:
        raise InputError(
            f"{module} got {', '.join(f'{name}={given[name]!r:.40}' for name in refused)}: split or packed parameters, "
            "user buffers and symmetric all-reduce are not part of triton_ep.integrations.te. Leave them out."
        )
    _check_parallel(module, given)
    return Options(**{name: value for name, value in given.items() if name in used})


def _check_parallel(module: str, given: dict[str, Any]) -> None:
    """Refuse tensor parallelism over more than one rank, and modes that TransformerEngine does not have."""
    mode = given.get("parallel_mode")
    if mode not in _PARALLEL_MODES:
        raise InputError(f"{module} got parallel_mode={mode!r}; choose one of {_PARALLEL_MODES}.")
    group = given.get("tp_group")
    try:
        size = check.integer("tp_size", given.get("tp_size", 1), 1) if group is None else dist.get_world_size(group)
    except (AttributeError, TypeError, RuntimeError) as error:
        raise InputError(f"{module} got a tp_group that is no process group: {check.shown(group)}.") from error
    if size != 1:
        raise InputError(
            f"{module} got {'tp_size' if group is None else 'a tp_group'} of {size}: tensor parallelism is not part of "
            "triton_ep.integrations.te. Pass 1, or give each rank the sizes of its own part."
        )
