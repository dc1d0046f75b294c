"""Quantise received rows with vLLM's own function, on the receiving rank.

Source: moe_kernel_quantize_input and normalize_batched_scales_shape of vllm/model_executor/layers/fused_moe/utils.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

_TILES = ("is_scale_swizzled", "is_nvfp4_scale_swizzled", "is_fp4_scale_swizzled")
"""Names of the same option in vLLM's configurations and functions, the newest first."""


def scales_in_tiles(config: Any) -> bool:
    """Whether a configuration requests scales in tiles; only formats with a scale per 16 or 32 values use tiles."""
    return any(getattr(config, name, False) for name in _TILES)


@lru_cache(maxsize=16)
def _names_of_tiles(quantize: Callable[..., Any]) -> tuple[str, ...]:
    """Names under which `quantize` takes the option. Cached: reading a signature takes longer than a launch."""
    parameters = inspect.signature(quantize).parameters
    return tuple(name for name in _TILES if name in parameters)


def quantize_rows(
    quantize: Callable[..., Any], rows: torch.Tensor, config: Any, in_use: Callable[[], torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantise rows [R, H], or slabs [e, n, H], with vLLM's function.

    Args:
        quantize: moe_kernel_quantize_input.
        config: its quant_dtype, a1_scale (nvfp4: a1_gscale), per_act_token_quant, block_shape and is_scale_swizzled are
            used.
        in_use: returns which rows were received, [R] or [e, n] bool; None: all. Only called if one scale serves all
            rows, because undefined rows must not influence it.

    Returns:
        The same shape in the wanted format (H / 2 bytes for 4-bit formats), and the scales that `quantize` returns; for
        slabs [e, n, S], or [e, 1, 1] for a single scale.
    """
    scale = config.a1_gscale if config.quant_dtype == "nvfp4" else config.a1_scale
    of_tensor = scale is None and not config.per_act_token_quant and config.block_shape is None
    if in_use is not None and of_tensor and not isinstance(config.quant_dtype, str):
        rows = rows.masked_fill(~in_use().unsqueeze(-1), 0.0)
    known = any(hasattr(config, name) for name in _TILES)
    options = {name: scales_in_tiles(config) for name in (_names_of_tiles(quantize) if known else ())}
    data, scales = quantize(
        rows.reshape(-1, rows.shape[-1]),
        scale,
        quant_dtype=config.quant_dtype,
        per_act_token_quant=config.per_act_token_quant,
        block_shape=config.block_shape,
        **options,
    )
    data = data.view(*rows.shape[:-1], data.shape[-1])
    if rows.dim() == 3 and scales is not None:
        single = scales.numel() == 1
        scales = scales.view(1, 1, 1).repeat(rows.shape[0], 1, 1) if single else scales.view(*rows.shape[:-1], -1)
    return data, scales
