"""Describe the call of each rank when ranks of a layer make different calls (kernels/device/calls.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from triton_ep.context.agreement import named
from triton_ep.errors import CallMismatch
from triton_ep.kernels.device import codes

_LOW_LATENCY = "low-latency "


def mismatch(operation: int, tags: Sequence[int]) -> CallMismatch:
    """The error for a status record of this operation (CALLS_*).

    tags: the tag of every rank, plus one; 0 if this rank had not received it yet.
    """
    combines = operation in (codes.CALLS_COMBINE, codes.CALLS_LL_COMBINE)
    prefix = _LOW_LATENCY if operation in (codes.CALLS_LL_DISPATCH, codes.CALLS_LL_COMBINE) else ""
    name = combine_name if combines else dispatch_name
    return of_calls({rank: tag - 1 for rank, tag in enumerate(tags) if tag}, lambda tag: prefix + name(tag), True)


def of_calls(reported: Mapping[int, int], name: Callable[[int], str], failed: bool) -> CallMismatch:
    """The error for these tags, or host words, of ranks. failed: the layer is unusable from now on."""
    ranks: dict[str, list[int]] = {}
    for rank, tag in reported.items():
        ranks.setdefault(name(tag), []).append(rank)
    where = "; ".join(f"{named(members)} in {call}" for call, members in ranks.items())
    remedy = "The layer has failed: finalize it on all ranks and make another." if failed else "No row was sent."
    return CallMismatch(
        f"ranks of one layer are in different calls: {where}. All ranks must make the same calls in the same order, "
        f"with descriptors of the same dispatch, and with weights on all ranks or on none. {remedy}"
    )


def dispatch_name(word: int) -> str:
    """Name the call of a host word."""
    if word & codes.HOST_REJECTED:
        return "a dispatch whose arguments it rejected"
    name = "dispatch_compact" if word & codes.HOST_COMPACT else "dispatch"
    if word & codes.HOST_AGAIN:
        name += f"_again by the routing of dispatch number {word >> codes.HOST_SHIFT}"
    elif word & codes.HOST_COMPACT and not word & codes.HOST_READS:
        name += " with num_rows"
    if word & codes.HOST_SCALED:
        name += " of one-byte rows"
    return name + _weights(bool(word & codes.HOST_WEIGHTS)) + _pass(bool(word & codes.HOST_BACKWARD))


def combine_name(tag: int) -> str:
    """Name the call of a combine's tag."""
    if tag == codes.MIXED_TAG:
        return "combines that differ within its node"
    name = "combine of values per slot" if tag & codes.COMBINE_SLOTS else "combine"
    name += f" of dispatch number {tag >> codes.COMBINE_SHIFT}"
    if tag & codes.COMBINE_TOKEN_WEIGHTS:
        return name + " with weights per token"
    name += _weights(bool(tag & codes.COMBINE_WEIGHTS)) + _pass(bool(tag & codes.COMBINE_BACKWARD))
    return name + " next to gradients of weights" * bool(tag & codes.COMBINE_BESIDE)


def _weights(given: bool) -> str:
    return " with weights" if given else " without weights"


def _pass(backward: bool) -> str:
    return " in a backward pass" if backward else ""
