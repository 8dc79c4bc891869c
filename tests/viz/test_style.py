"""Figures have one style and a text for readers who cannot see them, and are the same bytes in every run.

Every word of a figure can be read: no text overlaps another text or is cut off.
"""

from __future__ import annotations

import itertools

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from ringlab.viz import style
from ringlab.viz.style import styled

pytestmark = pytest.mark.thorough


def draw(values=(1, 3, 2)):
    with style.styled():
        figure = style.new_figure((3, 2))
        figure.subplots().plot(values, label="x")
    return figure


def test_all_words_are_the_alternative_text_and_their_first_sentence_the_caption():
    words = "Bars of 0.5 <s> each, i.e. short ones. Rank 0 waits."
    image, _, caption = style.as_html(draw(), words).partition("<p")
    assert 'alt="Bars of 0.5 &lt;s&gt; each, i.e. short ones. Rank 0 waits."' in image
    assert caption.endswith(">Bars of 0.5 &lt;s&gt; each, i.e. short ones.</p>")


def test_a_figure_is_the_same_bytes_twice_and_names_no_software():
    assert style.png(draw()) == style.png(draw()) != style.png(draw((1, 2, 3)))
    assert b"Software" not in style.png(draw()) and b"matplotlib" not in style.png(draw()).lower()


def test_what_is_shown_carries_its_text(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda *a, **k: shown.append((a, k)))
    style.show(draw(), alt="a line with a peak")
    (bundle,), keywords = shown[0]
    assert bundle["text/plain"] == keywords["metadata"]["image/png"]["alt"] == "a line with a peak"
    assert bundle["image/png"].startswith("iVBOR")
    with pytest.raises(ValueError, match="say in words"):
        style.show(draw(), alt=" ")


def linear(channel):
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


def seen(colour, matrix):
    """Return a colour as a person who lacks one kind of cone cells sees it (Viénot 1999), in linear RGB."""
    rgb = [linear(int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5)]
    return [sum(m * c for m, c in zip(row, rgb, strict=True)) for row in matrix]


NORMAL = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
PROTAN = ((0.11238, 0.88762, 0), (0.11238, 0.88762, 0), (0.00401, -0.00401, 1))
DEUTAN = ((0.29275, 0.70725, 0), (0.29275, 0.70725, 0), (-0.02234, 0.02234, 1))


def closest(palette, matrix):
    colours = [seen(colour, matrix) for colour in palette]
    distances = [
        sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) ** 0.5
        for i, x in enumerate(colours)
        for y in colours[:i]
    ]
    return min(distances)


@pytest.mark.parametrize("matrix", [NORMAL, PROTAN, DEUTAN], ids=["normal", "protan", "deutan"])
def test_the_palette_is_told_apart_with_every_common_kind_of_sight(matrix):
    assert closest(style.PALETTE, matrix) > 0.1


SLACK = 1.0
"""Pixels by which boxes of texts may overlap, because letters have a margin inside their boxes."""


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
    """Return the ids of texts that are never drawn: of ticks outside the view, or of hidden axes."""
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
