"""The texts, durations and formulas of the pages are legible."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.gradebook.formulas import formula
from ringlab_course.gradebook.readable import legible, name, prose
from tests.course.gradebook.page_checks import Page


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(), max_size=300), st.integers(1, 200))
def test_legible_text_is_bounded_and_steers_nothing(text, limit) -> None:
    shown = legible(text, limit)
    shown.encode("utf-8")
    assert all(c.isprintable() or c in "\n\u00a0\u202f" for c in shown)
    assert len(shown) <= 10 * limit + 40
    assert "\n" not in name(text) and name(text)
    assert faults_of_fragment(str(prose(text))) == []


def faults_of_fragment(fragment: str) -> list[str]:
    page = Page(fragment)
    return [e.tag for e in page.elements if e.tag not in ("code", "svg", "title", "path")]


@pytest.mark.parametrize("exercise_id", exercise_ids())
def test_every_formula_of_the_hints_is_drawn(exercise_id) -> None:
    """The formulas of every hint become SVG; the contracts of kernels are read without an interpreter."""
    for stage in load_exercise(exercise_id).stages:
        for hint in stage.hints:
            for tex in re.findall(r"\$([^$\n]+)\$", hint):
                assert str(formula(tex)).startswith("<svg"), f"{stage.id}: {tex}"


def test_a_formula_that_cannot_be_drawn_is_shown_as_it_is_written() -> None:
    assert str(formula(r"\nonsense{<b>}")) == r"<code>\nonsense{&lt;b&gt;}</code>"
