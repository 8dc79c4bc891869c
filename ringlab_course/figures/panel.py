"""Parts that several pictures draw: rectangles, keys of a legend, axes with nothing but what is drawn on them, and controls that move a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ringlab.viz.frontend import import_widgets

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


def moved_by(draw: Callable[[], str], *controls: Any) -> Any:
    """Return a widget of the picture in HTML that `draw` returns, drawn anew whenever a control moves."""
    picture = import_widgets().HTML(draw())

    def redraw(_: object) -> None:
        picture.value = draw()

    for control in controls:
        control.observe(redraw, names="value")
    return picture


def buttons(options: Sequence[str]) -> Any:
    """Return buttons of which one is pressed, as wide as their names. No drop-down list: JupyterLab takes its arrow keys away."""
    found = import_widgets().ToggleButtons(options=list(options))
    found.style.button_width = "auto"
    return found
