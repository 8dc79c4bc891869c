"""The made-up class: as many as it says, of every kind; a part of it graded and rendered.

The real judge and what learners hand in by mistake or on purpose: a zero with its reason, and nobody is stopped.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from ringlab_course.checking.loading import load_exercise
from ringlab_course.gradebook.collect import collect
from ringlab_course.gradebook.export import csv_text, json_text, read_csv
from ringlab_course.gradebook.pool import LocalPool
from ringlab_course.gradebook.runner import grade_class
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


CHECKOUT = Path(__file__).resolve().parents[3]
NAME = "01_naive_attention.ipynb"

BAD = {
    "a link": ("a symbolic link", lambda path: path.symlink_to("/etc/passwd")),
    "a pipe": ("no file", os.mkfifo),
    "a folder": ("no file", Path.mkdir),
    "broken": ("broken JSON", lambda path: path.write_text('{"cells": [')),
    "enormous": ("MiB", lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 40 << 20)),
    "latin-1": ("not UTF-8", lambda path: path.write_bytes(b'{"cells": "\xe9"}')),
    "no notebook": ("no notebook", lambda path: path.write_text("[]")),
    "nested": ("broken JSON", lambda path: path.write_text("[" * 100_000)),
    "empty": ("broken JSON", Path.touch),
}


@pytest.mark.needs_bwrap
def test_bad_files_get_a_zero_with_a_reason_and_the_others_their_grade(tmp_path: Path) -> None:
    folder = tmp_path / "class"
    for learner, (_, make) in BAD.items():
        (folder / learner).mkdir(parents=True)
        make(folder / learner / NAME)
    for learner in ("right\nand proper", "=also right"):
        (folder / learner).mkdir()
        shutil.copy(CHECKOUT / "solutions" / NAME, folder / learner)
    with Gradebook(tmp_path / "book") as book:
        for _ in range(2):
            run = grade_class(book, collect([folder]).submissions, LocalPool(2))
            assert run.ungraded == []
        assert len(run.kept) == len(BAD) + 2, "a zero for a bad file is a result as well"
        entries = {entry.learner: entry for entry in book.entries()}
        for learner, (reason, _) in BAD.items():
            entry = entries.pop(learner)
            assert reason in entry.report["reason"] and (entry.score, entry.exercise) == (0, "01")
            assert entry.maximum > 0
        assert {name: entry.score == entry.maximum for name, entry in entries.items()} == {
            "right\\nand proper": True,
            "=also right": True,
        }
        assert len(read_csv(csv_text(book.entries()))) == len(BAD) + 2 and json_text(book.entries())
