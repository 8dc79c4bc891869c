"""Pictures of packed rows and of serving say in words what they draw, and can be read in both themes.

A document that lies on neighbouring ranks at one height is one piece, whatever rounding did to its edges.
"""

from __future__ import annotations

import numpy as np
import pytest

from ringlab import contiguous, striped, zigzag
from ringlab_course.figures import packed_view, scan_view, serving_view
from tests.viz.test_style import illegible

DOCUMENTS = (3, 1, 4)
LAYOUTS = [contiguous(8, 2), zigzag(8, 2), striped(8, 2)]
RIGHT = np.array([1, 2, -100, -100, 5, 6, 7, -100])
LOST = np.array([1, 2, -100, -100, 5, -100, 7, -100])
SEEN = np.tri(8, dtype=bool)
SHOULD = SEEN & np.equal.outer(*[np.repeat([0, 1, 2], DOCUMENTS)] * 2)
PLACED = [[[(0, 2.0), (1, 1.0)], [(0, 2.0), (2, 0.5)]]]
FIGURES = {
    "pairs": lambda: packed_view.figure(LAYOUTS[:2], DOCUMENTS),
    "mistaken": lambda: packed_view.mistaken(SHOULD, SEEN),
    "labels": lambda: packed_view.labels(LAYOUTS, DOCUMENTS, [RIGHT, LOST, RIGHT], RIGHT),
    "groups": lambda: packed_view.groups(PLACED, ["one"], [90, 40, 20], 2.0),
    "travellers": lambda: serving_view.travellers(4),
    "hand over": lambda: serving_view.hand_over(4),
    "chunk masks": lambda: serving_view.chunk_masks(5, 3),
    "shares": lambda: serving_view.shares({"grid": [(0, 1, n / 4, 1 / 4) for n in range(4)]}),
    "composition": lambda: scan_view.composition(),
    "survival": lambda: scan_view.survival([0.5, 0.9, 0.8]),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_picture_can_be_read(name):
    assert illegible(FIGURES[name]()) == []


def test_labels_that_are_wrong_are_hollow_and_named():
    figure = packed_view.labels(LAYOUTS[:2], DOCUMENTS, [RIGHT, LOST], RIGHT)
    first, second = figure.axes
    widths = [[box.get_width() for box in ax.patches] for ax in (first, second)]
    assert set(widths[0]) == {1.0} and [n for n, width in enumerate(widths[1]) if width < 1] == [5]
    words = packed_view.describe_labels(LAYOUTS[:2], DOCUMENTS, [RIGHT, LOST], RIGHT)
    assert "contiguous: wrong at no token" in words and "zigzag: wrong at 5." in words


def test_pairs_that_are_seen_and_should_not_be_are_counted():
    words = packed_view.describe_mistaken(SHOULD, SEEN)
    assert (
        "17 are and 0 are lost; 19 pairs are seen that should not be. Wrong queries: 3, 4, 5, 6, 7." in words
    )
    assert "0 are and 17 are lost" in packed_view.describe_mistaken(SHOULD, ~SEEN)


@pytest.mark.parametrize(("high", "pieces"), [(1.0, 1), (1.0 + 1e-12, 1), (3.0, 2)])
def test_parts_of_a_document_at_one_height_are_one_piece(high, pieces):
    assert len(packed_view._pieces([[(0, 1.0)], [(0, high)]])) == pieces


def test_one_rank_hands_nothing_over_and_is_drawn_all_the_same():
    assert len(serving_view.hand_over(1).axes) == 2


def test_four_shares_of_the_tokens_have_four_colours():
    (axes,) = serving_view.shares({"grid": [(0, 1, n / 4, 1 / 4) for n in range(4)]}).axes
    assert len({box.get_facecolor() for box in axes.patches}) == 4


def test_what_survives_is_what_a_loop_over_tokens_keeps():
    alphas, C = [0.5, 0.9, 0.8], 3
    fractions, read = [1.0, *[0.0] * C], []  # of the entering state, and of each write
    for token, alpha in enumerate(alphas):
        fractions = [alpha * each for each in fractions]
        fractions[token + 1] = 1.0
        read.append(fractions)
    drawn = [float(text.get_text()) for text in scan_view.survival(alphas).axes[0].texts if _is_number(text)]
    assert drawn == pytest.approx([each for row in [*read, fractions] for each in row], abs=1e-3)
    assert (
        "token 3 reads 0.36 of the state and 0.72, 0.8, 1 of the writes so far"
        in scan_view.describe_survival(alphas)
    )


def _is_number(text):
    return text.get_text().replace(".", "", 1).isdigit()
