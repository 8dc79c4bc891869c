"""Loss curves on top of each other: what is said about them is what they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab_course.figures import loss_curves

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


def test_equal_bits_have_a_place_in_the_picture():
    drawn = loss_curves.figure({"one": [2.0, 1.0], "other": [2.0, 1.0]}, "Title").axes[1]
    assert min(drawn.get_lines()[0].get_ydata()) == loss_curves.FLOOR >= drawn.get_ylim()[0]


def test_nobody_there_to_press_a_button_is_told_all_cases(capsys):
    loss_curves.play({"a": {"one": [2.0, 1.0], "a": [2.0, 1.0]}, "b": {"one": [2.0, 1.0], "b": [2.0, 1.5]}})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("a.") and "lies on it" in first and "b leaves it in step 2." in second


def test_buttons_choose_what_is_drawn():
    cases = {"a": {"one": [2.0, 1.0], "a": [2.0, 1.0]}, "b": {"one": [2.0, 1.0], "b": [2.0, 1.5]}}
    which, picture = loss_curves.player(cases).children
    assert "lies on it" in picture.value
    which.value = "b"
    assert "leaves it in step 2" in picture.value
