"""Activation checkpointing that recomputes under the recipe of the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch.utils.checkpoint

from triton_ep.errors import InputError
from triton_ep.integrations.te.state import AutocastState, current_state, restored


class _Recomputation:
    """Region of a recomputation, entered once per backward pass through the graph: more than once with retain_graph.

    Arguments:
        state: state of `autocast` in the forward pass.
        tracker: tracker of random states. The region sets the states in `drawn` and restores the current ones at its
            end. None: no tracker.
    """

    def __init__(self, state: AutocastState, tracker: Any = None, drawn: Any = None) -> None:
        self._state, self._tracker, self._drawn = state, tracker, drawn
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(restored(self._state))
            if self._tracker is not None:
                stack.callback(self._tracker.set_states, self._tracker.get_states())
                self._tracker.set_states(self._drawn)
            self._open.append(stack.pop_all())

    def __exit__(self, *exc: object) -> None:
        self._open.pop().close()


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` for torch.utils.checkpoint (use_reentrant=False): recomputes under the state of the forward pass."""
    return nullcontext(), _Recomputation(current_state())


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    **kwargs: Any,
) -> Any:
    """torch.utils.checkpoint.checkpoint of function(*args, **kwargs), recomputed under the recipe of the forward pass.

    Arguments:
        use_reentrant: as in torch.utils.checkpoint.
        distribute_saved_activations: must be False.
        get_rng_state_tracker: returns the tracker of random states (`get_states`, `set_states`) that `function` draws
            from. The recomputation draws the same numbers.
        tp_group: accepted; nothing is distributed.
        kwargs: arguments of `function`, and `preserve_rng_state` of torch.utils.checkpoint.

    Raises:
        InputError: distribute_saved_activations.
    """
    if distribute_saved_activations:
        raise InputError("checkpoint: distribute_saved_activations=True needs tensor parallelism (not supported).")
    tracker = None if get_rng_state_tracker is None else get_rng_state_tracker()
    recomputation = _Recomputation(current_state(), tracker, None if tracker is None else tracker.get_states())
    if not use_reentrant:
        return torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), recomputation), **kwargs
        )
    options = {name: kwargs.pop(name) for name in ("preserve_rng_state",) if name in kwargs}

    def run(*given: Any) -> Any:
        if not torch.is_grad_enabled():  # the forward pass; the recomputation runs with gradients enabled
            return function(*given, **kwargs)
        with recomputation:
            return function(*given, **kwargs)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=True, **options)
