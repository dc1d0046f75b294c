"""Activation checkpointing whose recomputation sees the recipe of the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.utils.checkpoint

from triton_ep.integrations.te.state import current_state, restored


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of torch.utils.checkpoint (use_reentrant=False): the recomputation gets the state of the forward."""
    return nullcontext(), restored(current_state())


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """torch.utils.checkpoint.checkpoint of function(*args, **kwargs), recomputed under the recipe of the forward pass.

    Arguments:
        use_reentrant: as in torch.utils.checkpoint.
        kwargs: of `function`, and `preserve_rng_state` of torch.utils.checkpoint.
    """
    if not use_reentrant:
        return torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False, context_fn=checkpoint_contexts, **kwargs
        )
    state = current_state()
    options = {name: kwargs.pop(name) for name in ("preserve_rng_state",) if name in kwargs}

    def run(*given: Any) -> Any:
        if not torch.is_grad_enabled():  # the first time
            return function(*given, **kwargs)
        with restored(state):
            return function(*given, **kwargs)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=True, **options)
