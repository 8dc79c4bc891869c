"""Whether every word of a figure can be read: none lies on another, none is cut off."""

from __future__ import annotations

import itertools

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from ringlab.viz.style import styled

SLACK = 1.0
"""Pixels by which boxes may meet: letters keep a margin inside theirs."""


def illegible(figure: Figure) -> list[str]:
    """Return a line for each pair of texts that overlap, and for each text that leaves the figure."""
    with styled():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        unseen = _unseen(figure)
        found = [t for t in figure.findobj(Text) if t.get_visible() and id(t) not in unseen]
        texts = [t for t in found if t.get_text().strip()]
        boxes = [
            (t.get_text(), Text.get_window_extent(t, renderer).padded(-SLACK)) for t in texts
        ]  # no arrows
    lines = [
        f"{a!r} on {b!r}" for (a, one), (b, two) in itertools.combinations(boxes, 2) if one.overlaps(two)
    ]
    whole = figure.bbox
    lines += [
        f"{a!r} leaves the figure"
        for a, box in boxes
        if box.x0 < whole.x0 or box.x1 > whole.x1 or box.y0 < whole.y0 or box.y1 > whole.y1
    ]
    return lines


def _unseen(figure: Figure) -> set[int]:
    """The ids of texts that are never drawn: those of ticks outside the view or of axes switched off."""
    unseen = set()
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.majorTicks, *axis.minorTicks):
                if not ax.axison or not low <= tick.get_loc() <= high:
                    unseen |= {id(tick.label1), id(tick.label2)}
            if not ax.axison:
                unseen.add(id(axis.label))
    return unseen
