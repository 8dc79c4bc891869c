"""The style of the course's figures, and their display with a text for readers who cannot see them.

Inside a widget, a figure is an <img> element. Its text is the alternative text, and is also shown below it.
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ringlab.errors import require_package
from ringlab.viz.frontend import is_live

if TYPE_CHECKING:
    from matplotlib.figure import Figure


INK, QUIET, RULE, PAPER = "#1F2933", "#52606D", "#CBD2D9", "#FFFFFF"
"""The colours of text and lines, secondary text, rules and grids, and the background."""
ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE, GREY = (
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
    "#BBBBBB",
)
PALETTE = (ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE, GREY)
"""Okabe and Ito's colours, which are distinguishable with all common kinds of colour blindness. Rank r has
colour r mod 8."""
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
"""Patterns that distinguish ranks in addition to colours, for print and for readers who see no colours."""
WIDE, SQUARE, TALL = (8.0, 3.6), (5.4, 5.2), (8.0, 6.0)
"""The sizes of figures, as (width, height) in inches."""
DPI = 110

RC: dict[str, Any] = {
    "figure.dpi": DPI,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # included in matplotlib, so that figures look the same everywhere
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "lines.linewidth": 2.0,
    "legend.frameon": False,
    "svg.hashsalt": "ringlab",
}


def rank_colour(rank: int) -> str:
    """Return the colour of a rank, which is the same in every lesson."""
    return PALETTE[rank % len(PALETTE)]


@contextmanager
def styled() -> Iterator[None]:
    """Draw in the course's style inside this block. After it, matplotlib's own settings are restored.

    Raises: MissingExtraError if matplotlib is not installed.
    """
    require_package("matplotlib", "figures", "figures")
    import matplotlib
    from matplotlib.rcsetup import cycler

    settings: Any = {**RC, "axes.prop_cycle": cycler(color=list(PALETTE))}
    with matplotlib.rc_context(settings):
        yield


def new_figure(size: tuple[float, float] = WIDE) -> Figure:
    """Return an empty figure that belongs to no window and no pyplot state. Call it inside `styled()`."""
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def png(figure: Figure) -> bytes:
    """Return the figure as a PNG without metadata about software and time."""
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def image(figure: Figure, alt: str) -> dict[str, str]:
    """Return the figure's display data as HTML, because JupyterLab drops the alt text of an image."""
    data = base64.b64encode(png(figure)).decode()
    element = f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'
    return {"text/html": element, "text/plain": alt}


def show(figure: Figure, alt: str) -> None:
    """Display the figure as an image, with `alt` as its text for screen readers and plain terminals.

    `alt` must say what the figure shows, and need not say that it is a figure.

    Raises: ValueError if `alt` is empty; MissingExtraError if IPython is not installed.
    """
    require_package("IPython", "lab", "figures in a notebook")
    from IPython.display import display

    if not alt.strip():
        raise ValueError("alt: say in words what the figure shows")
    if is_live():
        display(image(figure, alt), raw=True)
    else:
        display(still_image(figure, alt), metadata={"image/png": {"alt": alt}}, raw=True)


def still_image(figure: Figure, alt: str) -> dict[str, str]:
    """Return the figure's display data as an image, for a notebook that is read without running it."""
    return {"image/png": base64.b64encode(png(figure)).decode(), "text/plain": alt}


def as_html(figure: Figure, words: str, widest: str = "100%") -> str:
    """Return the figure as an HTML image with a caption.

    `words` is the alternative text, and its first sentence is the caption. The image shrinks to the available
    width. Its CSS width is at most `widest`.
    """
    data, caption = base64.b64encode(png(figure)).decode("ascii"), _SENTENCE.split(words, maxsplit=1)[0]
    image = (
        f'<img alt="{html.escape(words)}" src="data:image/png;base64,{data}" '
        f'style="max-width: min({widest}, 100%)">'
    )
    return f'{image}<p aria-live="polite">{html.escape(caption)}</p>'


_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[^a-z])")
"""The end of a sentence; a lower-case letter after the period means that it ends an abbreviation."""
