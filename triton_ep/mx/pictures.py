"""Pictures and figures of docs/concepts/mxfp8.md: the values of each format and its rounding errors. Needs matplotlib.

python -m triton_ep.mx.pictures docs/concepts
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from triton_ep.errors import EPError
from triton_ep.mx.formats import E2M1, E2M3, E3M2, E4M3, E5M2, ElemFormat
from triton_ep.mx.nvfp4 import NVFP4Tensor, per_tensor_amax_to_scale
from triton_ep.mx.tensor import MXTensor

Rounding = Callable[[torch.Tensor], torch.Tensor]

_ELEMENTS = (E4M3, E5M2, E3M2, E2M3, E2M1)
_NUM_VALUES = (128, 512)


def positive_values(fmt: ElemFormat) -> list[float]:
    """All positive finite values of a format, from smallest to largest."""
    smallest = 2.0 ** (fmt.min_exponent - fmt.mbits)
    values, exponent = [step * smallest for step in range(1, 1 << fmt.mbits)], fmt.min_exponent
    while not values or values[-1] < fmt.max_pos:
        steps = range(1 << fmt.mbits)
        values += [v for m in steps if (v := (1 + m / (1 << fmt.mbits)) * 2.0**exponent) <= fmt.max_pos]
        exponent += 1
    return values


def data() -> dict[str, torch.Tensor]:
    """Values on which errors are measured, float32; the same at each call."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(_NUM_VALUES, generator=generator)
    few = torch.rand(_NUM_VALUES, generator=generator) < 1 / 1000
    spread = torch.exp(3 * torch.randn((_NUM_VALUES[0], 1), generator=generator))
    return {
        "normal": normal,
        "1 in 1000 is 30 times as large": torch.where(few, 30 * normal, normal),
        "rows of very different size": normal * spread,
    }


def _mx(elem: Any, block_size: int = 32, mode: str = "rceil") -> Rounding:
    return lambda x: MXTensor.to_mx(x, elem, block_size, mode).dequantize()


def _nvfp4(levels: int) -> Rounding:
    def rounded(x: torch.Tensor) -> torch.Tensor:
        outer = per_tensor_amax_to_scale(x.abs().max()) if levels == 2 else None
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer).dequantize()

    return rounded


def formats() -> dict[str, tuple[float, Rounding]]:
    """By name: bits per value including its share of the scale, and a function that quantises and dequantises."""
    mx = {fmt.name: (fmt.bits + 8 / 32, _mx(fmt.dtype)) for fmt in _ELEMENTS}
    return {
        "bf16": (16, lambda x: x.bfloat16().float()),
        **{f"MX {name}": made for name, made in mx.items()},
        "NVFP4, one level": (4.5, _nvfp4(1)),
        "NVFP4": (4.5, _nvfp4(2)),
    }


def decibels(x: torch.Tensor, rounded: torch.Tensor) -> float:
    """Signal to noise: 20 log10 of the norm of x over the norm of the error; all rows have equal weight."""
    error = (rounded - x).double().norm(dim=-1) / x.double().norm(dim=-1)
    return float(-10 * torch.log10(error.square().mean()))


def error_table() -> dict[str, tuple[float, list[float]]]:
    """By format: bits per value, and dB for each of `data`, rounded to a tenth."""
    columns = data().values()
    return {
        name: (bits, [round(decibels(x, rounding(x)), 1) for x in columns])
        for name, (bits, rounding) in formats().items()
    }


def mode_table() -> dict[str, list[float]]:
    """By scaling mode: dB of normal values in MX e4m3, e2m3 and e2m1, rounded to a tenth."""
    normal = data()["normal"]
    return {
        mode: [round(decibels(normal, _mx(fmt.dtype, mode=mode)(normal)), 1) for fmt in (E4M3, E2M3, E2M1)]
        for mode in ("rceil", "floor", "ceil", "even")
    }


def draw_grids(out: Path) -> None:
    """Draw the positive values of each format relative to the largest, and the steps between them."""
    plt = _pyplot()
    figure, (line, step) = plt.subplots(1, 2, figsize=(10.5, 3.4), width_ratios=(1.35, 1), layout="constrained")
    for place, fmt in enumerate(_ELEMENTS):
        values = torch.tensor(positive_values(fmt), dtype=torch.float64)
        relative = values / fmt.max_pos
        color = f"C{place}"
        line.eventplot(relative, lineoffsets=-place, linelengths=0.7, linewidths=0.8, colors=color)
        gaps = (values[1:] - values[:-1]) / values[:-1]
        step.plot(relative[1:], gaps, drawstyle="steps-pre", color=color, linewidth=1.2, label=fmt.name)
    line.set(xlabel="positive values / largest value of the block", xlim=(-0.01, 1.01))
    line.set_yticks([-place for place in range(len(_ELEMENTS))], [fmt.name for fmt in _ELEMENTS])
    step.set(xscale="log", yscale="log", xlabel="value / largest", ylabel="step to the next / value", xlim=(1e-7, 1.3))
    step.legend(fontsize=8, loc="upper left")
    _save(figure, out)


def draw_errors(out: Path) -> None:
    """Draw the signal to noise of each format for each kind of data."""
    plt = _pyplot()
    table, kinds = error_table(), list(data())
    names = [f"{name} ({bits:g} bits)" for name, (bits, _) in table.items()]
    figure, panels = plt.subplots(1, len(kinds), figsize=(10.5, 3.0), sharey=True, layout="constrained")
    for column, (panel, kind) in enumerate(zip(panels, kinds, strict=True)):
        values = [values[column] for _, values in table.values()]
        bars = panel.barh(names, values, color=[f"C{place}" for place in range(len(names))])
        panel.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
        panel.set(xlabel="signal to noise, dB", xlim=(0, 64))
        panel.set_title(kind, fontsize=9)
    panels[0].invert_yaxis()
    _save(figure, out)


def _pyplot() -> Any:
    if importlib.util.find_spec("matplotlib") is None:
        raise EPError("pictures need matplotlib, which is not installed: pip install 'triton-ep[docs]'.")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Equal figures give equal files.
    plt.rcParams["svg.hashsalt"] = "triton_ep"
    return plt


def _save(figure: Any, out: Path) -> None:
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    _pyplot().close(figure)


PICTURES = {"mx_grids.svg": draw_grids, "mx_errors.svg": draw_errors}


def main(argv: Sequence[str] | None = None) -> None:
    """Draw all pictures into a folder, and print the tables of the page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    for name, draw in PICTURES.items():
        draw(folder / name)
    for name, (bits, values) in error_table().items():
        print(f"| {name} | {bits:g} | {' | '.join(f'{value:.1f}' for value in values)} |")
    for mode, values in mode_table().items():
        print(f"| `{mode}` | {' | '.join(f'{value:.1f}' for value in values)} |")


if __name__ == "__main__":
    main()
