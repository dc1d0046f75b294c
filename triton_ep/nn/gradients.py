"""Gradient clipping for models with MoE modules, whose experts differ between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from triton_ep.distributed.dtensors import is_dtensor, local_part
from triton_ep.errors import InputError
from triton_ep.nn.moe import MoE


@torch.no_grad()
def clip_grad_norm_(module: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients so that their norm, experts of all ranks included, is at most `max_norm`. Collective.

    torch.nn.utils.clip_grad_norm_ counts the experts of its own rank only, so ranks would scale by different factors.
    Of a parameter with a float32 `main_grad`, as Megatron-Core trains, that is the gradient where `grad` is None, or
    where `grad_added_to_main_grad` says that `grad` is a placeholder.

    Arguments:
        module: a model with MoE modules. Its other parameters, and their gradients, are the same on every rank, or
            FSDP's shards.
        max_norm: bound of the norm of all gradients together.
        norm_type: p of the p-norm; inf: the largest magnitude.

    Returns:
        The norm before scaling, [] float32, the same on all ranks; not finite if a gradient is not finite.

    Raises:
        InputError: max_norm is negative, or norm_type is not positive.
    """
    if max_norm < 0 or norm_type <= 0:
        raise InputError(f"max_norm must be at least 0 and norm_type above 0, got {max_norm} and {norm_type}.")
    # By their experts, which `MoE.over` shares between two modules.
    moes = list({id(each.experts): each for each in module.modules() if isinstance(each, MoE)}.values())
    of_experts = {id(parameter) for moe in moes for parameter in moe.experts.parameters()}
    gradients = [(id(p) in of_experts, grad) for p in module.parameters() if (grad := _gradient(p)) is not None]
    dense = [grad for is_expert, grad in gradients if not is_expert]
    norms = []
    if dense:
        norm = torch.nn.utils.get_total_norm(dense, norm_type)
        norms.append(norm.full_tensor() if is_dtensor(norm) else norm)
    norms += [_norm_of_experts(moe, norm_type) for moe in moes]
    total = _norm([norm.float() for norm in norms], norm_type) if norms else torch.zeros(())
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for _, grad in gradients:
        local_part(grad).mul_(factor.to(grad.device))
    return total


def _gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    main: torch.Tensor | None = getattr(parameter, "main_grad", None)
    if main is not None and (parameter.grad is None or getattr(parameter, "grad_added_to_main_grad", False)):
        return main
    return parameter.grad


def _norm_of_experts(moe: MoE, norm_type: float) -> torch.Tensor:
    """Norm of the expert gradients of all ranks. Collective over the module's group, then over FSDP's shard group."""
    parameters = list(moe.experts.parameters())
    local = [local_part(grad) for grad in map(_gradient, parameters) if grad is not None]
    device = local_part(parameters[0]).device
    norm = _norm([torch.linalg.vector_norm(grad.float(), norm_type) for grad in local], norm_type).to(device)
    groups: list[Any] = [moe._connection.group]
    mesh = next((p.device_mesh for p in parameters if is_dtensor(p)), None)
    if mesh is not None:
        groups += [mesh.get_group(dim) for dim in range(mesh.ndim)]
    largest = norm_type == torch.inf
    share = norm if largest else norm**norm_type
    for group in groups:
        dist.all_reduce(share, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return share if largest else share ** (1 / norm_type)


def _norm(norms: Iterable[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Combine the norms of several tensors to the norm of all."""
    found = list(norms)
    return torch.linalg.vector_norm(torch.stack(found), norm_type) if found else torch.zeros(())
