"""Random Hadamard transform of blocks of 16: it spreads an outlier over its block.

Next to an outlier, FP4 rounds small values to zero. After spreading, small values survive with noise, and noise
averages out in sums. A block is multiplied by signs and by Sylvester's matrix / 4, which is orthogonal: the transform
keeps sums of squares, and the product of two tensors transformed along its sum equals the product of the originals.
`signs` is an integer; bit i set means that lane i changes its sign.
"""

from __future__ import annotations

import torch

from triton_ep.errors import InputError

BLOCK = 16
NO_SIGNS = 0


def check_signs(signs: int) -> int:
    """Return `signs`; InputError if it is not a 16-bit mask."""
    if not 0 <= signs < 1 << BLOCK:
        raise InputError(f"signs is {signs}; it is a mask of {BLOCK} lanes, from 0 to {(1 << BLOCK) - 1}.")
    return signs


def random_signs(generator: torch.Generator | None = None) -> int:
    """Draw signs on the host, from torch's default generator or the given one."""
    return int(torch.randint(1 << BLOCK, (), generator=generator))


def _signs(signs: int, like: torch.Tensor) -> torch.Tensor:
    lanes = torch.arange(BLOCK, device=like.device)
    return 1.0 - 2.0 * ((check_signs(signs) >> lanes) & 1).to(like.dtype)


def _butterflies(blocks: torch.Tensor) -> torch.Tensor:
    # Add in the order of kernels/compute/nvfp4.py, so that both give the same bits.
    for _ in range(4):
        a, b = blocks.unflatten(-1, (8, 2)).unbind(-1)
        blocks = torch.cat((a + b, a - b), -1)
    return blocks * 0.25


def _blocks(x: torch.Tensor) -> torch.Tensor:
    if x.dim() == 0 or x.shape[-1] % BLOCK:
        raise InputError(f"x is {list(x.shape)}: its last dimension must be a multiple of {BLOCK}.")
    return x.float().unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))


def hadamard(x: torch.Tensor, signs: int = NO_SIGNS) -> torch.Tensor:
    """Transform every 16 values of the last dimension of [..., K], K a multiple of 16, to float32.

    Raises:
        InputError: K is not a multiple of 16, or `signs` is not a 16-bit mask.
    """
    blocks = _blocks(x)
    return _butterflies(blocks * _signs(signs, blocks)).flatten(-2)


def inverse_hadamard(x: torch.Tensor, signs: int = NO_SIGNS) -> torch.Tensor:
    """Invert `hadamard` with the same signs, in float32; same errors."""
    blocks = _blocks(x)
    return (_butterflies(blocks) * _signs(signs, blocks)).flatten(-2)
