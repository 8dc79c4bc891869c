"""What lateness costs: never less than nothing, never more than was earned, never less for more.

What leaves the book is what is in it, and no spreadsheet runs it.
"""

from __future__ import annotations

import csv
import io
import json
import math
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.errors import CourseError
from ringlab_course.gradebook.entry import Ungraded
from ringlab_course.gradebook.export import (
    COLUMNS,
    FORMULA,
    csv_text,
    entry_data,
    escaped,
    json_text,
    read_csv,
    unescaped,
    write,
)
from ringlab_course.gradebook.policy import Late, lateness_s, parse_due, parse_late, utc
from ringlab_course.gradebook.readable import explained, headline, lateness
from ringlab_course.gradebook.store import Gradebook
from ringlab_course.gradebook.versions import contract_version
from tests.course.gradebook.stub import data, report

amounts = st.floats(0, 100)
policies = st.builds(
    Late,
    amount=amounts,
    amount_is_share=st.booleans(),
    unit_s=st.sampled_from([60.0, 3600.0, 86400.0]),
    most=st.one_of(st.just(math.inf), amounts),
    most_is_share=st.booleans(),
    grace_s=st.floats(0, 1e5),
)
seconds = st.floats(0, 1e7)
scores = st.floats(0, 1).flatmap(
    lambda share: st.floats(1, 100).map(lambda maximum: (share * maximum, maximum))
)


def broken_laws(late: Late, first_s: float, second_s: float, earned: float, maximum: float) -> list[str]:
    """Return the laws of penalties that `late` breaks."""
    sooner, later = sorted((first_s, second_s))
    cost = {at: late.penalty(at, earned, maximum) for at in (0.0, late.grace_s, sooner, later)}
    laws = {
        "on time costs nothing": cost[0.0] == 0,
        "grace costs nothing": cost[late.grace_s] == 0,
        "never below zero": min(cost.values()) >= 0,
        "never more than was earned": max(cost.values()) <= earned,
        "later costs no less": cost[sooner] <= cost[later],
        "never more than the most": max(cost.values()) <= late.most * (maximum if late.most_is_share else 1),
    }
    return [law for law, holds in laws.items() if not holds]


@given(policies, seconds, seconds, scores)
def test_the_laws_of_penalties(late: Late, first_s: float, second_s: float, score) -> None:
    assert broken_laws(late, first_s, second_s, *score) == []


@dataclass(frozen=True)
class Unbounded(Late):
    """Mutant: takes off more than was earned."""

    def penalty(self, late_s: float, earned: float, maximum: float) -> float:
        return self.amount * math.ceil(late_s / self.unit_s)


@dataclass(frozen=True)
class RewardsTheEarly(Late):
    """Mutant: the time before the grace ends counts against the penalty, which falls below zero."""

    def penalty(self, late_s: float, earned: float, maximum: float) -> float:
        return min(earned, self.amount * (late_s - self.grace_s) / self.unit_s)


@dataclass(frozen=True)
class Wraps(Late):
    """Mutant: forgets whole days."""

    def penalty(self, late_s: float, earned: float, maximum: float) -> float:
        return min(earned, self.amount * (late_s % 86400 > self.grace_s))


@pytest.mark.parametrize(
    ("mutant", "law"),
    [
        (Unbounded, "never more than was earned"),
        (RewardsTheEarly, "never below zero"),
        (Wraps, "later costs no less"),
    ],
)
def test_wrong_penalties_break_a_law(mutant: type[Late], law: str) -> None:
    assert law in broken_laws(mutant(amount=3, unit_s=3600, grace_s=600), 700, 2 * 86400 + 1, 5, 10)


@pytest.mark.parametrize(
    ("text", "late_s", "penalty"),
    [
        ("", 1e9, 0),
        ("10%/day", 1, 2),
        ("10%/day", 86400, 2),
        ("10%/day", 86401, 4),
        ("10%/day,max 50%", 30 * 86400, 10),
        ("10% per day, maximum: 5 points", 30 * 86400, 5),
        ("2 points/hour", 3601, 4),
        ("2 points/hour", 1e9, 15),
        ("0.5 pts/min, grace 15 min", 900, 0),
        ("0.5 pts/min, grace 15 min", 901, 8),
        ("1 Point/Week", 1, 1),
    ],
)
def test_policies_in_words(text: str, late_s: float, penalty: float) -> None:
    assert parse_late(text).penalty(late_s, earned=15, maximum=20) == penalty


@pytest.mark.parametrize(
    "text",
    [
        "10%",
        "max 50%",
        "grace 1 h",
        "-10%/day",
        "10%/month",
        "10%/day, 5%/hour",
        "1e9%/day",
        "free",
        "10%/day; rm",
    ],
)
def test_what_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(CourseError, match=r"10%/day"):
        parse_late(text)


