"""One column of the traffic picture: what the launches of a version read from memory and write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDEST = 0.29
"""The width of the largest arrow, in heights of a step."""


def draw_column(ax: Axes, launches: Sequence[tuple[int, int]], steps: int, most: int) -> None:
    """Draw the launches of one version from top to bottom between their kernels and memory.

    most: the bytes of the widest arrow.
    """
    from matplotlib.patches import Rectangle

    from ringlab.viz.style import INK, PAPER, RULE

    each = len(launches) // steps
    kernels = ("block", "merge") if each == 2 else ("kernel",) * each
    ax.add_patch(Rectangle((0.84, 0.04), 0.16, steps - 0.08, facecolor=RULE, edgecolor="none"))
    ax.text(0.92, steps / 2, "memory", rotation=90, ha="center", va="center", fontsize=9)
    for step in range(steps):
        own, top = launches[step * each : (step + 1) * each], step + 0.04
        arrows = sum(count > 0 for moved in own for count in moved)
        for kernel, moved in zip(kernels, own, strict=True):
            height = 0.92 * sum(count > 0 for count in moved) / arrows
            look: dict[str, Any] = {"facecolor": PAPER, "edgecolor": INK, "linewidth": 1.0}
            ax.add_patch(Rectangle((0.0, top + 0.02), 0.3, height - 0.04, **look))
            ax.text(0.15, top + height / 2, kernel, ha="center", va="center", fontsize=8)
            _arrows(ax, moved, top, height, _WIDEST / most)
            top += height
    ax.set(xlim=(-0.01, 1), ylim=(steps, 0), xticks=[])
    ax.tick_params(length=0, labelsize=9)
    ax.spines[:].set_visible(False)
    ax.grid(visible=False)


def _arrows(ax: Axes, moved: tuple[int, int], top: float, height: float, per_byte: float) -> None:
    """Draw what a launch reads and writes, one below the other, each `per_byte` wide for a byte."""
    from matplotlib.patches import FancyArrow

    from ringlab.viz.style import ORANGE, SKY

    looks = (SKY, 0.83, 0.31), (ORANGE, 0.31, 0.83)
    shown = [(count, *look) for count, look in zip(moved, looks, strict=True) if count]
    gap = (height - sum(moved) * per_byte) / (1 + len(shown))
    for count, colour, begin, end in shown:
        width = count * per_byte
        middle, top = top + gap + width / 2, top + gap + width
        shape: dict[str, Any] = {"width": width, "head_width": width + 0.06, "head_length": 0.1}
        look: dict[str, Any] = {"length_includes_head": True, "color": colour, "linewidth": 0}
        ax.add_patch(FancyArrow(begin, middle, end - begin, 0, **shape, **look))
        room = width > 0.1  # else the number stands above its arrow
        at = middle if room else middle - width / 2 - 0.01
        ax.text(0.57, at, kib(count), ha="center", va="center" if room else "bottom", fontsize=8)


def kib(count: int) -> str:
    """Return a number of bytes in KiB, as text."""
    return f"{count / 1024:,.0f}"
