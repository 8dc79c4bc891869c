"""Pictures of rounding: the bits of a number in each format, and the values that a rounded sum can have.

The bits are read from memory. The grey lines are all numbers of a format in the range of the picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ringlab.viz.style import BLUE, GREEN, INK, ORANGE, PAPER, RED, RULE, SKY, new_figure, styled
from ringlab_course.figures import panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Format:
    """A floating-point format, with the number of bits of its exponent and of its fraction."""

    name: str
    dtype: torch.dtype
    exponent: int
    fraction: int

    def bits(self, value: float) -> str:
        """Return the bits of `value` in this format, the sign first."""
        width = 1 + self.exponent + self.fraction
        whole = {16: torch.int16, 32: torch.int32}[width]
        kept = torch.tensor(value, dtype=torch.float64).to(self.dtype).view(whole).item()
        return format(int(kept) % 2**width, f"0{width}b")

    def kept(self, value: float) -> float:
        """Return the number of this format that is nearest to `value`."""
        return float(torch.tensor(value, dtype=torch.float64).to(self.dtype))

    def numbers(self, low: float, high: float) -> np.ndarray:
        """Return all numbers of this format from `low` to `high`, in order; the format must have 16 bits."""
        every = torch.arange(-(2**15), 2**15).to(torch.int16).view(self.dtype).double().numpy()
        return np.unique(every[np.isfinite(every) & (every >= low) & (every <= high)])


FORMATS = (
    Format("float32", torch.float32, 8, 23),
    Format("float16", torch.float16, 5, 10),
    Format("bfloat16", torch.bfloat16, 8, 7),
)
FIELDS = (("sign", SKY), ("exponent: the power of two", ORANGE), ("fraction: the digits", GREEN))
BFLOAT16 = FORMATS[2]


def bits(value: float) -> Figure:
    """Return a picture of the bits of `value` in each format, the number that they represent, and its error."""
    with styled():
        drawn = new_figure((9.2, 2.5))
        ax = drawn.subplots()
        for row, each in enumerate(FORMATS):
            _draw_bits(ax, each, value, row)
        ax.set(xlim=(-5.2, 50), ylim=(len(FORMATS) - 0.4, -0.6))
        ax.axis("off")
        ax.set_title(f"{value:g} in three formats: the bits that are kept, and what they stand for")
        _key(drawn)
    return drawn


def _draw_bits(ax: Axes, each: Format, value: float, row: int) -> None:
    ax.text(-0.5, row, each.name, ha="right", va="center", fontsize=10)
    place = 0.0
    fields = (1, each.exponent, each.fraction)
    digits = iter(each.bits(value))
    for number, (width, (_, colour)) in enumerate(zip(fields, FIELDS, strict=True)):
        place = float(sum(fields[:number]))
        for offset in range(width):
            corner = place + offset, row - 0.32
            panel.add_rectangle(ax, corner, 1, 0.64, facecolor=colour, edgecolor=PAPER, alpha=0.75)
            ax.text(
                corner[0] + 0.5, row, next(digits), ha="center", va="center", fontsize=8, family="monospace"
            )
    kept = each.kept(value)
    ax.text(33, row, f"{kept:.10g}", va="center", fontsize=10)
    error = f"relative error {abs(kept - value) / abs(value):.0e}"
    ax.text(39.8, row, error, va="center", fontsize=9.5, fontweight="bold", color=INK)


def _key(drawn: Figure) -> None:
    keys = [panel.patch(facecolor=colour, alpha=0.75, label=label) for label, colour in FIELDS]
    drawn.legend(handles=keys, loc="outside lower center", ncols=len(keys), fontsize=9)


def describe_bits(value: float) -> str:
    """Return the picture of `bits` in words."""
    parts = []
    for each in FORMATS:
        kept = each.kept(value)
        parts.append(
            f"{each.name}, 1 sign, {each.exponent} exponent and {each.fraction} fraction bits, keeps {kept:.10g}, "
            f"a relative error of {abs(kept - value) / abs(value):.0e}"
        )
    return f"The bits of {value:g}: {'; '.join(parts)}."


@dataclass(frozen=True)
class Steps:
    """One quantity step by step, exactly and rounded to bfloat16; `first` is the number of the first step."""

    title: str
    xlabel: str
    ylabel: str
    exact: Sequence[float]
    rounded: Sequence[float]
    first: int = 0


def steps(panels: Sequence[Steps]) -> Figure:
    """Return the panels side by side: each quantity, with all bfloat16 numbers as grey lines."""
    with styled():
        drawn = new_figure((max(7.0, 4.3 * len(panels) + 0.6), 4.0))  # the legend is 7 inches wide
        axes = drawn.subplots(1, len(panels), squeeze=False)[0]
        for ax, one in zip(axes, panels, strict=True):
            _draw_steps(ax, one)
        handles, labels = axes[0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9.5)
    return drawn


def _draw_steps(ax: Axes, one: Steps) -> None:
    every = [*one.exact, *one.rounded]
    room = 0.06 * (max(every) - min(every))
    low, high = min(every) - room, max(every) + room
    grid = BFLOAT16.numbers(low, high)
    x = np.arange(one.first, one.first + len(one.exact))
    ax.hlines(grid, x[0] - 0.6, x[-1] + 0.6, color=RULE, linewidth=0.9, label="numbers that bfloat16 has")
    ax.plot(x, one.exact, color=BLUE, marker="o", markersize=4.5, linewidth=1, label="exact")
    ax.plot(
        x, one.rounded, color=RED, marker="s", markersize=4.5, linewidth=1, drawstyle="steps-mid",
        label="kept in bfloat16",
    )  # fmt: skip
    ax.grid(visible=False)
    ax.set(xlim=(x[0] - 0.6, x[-1] + 0.6), ylim=(low, high), xlabel=one.xlabel, ylabel=one.ylabel)
    ax.set_title(one.title, fontsize=10.5, color=INK)


def describe_steps(panels: Sequence[Steps]) -> str:
    """Return the panels of `steps` in words: the spacing of bfloat16 numbers, and both final values."""
    return " ".join(map(_words, panels))


def _words(one: Steps) -> str:
    gap = float(np.diff(BFLOAT16.numbers(min(one.rounded), max(one.rounded) + 1e-9)).max(initial=0.0))
    apart = f"; bfloat16's numbers here are up to {gap:.2g} apart" if gap and math.isfinite(gap) else ""
    return (
        f"{one.title}. From {one.exact[0]:.4g}, the exact value ends at {one.exact[-1]:.4g}, "
        f"the one kept in bfloat16 at {one.rounded[-1]:.4g}{apart}."
    )
