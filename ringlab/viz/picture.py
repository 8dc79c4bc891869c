"""A figure inside a widget: an <img> that carries its words and shows them below it too."""

from __future__ import annotations

import base64
import html
from typing import TYPE_CHECKING

from ringlab.viz.style import png

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def as_html(figure: Figure, words: str, widest: str = "100%") -> str:
    """Return the figure as an HTML image; `words` is its alternative text and its caption.

    It shrinks to the room there is; `widest` is the CSS width that it never exceeds.
    """
    data, safe = base64.b64encode(png(figure)).decode("ascii"), html.escape(words)
    image = f'<img alt="{safe}" src="data:image/png;base64,{data}" style="max-width: min({widest}, 100%)">'
    return f'{image}<p aria-live="polite">{safe}</p>'
