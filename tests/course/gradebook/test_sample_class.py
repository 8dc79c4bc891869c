"""The made-up class: as many as it says, of every kind; a part of it graded and rendered."""

from __future__ import annotations

import json

import pytest

from ringlab_course.checking.loading import load_exercise
from ringlab_course.gradebook.store import Gradebook
from tests.course.gradebook import sample_class
from tests.course.gradebook.page_checks import faults
from tests.course.gradebook.sample_class import (
    BROKEN,
    HOSTILES,
    LEARNERS,
    SKELETON,
    answers,
    hand_in,
    ringlab,
)
from tests.course.submissions_of import submissions


@pytest.mark.parametrize("exercise_id", ["01", "05"])
def test_the_class_has_right_wrong_and_hostile_submissions(tmp_path, exercise_id) -> None:
    hand_in(tmp_path, exercise_id)
    found = sorted(tmp_path.rglob("*.ipynb"))
    assert len(LEARNERS) == 30 and len(found) == (30 if exercise_id == "01" else 29)
    contract = load_exercise(exercise_id)
    wrong = submissions(f"{exercise_id}/wrong_*")
    counts = [len(answers(contract, wrong, number)) for number in range(HOSTILES)]
    assert counts.count(0) >= 5 and max(counts) >= 2
    for path in found:
        broken = path.parents[1].name == LEARNERS[BROKEN]
        try:
            assert json.loads(path.read_text(encoding="utf-8"))["cells"] and not broken
        except ValueError:
            assert broken


@pytest.mark.needs_bwrap
@pytest.mark.slow
def test_a_part_of_it_is_graded_and_rendered(tmp_path) -> None:
    who = [LEARNERS[number] for number in (0, 1, SKELETON, BROKEN, HOSTILES, HOSTILES + 1)]
    hand_in(tmp_path / "submitted", "01", who)
    book = tmp_path / "grades.db"
    assert ringlab("grade", tmp_path / "submitted", "--book", book, "--html", tmp_path / "pages") == 0
    with Gradebook(book, create=False) as grades:
        scores = {entry.learner: (entry.score, entry.maximum) for entry in grades.entries()}
    assert len(scores) == 6
    assert scores["Ada"] == (36, 36) and 0 < scores[LEARNERS[1]][0] < 36
    assert [scores[name][0] for name in (LEARNERS[SKELETON], LEARNERS[BROKEN], LEARNERS[HOSTILES + 1])] == [
        0,
        0,
        0,
    ]
    written = list((tmp_path / "pages").rglob("*.html"))
    assert len(written) == 8 and all(faults(path.read_text(encoding="utf-8")) == [] for path in written)
    assert sample_class.TRICKS[0] == "overwrites the checks" and scores[LEARNERS[HOSTILES]][0] < 10
