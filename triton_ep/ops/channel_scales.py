"""Quantisation of rows with one scale per 128 values, in a layer's wire form (kernels/compute/channel_scales.py)."""

from __future__ import annotations

import functools

import torch

from triton_ep.kernels.device import codes
from triton_ep.runtime.launch import INTERPRETING, Launcher, check_place, default_aot
from triton_ep.runtime.plans import compute as plans

CHANNELS = codes.CHANNELS
"""Values that share a scale."""


def quantize_channels(x: torch.Tensor, round_scale: bool, use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise blocks of 128 values of rows: amax at least 1e-4, data = x * (448 / amax), scale = amax * (1 / 448).

    Source: dispatch of DeepEP's csrc/kernels/internode_ll.cu, calculate_fp8_scales of its utils.cuh.

    Args:
        x: [T, H] bfloat16, contiguous, H a multiple of 128.
        round_scale: round scales up to powers of two; data = x / scale.
        use_ue8m0: store only the exponent byte of such a scale.

    Returns:
        [T, H] float8_e4m3fn, saturated, and scale bytes [T, H / 32] uint8: the bytes of [T, H / 128] float32 scales,
        or with `use_ue8m0` H / 128 exponents, then zeros. Values are data * scale.

    Raises:
        InputError: `x` is where no kernel runs.
    """
    check_place("x", x)
    num_tokens, hidden = x.shape
    data = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    sent = torch.empty(num_tokens, hidden // 32, dtype=torch.uint8, device=x.device)
    num_blocks, blocks = x.numel() // CHANNELS, plans.channel_blocks(INTERPRETING)
    _launcher(round_scale, use_ue8m0).launch(
        -(-num_blocks // blocks),
        x_ptr=x,
        elements_ptr=data,
        scale_ptr=sent if use_ue8m0 else sent.view(torch.float32),
        num_blocks=num_blocks,
        blocks_per_row=hidden // CHANNELS,
    )
    return data, sent


@functools.cache
def _launcher(round_scale: bool, use_ue8m0: bool) -> Launcher:
    return Launcher(plans.quantize_channels(round_scale, use_ue8m0, INTERPRETING), aot=default_aot())
