"""Parts that several pictures draw: rectangles, keys of a legend, and axes with nothing but what is drawn on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch, Rectangle


def bare(ax: Axes, **ticks: Any) -> None:
    """Take grid, frame and tick marks away; `ticks` are further parameters of the ticks' labels."""
    ax.tick_params(length=0, **ticks)
    ax.spines[:].set_visible(False)
    ax.grid(visible=False)


def rectangle(corner: tuple[float, float], width: float, height: float, **look: Any) -> Rectangle:
    """Return a rectangle, to be drawn or to stand in a legend."""
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, **look)


def add_rectangle(ax: Axes, corner: tuple[float, float], width: float, height: float, **look: Any) -> None:
    """Draw a rectangle."""
    ax.add_patch(rectangle(corner, width, height, **look))


def patch(**look: Any) -> Patch:
    """Return the sample of a colour in a legend."""
    from matplotlib.patches import Patch

    return Patch(**look)