@pytest.mark.parametrize(
    ("text", "in_utc"),
    [
        ("2026-11-30T23:59Z", "2026-11-30T23:59:00.000000+00:00"),
        ("2026-11-30 23:59:30+01:00", "2026-11-30T22:59:30.000000+00:00"),
        ("2026-11-30T23:59 Europe/Berlin", "2026-11-30T22:59:00.000000+00:00"),
        ("2026-07-30 23:59 America/Los_Angeles", "2026-07-31T06:59:00.000000+00:00"),
        ("2026-10-25T02:30 Europe/Berlin", "2026-10-25T01:30:00.000000+00:00"),  # there twice: the later one
        (
            "2026-03-29T02:30 Europe/Berlin",
            "2026-03-29T01:30:00.000000+00:00",
        ),  # not there: the later reading
    ],
)
def test_deadlines_have_a_zone(text: str, in_utc: str) -> None:
    assert utc(parse_due(text)) == in_utc


@pytest.mark.parametrize(
    "text",
    ["2026-11-30T23:59", "2026-11-30", "tomorrow", "", "2026-11-30T23:59Z Europe/Berlin", "2026-11-30T23:59 ../../etc/passwd",
     "2026-11-30T23:59 Nowhere/Land", "2026-13-30T23:59Z", "2026-11-30T25:59Z"],
)  # fmt: skip
def test_what_is_no_deadline_is_refused(text: str) -> None:
    with pytest.raises(CourseError, match="zone"):
        parse_due(text)


def test_lateness_needs_a_deadline_and_a_time() -> None:
    due = "2026-11-30T23:59:00.000000+00:00"
    assert lateness_s("2026-12-01T00:59:00.000000+01:00", due) == 0
    assert lateness_s("2026-12-01T00:00:30.500000+00:00", due) == 90.5
    assert lateness_s(None, due) == lateness_s(due, "") == 0


texts = st.text(st.characters(codec="utf-8", exclude_characters="\r\x00"), max_size=20)
starts = st.sampled_from(["", *FORMULA, "'", "''", "'=", " ", "0"])


@given(st.builds(str.__add__, starts, texts))
def test_a_cell_is_read_back_and_begins_no_formula(text: str) -> None:
    assert unescaped(escaped(text)) == text
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


def test_every_cell_is_in_quotes_for_programs_that_take_another_separator() -> None:
    with Gradebook(None) as book:
        book.record(**data(learner="a;=1+1"))
        line = csv_text(book.entries()).splitlines()[1]
    assert line.startswith('"a;=1+1","05",') and len(next(csv.reader([line]))) == len(COLUMNS)


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


def test_each_failed_check_is_explained_with_message_mistake_hint_and_time() -> None:
    with Gradebook(None) as book:
        told = []
        for digest in "abcd":
            book.record(**data(digest=digest, earned=2))
            told.append("\n".join(explained(book.entries()[0], book.history("ada", "05"))))
    assert "ada  05: 2 of 10 points" in told[0] and "graded in 0.2 s" in told[0]
    for text in (
        "check 1 fails",
        "[averages_blocks]",
        "check 2 (held-out, 5 points",
        "check 1 (stress, 3 points",
    ):
        assert text in told[0]
    rungs = [next(line for line in text.splitlines() if "→ hint" in line) for text in told]
    assert [
        "a question" in rungs[0],
        "a direction" in rungs[1],
        "mathematics" in rungs[2],
        "mathematics" in rungs[3],
    ] == [True] * 4
    assert "✗ check 0" not in told[0], "what holds needs no words"


def test_a_stage_of_another_course_needs_no_hint() -> None:
    with Gradebook(None) as book:
        result = {**report("p", "77", 0).as_dict()}
        entry = book.record(learner="a", exercise="77", path="p", digest="d", report=result)
        assert not any("hint" in line for line in explained(entry))


def test_one_line_says_what_is_behind_a_score() -> None:
    with Gradebook(None) as book:
        book.set_policy(None, due="2026-11-01T11:00Z", late="2 points/hour")
        entry = book.record(**data(contract=contract_version("05")))
        assert headline(entry) == "ada  05: 8 of 10 points  (10 earned, 2 off for 1 h late)"
        entry = book.override("ada", "05", 9, "ill", "X")
        assert "9 of 10" in headline(entry) and "overridden: ill (X, " in headline(entry)
        assert headline(entry).count("10 earned") == 1 and "more than there are" not in headline(entry)
        book.set_policy(None, due="", late="")
        assert "(10 earned; overridden: ill (X, " in headline(book.entries()[0])
        assert "more than there are to earn" in headline(book.override("ada", "05", 99, "a slip", "X"))
        unreadable = {**report("p", earned=0).as_dict(), "reason": "broken JSON"}
        told = headline(book.record(learner="b", exercise="05", path="p", digest="d", report=unreadable))
        assert told == "b  05: 0 of 10 points  (broken JSON)"


@pytest.mark.parametrize(
    ("seconds", "told"), [(1, "less than a minute"), (60, "1 min"), (3661, "1 h 1 min"), (90061, "1 d 1 h")]
)
def test_lateness_in_words(seconds: float, told: str) -> None:
    assert lateness(seconds) == f"{told} late"
