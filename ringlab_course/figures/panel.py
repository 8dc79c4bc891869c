"""Elements of several pictures: rectangles, legend keys, bare axes, and controls that redraw a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ringlab.viz.frontend import import_widgets

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch, Rectangle


def bare(ax: Axes, **ticks: Any) -> None:
    """Remove grid, frame and tick marks; `ticks` are further parameters of the tick labels."""
    ax.tick_params(length=0, **ticks)
    ax.spines[:].set_visible(False)
    ax.grid(visible=False)


def rectangle(corner: tuple[float, float], width: float, height: float, **look: Any) -> Rectangle:
    """Return a rectangle for a picture or a legend."""
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, **look)


def add_rectangle(ax: Axes, corner: tuple[float, float], width: float, height: float, **look: Any) -> None:
    """Draw a rectangle."""
    ax.add_patch(rectangle(corner, width, height, **look))


def patch(**look: Any) -> Patch:
    """Return a legend key with this look."""
    from matplotlib.patches import Patch

    return Patch(**look)


def moved_by(draw: Callable[[], str], *controls: Any) -> Any:
    """Return a widget that shows the HTML picture of `draw`, drawn again whenever a control changes."""
    picture = import_widgets().HTML(draw())

    def redraw(_: object) -> None:
        picture.value = draw()

    for control in controls:
        control.observe(redraw, names="value")
    return picture


def buttons(options: Sequence[str]) -> Any:
    """Return buttons as wide as their names, exactly one of which is pressed.

    A drop-down list would not work, because JupyterLab takes its arrow keys.
    """
    found = import_widgets().ToggleButtons(options=list(options))
    found.style.button_width = "auto"
    return found
