"""Tile shapes and constexprs of the backward pass of experts (kernels/experts)."""

from __future__ import annotations

from triton_ep.plans.shape import Plan, next_power_of_2

WEIGHTED_ROWS, WEIGHTED_COLUMNS = 2, 1024


def weighted_rows(num_rows: int, hidden: int, mx: bool, offs: bool, interpreted: bool) -> Plan:
    """Gradients of a weighted sum of rows."""
    rows, block = WEIGHTED_ROWS, WEIGHTED_COLUMNS
    if interpreted:
        rows, block = min(next_power_of_2(-(-num_rows // 2)), 32), min(max(next_power_of_2(hidden), 32), 1024)
    constexprs = {"IS_MX": mx, "HAS_OFFS": offs, "ROWS": rows, "BLOCK_H": block}
    return Plan("weighted_rows_backward_kernel", constexprs)
