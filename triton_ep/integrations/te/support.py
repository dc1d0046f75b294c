"""Device support of MXFP8: native or emulated here, and the answers that TransformerEngine would give.

TransformerEngine runs MXFP8 on compute capability 10.x and refuses other devices. Here every device runs it. If tensor
cores do not support MX scales, products run on the dequantised operands ("emulated"): the same numbers up to the order
of a float32 sum, without the speed.
"""

from __future__ import annotations

import functools
import warnings

import torch

from triton_ep.errors import EPError, InputError
from triton_ep.runtime.launch import INTERPRETING

TOO_OLD = "Device compute capability 10.0 or higher required for MXFP8 execution."
TOO_NEW = "MXFP8 (for all gemm layouts) is not supported on 12.0+ architectures yet."


class UnsupportedDeviceError(EPError, RuntimeError):
    """MXFP8 was requested with strict=True on a device without tensor cores for it."""


class MismatchError(InputError, RuntimeError):
    """Weights quantised by one recipe are used in a region of another recipe."""


def default_device() -> torch.device:
    """The current GPU, or the CPU if kernels are interpreted."""
    if INTERPRETING or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def check_whole(weight: torch.Tensor) -> None:
    """Refuse a weight that is a DTensor: an MXFP8Tensor in its place would not be sharded.

    Raises:
        InputError: the weight is a DTensor.
    """
    if hasattr(weight, "device_mesh"):
        raise InputError(
            "a sharded weight (DTensor) cannot be converted to MXFP8. Call reset_parameters before fully_shard, or "
            "create the module outside quantized_model_init."
        )


def _refusal(device: torch.device | str | None) -> str:
    """TransformerEngine's refusal of the device; empty if TransformerEngine runs MXFP8 there."""
    device = torch.device(device) if device is not None else None
    if (device is None and (INTERPRETING or not torch.cuda.is_available())) or (device and device.type != "cuda"):
        return TOO_OLD
    capability = torch.cuda.get_device_capability(device)
    if capability >= (12, 0):
        return TOO_NEW
    return "" if capability >= (10, 0) else TOO_OLD


def mxfp8_mode(device: torch.device | str | None = None, *, strict: bool = False) -> str:
    """ "native" if tensor cores support MX scales (compute capability 10.x), else "emulated".

    Arguments:
        device: None: the current GPU, or the CPU without a GPU.
        strict: raise instead of emulating.

    Raises:
        UnsupportedDeviceError: with strict, with TransformerEngine's message.
    """
    refusal = _refusal(device)
    if refusal and strict:
        raise UnsupportedDeviceError(refusal)
    return "emulated" if refusal else "native"


def check_mxfp8_support(*, strict: bool = False) -> tuple[bool, str]:
    """Whether MXFP8 runs on the current device, and why it is emulated or refused (empty if native).

    strict: answer as TransformerEngine, which does not emulate.
    """
    refusal = _refusal(None)
    if not refusal:
        return True, ""
    return (False, refusal) if strict else (True, f"emulated: {refusal}")


def is_mxfp8_available(return_reason: bool = False, *, strict: bool = False) -> bool | tuple[bool, str]:
    """Whether MXFP8 runs here, emulated or not; with `return_reason` also "" or why it is emulated or refused.

    strict: return False if MXFP8 is emulated, as TransformerEngine does.
    """
    available, reason = check_mxfp8_support(strict=strict)
    return (available, reason) if return_reason else available


def _reason(what: str) -> str:
    return f"triton_ep.integrations.te has no {what}; use MXFP8BlockScaling."


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether recipes with one scale per tensor are supported: False; with `return_reason` also why."""
    return check_fp8_support() if return_reason else False


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether recipes with float32 scales per block are supported: False; with `return_reason` also why."""
    return check_fp8_block_scaling_support() if return_reason else False


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether NVFP4 is supported as a recipe: False; with `return_reason` also why."""
    return check_nvfp4_support() if return_reason else False


def check_fp8_support() -> tuple[bool, str]:
    """False and why, as `is_fp8_available(return_reason=True)`."""
    return False, _reason("FP8 recipe with one scale per tensor")


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """False and why, as `is_fp8_block_scaling_available(return_reason=True)`."""
    return False, _reason("FP8 recipe with float32 block scales")


def check_nvfp4_support() -> tuple[bool, str]:
    """False and why, as `is_nvfp4_available(return_reason=True)`."""
    return False, _reason("NVFP4 recipe")


@functools.cache
def _warn_emulated(reason: str) -> None:
    warnings.warn(
        "MXFP8 is emulated on this device: products run on the dequantised operands, with the same numbers and "
        f"without the speed of MX tensor cores. ({reason} Pass strict=True to te.autocast to refuse such a device.)",
        stacklevel=4,
    )


def warn_if_emulated() -> None:
    """Warn once per process that MXFP8 is emulated here."""
    refusal = _refusal(None)
    if refusal:
        _warn_emulated(refusal)
