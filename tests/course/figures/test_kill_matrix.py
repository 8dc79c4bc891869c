"""The kill matrix shows, by sign as well as by colour, what the findings say; all of it can be moved by keys."""

from __future__ import annotations

import re

import pytest

from ringlab.conformance.runner import Finding
from ringlab.viz.style import png
from ringlab_course.clinic.suite import KillMatrix
from ringlab_course.figures import kill_matrix
from tests.viz.legible import illegible
from tests.viz.test_keyboard import faults

NONE = "does not apply: no gradients"


def finding(name: str, ok: bool | None) -> Finding:
    return Finding(name, f"asks for {name}", ok is not False, NONE if ok is None else f"saw {ok} < 1", 0.0, ok is not None)  # fmt: skip


MATRIX = KillMatrix(
    ("ash", "elm"),
    ("masks", "dq", "bytes"),
    {
        "ash": {c: finding(c, ok) for c, ok in (("masks", False), ("dq", None), ("bytes", True))},
        "elm": {c: finding(c, ok) for c, ok in (("masks", True), ("dq", None), ("bytes", False))},
    },
)


def test_a_finding_that_does_not_apply_is_neither_found_nor_held() -> None:
    assert [MATRIX.finds("ash", check) for check in MATRIX.checks] == [True, None, False]
    assert MATRIX.found_by("elm") == ["bytes"]


def test_the_table_says_by_sign_what_each_cell_is_and_picks_one_out() -> None:
    text = kill_matrix.table(MATRIX, 0, 2)
    signs = re.findall(r"<td [^>]*>(.)</td>", text)
    assert signs == ["●", "–", "·", "·", "–", "●"]
    assert len(re.findall("3px solid", text)) == 1
    assert "ash × bytes: the check holds" in text and "saw True &lt; 1" in text


def test_the_static_figure_is_legible_and_its_words_name_every_patient() -> None:
    drawn = kill_matrix.figure(MATRIX)
    assert illegible(drawn) == []
    assert png(drawn) == png(kill_matrix.figure(MATRIX))
    texts = [text.get_text() for text in drawn.axes[0].texts]
    assert texts == ["●", "–", "·", "·", "–", "●"]
    assert kill_matrix.describe(MATRIX) == "ash: found by masks. elm: found by bytes."


def test_arrow_keys_move_both_sliders_and_the_evidence_follows() -> None:
    pytest.importorskip("ipywidgets")
    player = kill_matrix.player(MATRIX)
    patient, check, picture = player.children
    assert faults(player) == []
    assert "ash × masks: the check finds it" in picture.value
    patient.value, check.value = 1, 2
    assert "elm × bytes: the check finds it" in picture.value
    check.value = 1
    assert "elm × dq: the check does not apply" in picture.value


def test_without_a_person_it_says_where_the_matrix_stands(capsys: pytest.CaptureFixture[str]) -> None:
    kill_matrix.play(MATRIX)
    assert "stands below" in capsys.readouterr().out
