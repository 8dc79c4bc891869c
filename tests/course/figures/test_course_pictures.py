"""Pictures of lessons, losses, exchanges and packed rows show the data that the tests expect."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab_course.catalogue import LESSONS
from ringlab_course.figures import course_ring, exchanges, loss_curves, packed_view, scan_view

pytestmark = pytest.mark.thorough


def texts(figure):
    return [t.get_text() for axes in figure.axes for t in axes.texts]


def test_the_ring_shows_all_lessons_and_names_the_way_to_the_chosen_one():
    shown = texts(course_ring.draw_course("05"))
    assert {item.id for item in LESSONS} <= set(shown)
    bold = {t.get_text() for t in course_ring.draw_course("05").axes[0].texts if t.get_weight() == "bold"}
    assert {"Online softmax", "Tiled attention", "The emulated ring"} <= bold
    assert "Numerics" in shown and "Numerics" not in bold
    assert course_ring.all_needs("05") == ("00", "01", "02", "03") and course_ring.all_needs("00") == ()


@pytest.mark.parametrize("item", LESSONS, ids=lambda item: item.id)
def test_the_picture_in_words(item):
    words = course_ring.describe_lesson(item.id)
    assert item.title in words and item.afterwards in words


LOSSES = st.lists(st.floats(0.1, 10.0), min_size=2, max_size=6)


@given(LOSSES, st.floats(1e-4, 1.0), st.data())
def test_a_curve_that_leaves_is_told_from_one_that_lies_on_the_first(losses, far, data):
    step = data.draw(st.integers(0, len(losses) - 1))
    left = [loss * (1 + (far if number == step else 1e-7)) for number, loss in enumerate(losses)]
    curves = {"one": losses, "near": [loss * (1 + 1e-7) for loss in losses], "left": left}
    found = loss_curves.differences(curves)
    assert max(found["left"]) == pytest.approx(far, rel=1e-6) and max(found["near"]) < 1e-6
    told = loss_curves.describe(curves, "Title")
    assert "near lies on it" in told and f"left leaves it in step {step + 1}." in told


def test_the_recorded_curves_are_there_with_their_machine_and_are_drawn():
    record = loss_curves.recorded()
    assert all(len(losses) == 200 for losses in record.curves.values()) and len(record.curves) == 4
    assert "cores" in record.machine and "torch" in record.machine
    above, below = loss_curves.figure(record.curves, "Title").axes
    assert [line.get_label() for line in above.get_lines()] == list(record.curves)
    assert below.get_yscale() == "log"


def test_an_all_to_all_sends_one_piece_from_each_rank_to_each() -> None:
    before, after = exchanges.holders().values()
    assert sorted(zip(before.ravel(), after.ravel(), strict=True)) == [
        (a, b) for a in range(4) for b in range(4)
    ]
    assert (before[2, 1], after[2, 1]) == (1, 2)  # the piece in the frame
    numbers = [[text.get_text() for text in axes.texts] for axes in exchanges.trade().axes]
    assert numbers == [[str(rank) for rank in grid.ravel()] for grid in (before, after)]


@pytest.mark.parametrize("name", exchanges.panels())
def test_every_schedule_computes_a_quarter_and_needs_the_other_keys_of_its_heads(name) -> None:
    grid = exchanges.panels()[name]
    heads = grid.any(axis=1)
    computed = (grid == exchanges.OWN) | (grid == exchanges.TRADED)
    assert computed.sum() == grid.size // 4 and grid[heads].all()
    assert (grid[:, 4:8][heads] == exchanges.OWN).all()


def test_what_survives_is_what_a_loop_over_tokens_keeps():
    alphas, C = [0.5, 0.9, 0.8], 3
    fractions, read = [1.0, *[0.0] * C], []  # what remains of the entering state, and of each write
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


@pytest.mark.parametrize(("high", "pieces"), [(1.0, 1), (1.0 + 1e-12, 1), (3.0, 2)])
def test_parts_of_a_document_at_one_height_are_one_piece(high, pieces):
    assert len(packed_view._pieces([[(0, 1.0)], [(0, high)]])) == pieces


def _is_number(text):
    return text.get_text().replace(".", "", 1).isdigit()
