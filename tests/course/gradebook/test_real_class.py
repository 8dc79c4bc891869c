"""The real judge and what learners hand in by mistake or on purpose: a zero with its reason, and nobody is stopped."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ringlab_course.gradebook.collect import collect
from ringlab_course.gradebook.export import csv_text, json_text, read_csv
from ringlab_course.gradebook.pool import LocalPool
from ringlab_course.gradebook.runner import grade_class
from ringlab_course.gradebook.store import Gradebook

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
