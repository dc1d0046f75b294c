"""Convert scales to the hardware layout, tiles of 128 rows by 4 columns, and back.

A block-scaled matrix instruction reads the scales of 128 rows and 4 blocks along K as 512 consecutive bytes. In such a
tile, row r and column c are at byte (r % 32) * 16 + (r // 32) * 4 + c; tiles are stored row by row. Zero bytes pad a
matrix to multiples of 128 rows and 4 columns.

Source: cuBLAS documentation, "1D Block Scaling Factors Layout"; torch names it SWIZZLE_32_4_4.
"""

from __future__ import annotations

from math import prod

import torch

from triton_ep.errors import InputError

TILE_ROWS = 128
TILE_COLUMNS = 4
_TILE = TILE_ROWS * TILE_COLUMNS


def round_up(size: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def blocked_shape(num_rows: int, num_columns: int) -> tuple[int, int]:
    """Rows and columns of the tiles of an [R, C] matrix, padding included."""
    return round_up(num_rows, TILE_ROWS), round_up(num_columns, TILE_COLUMNS)


def to_blocked(scale: torch.Tensor) -> torch.Tensor:
    """Convert scales [..., R, C] of one byte each to tiles [..., ceil(R / 128) * ceil(C / 4) * 512] of the same dtype.

    Every index of the leading dimensions, such as experts, is a separate matrix.

    Raises:
        InputError: fewer than two dimensions, or elements wider than a byte.
    """
    if scale.dim() < 2 or scale.element_size() != 1:
        raise InputError(f"scale is {list(scale.shape)} {scale.dtype}; it must be [..., R, C] of one byte each.")
    *lead, num_rows, num_columns = scale.shape
    padded_rows, padded_columns = blocked_shape(num_rows, num_columns)
    fill = (0, padded_columns - num_columns, 0, padded_rows - num_rows)
    padded = torch.nn.functional.pad(scale.view(torch.uint8), fill)
    tiled = padded.reshape(prod(lead), padded_rows // TILE_ROWS, 4, 32, padded_columns // TILE_COLUMNS, TILE_COLUMNS)
    return tiled.permute(0, 1, 4, 3, 2, 5).reshape(*lead, padded_rows * padded_columns).view(scale.dtype)


def from_blocked(blocked: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
    """Convert tiles of `to_blocked` back to scales [..., R, C], without the padding.

    Arguments:
        blocked: [..., n] of one byte each; n = ceil(R / 128) * ceil(C / 4) * 512. A single matrix may also have several
            dimensions with n bytes in all, as torch writes blocked scales.

    Raises:
        InputError: another number of bytes.
    """
    padded_rows, padded_columns = blocked_shape(num_rows, num_columns)
    size = padded_rows * padded_columns
    if blocked.element_size() != 1 or not blocked.dim():
        raise InputError(f"blocked is {list(blocked.shape)} {blocked.dtype}; it must have one byte per scale.")
    data = blocked.view(torch.uint8)
    data = data.reshape(-1) if data.shape[-1] != size and data.numel() == size else data
    if data.shape[-1] != size:
        raise InputError(
            f"blocked is {list(blocked.shape)}; tiles of a [{num_rows}, {num_columns}] matrix have {size} bytes, "
            f"{padded_rows} x {padded_columns}."
        )
    lead = data.shape[:-1]
    tiled = data.reshape(prod(lead), padded_rows // TILE_ROWS, padded_columns // TILE_COLUMNS, 32, 4, TILE_COLUMNS)
    padded = tiled.permute(0, 1, 4, 3, 2, 5).reshape(*lead, padded_rows, padded_columns)
    return padded[..., :num_rows, :num_columns].contiguous().view(blocked.dtype)


def _group_starts(ends: torch.Tensor, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First index of each group, and its start once every group is padded to a multiple."""
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    padded = (sizes + multiple - 1) // multiple * multiple
    return ends - sizes, padded.cumsum(0) - padded


def _places(ends: torch.Tensor, size: int, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Place of each of `size` indices once groups are padded, and whether it belongs to a group."""
    if ends.dim() != 1 or ends.dtype not in (torch.int32, torch.int64) or not ends.numel():
        raise InputError(f"ends is {list(ends.shape)} {ends.dtype}; it must be [groups] int32, the end of each group.")
    index = torch.arange(size, device=ends.device)
    ends = ends.long()
    group = (index.unsqueeze(1) >= ends).sum(1)
    starts, padded = _group_starts(ends, multiple)
    inside = group < len(ends)
    group = group.clamp(max=len(ends) - 1)
    return padded[group] + index - starts[group], inside


def grouped_rows_to_blocked(scale: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Scales [R, C] of groups of rows as tiles, each group padded to whole tiles: a grouped GEMM's left operand.

    Arguments:
        scale: [R, C] of one byte each.
        ends: [G] int32 on the device, the row after the last row of each group. The host does not read it.

    Returns [P * ceil(C / 4) * 4] bytes as 1-D tiles, P = (R + 127 * G) // 128 * 128 rows, enough for any groups.
    Group g starts at row sum(ceil(rows of each earlier group / 128) * 128); rows past the last group are left out.

    Raises:
        InputError: shapes or dtypes that do not fit.
    """
    _check_matrix(scale)
    num_rows = (scale.shape[0] + (TILE_ROWS - 1) * ends.numel()) // TILE_ROWS * TILE_ROWS
    place, inside = _places(ends, scale.shape[0], TILE_ROWS)
    padded = scale.new_zeros((num_rows + 1, scale.shape[1]), dtype=torch.uint8)
    padded[torch.where(inside, place, num_rows)] = scale.view(torch.uint8)
    return to_blocked(padded[:num_rows].view(scale.dtype))


def grouped_columns_to_blocked(scale: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Scales [R, C] of groups of columns as tiles: both operands of a grouped GEMM that sums over tokens (wgrad).

    Each group is a separate matrix [R, columns of g], padded to multiples of 4 columns; groups are stored in order.

    Arguments:
        scale: [R, C] of one byte each; a column is a block of tokens.
        ends: [G] int32 on the device, the column after the last column of each group. The host does not read it.

    Returns [ceil(R / 128) * 128 * P] bytes, P = (C + 3 * G) // 4 * 4 columns, enough for any groups; bytes past the
    last group are zero.

    Raises:
        InputError: shapes or dtypes that do not fit.
    """
    _check_matrix(scale)
    num_rows = round_up(scale.shape[0], TILE_ROWS)
    num_columns = (scale.shape[1] + (TILE_COLUMNS - 1) * ends.numel()) // TILE_COLUMNS * TILE_COLUMNS
    place, inside = _places(ends, scale.shape[1], TILE_COLUMNS)
    starts, first = _group_starts(ends.long(), TILE_COLUMNS)
    sizes = ends.long() - starts
    tiles = (sizes + TILE_COLUMNS - 1) // TILE_COLUMNS
    group = (torch.arange(scale.shape[1], device=ends.device).unsqueeze(1) >= ends).sum(1).clamp(max=len(ends) - 1)
    row = torch.arange(scale.shape[0], device=scale.device).unsqueeze(1)
    column = place - first[group]
    tile = row // TILE_ROWS * tiles[group] + column // TILE_COLUMNS
    byte = first[group] * num_rows + tile * _TILE + row % 32 * 16 + row % TILE_ROWS // 32 * 4 + column % TILE_COLUMNS
    end = num_rows * num_columns
    out = scale.new_zeros(end + 1, dtype=torch.uint8)
    out[torch.where(inside, byte, end).flatten()] = scale.view(torch.uint8).flatten()
    return out[:end].view(scale.dtype)


def _check_matrix(scale: torch.Tensor) -> None:
    if scale.dim() != 2 or scale.element_size() != 1:
        raise InputError(f"scale is {list(scale.shape)} {scale.dtype}; it must be [R, C] of one byte each.")
