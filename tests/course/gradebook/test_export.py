"""CSV, JSON and text exports have the contents of the gradebook. Spreadsheets find no formula in them."""

from __future__ import annotations

import csv
import io
import json
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.errors import CourseError
from ringlab_course.gradebook.entry import Ungraded
from ringlab_course.gradebook.export import (
    FORMULA,
    csv_text,
    entry_data,
    escaped,
    json_text,
    write,
)
from ringlab_course.gradebook.store import Gradebook
from tests.course.gradebook.stub import data, read_csv

texts = st.text(st.characters(codec="utf-8", exclude_characters="\r\x00"), max_size=20)


starts = st.sampled_from(["", *FORMULA, "'", "''", "'=", " ", "0"])


@given(st.builds(str.__add__, starts, texts))
def test_a_cell_is_read_back_and_begins_no_formula(text: str) -> None:
    assert escaped(text).removeprefix("'") == text
    assert escaped(text)[:1] not in tuple(FORMULA)


@given(st.lists(st.tuples(st.builds(str.__add__, starts, texts), st.integers(0, 10), texts), max_size=5))
def test_csv_is_read_back(rows) -> None:
    with Gradebook(None) as book:
        for learner, earned, path in rows:
            book.record(**data(learner=learner, path=path, earned=earned))
        book.record_ungraded(Ungraded("=cmd|' /C calc'!A0", "05", "p", "d", "@SUM(1)", ""))
        entries, ungraded = book.entries(), book.ungraded()
    text = csv_text(entries, ungraded)
    found = read_csv(text)
    assert [row["learner"] for row in found] == [entry.learner for entry in entries] + ["=cmd|' /C calc'!A0"]
    for row, entry in zip(found, entries, strict=False):
        assert (float(row["score"]), float(row["maximum"])) == (entry.score, entry.maximum)
        assert row["path"] == entry.path and row["override"] == ""
        assert row["failed_checks"].count("05.step") == len(entry.failed)
    assert found[-1]["score"] == "" and found[-1]["reason"] == "not graded: @SUM(1)"
    cells = [cell for line in csv.reader(io.StringIO(text, newline="")) for cell in line]
    assert not any(cell.startswith(tuple(FORMULA)) for cell in cells)


def test_points_with_the_reference_helpers_have_a_column() -> None:
    with Gradebook(None) as book:
        book.record(**data(earned=2, again=8))
        (row,) = read_csv(csv_text(book.entries()))
        assert (row["score"], row["earned"], row["earned_with_reference"]) == ("8", "2", "8")


def test_json_is_read_back() -> None:
    with Gradebook(None) as book:
        book.record(**data(learner="a\u2028b", earned=5))
        book.override("a\u2028b", "05", 6, "why", "who")
        (entry,) = book.entries()
        found = json.loads(json_text([entry], [Ungraded("b", "05", "p", "d", "r", "t", 3)]))
    assert found["entries"] == [json.loads(json.dumps(entry_data(entry)))]
    first = found["entries"][0]
    assert (first["score"], first["maximum"], first["earned"], first["override"]) == (6, 10, 5, 6)
    assert [check["id"] for check in first["failed_checks"]] == ["c2"]
    assert first["failed_checks"][0]["misconception"] == "averages_blocks"
    assert first["stages"] and first["ok"] is False, "all keys of the report are there too"
    assert found["not_graded"][0]["tries"] == 3


def test_files_are_replaced_at_once_and_nobody_elses_to_read(tmp_path: Path) -> None:
    path = tmp_path / "grades.csv"
    path.write_text("old")
    path.chmod(0o644)
    write(path, "new")
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(CourseError):
        write(tmp_path / "no folder" / "x", "new")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CourseError):
        write(tmp_path / "folder", "new")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "grades.csv"]
