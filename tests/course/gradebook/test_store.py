"""The gradebook stores each result once, and rejects files that it did not write."""

from __future__ import annotations

import sqlite3
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.errors import CourseError
from ringlab_course.gradebook import schema
from ringlab_course.gradebook.entry import Ungraded
from ringlab_course.gradebook.readable import headline
from ringlab_course.gradebook.store import Gradebook
from tests.course.gradebook.stub import data

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
moments = st.datetimes(datetime(2020, 1, 1), datetime(2030, 1, 1)).map(
    lambda moment: f"{moment.isoformat(timespec='microseconds')}+00:00"
)
results = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from(["05", "06"]),
        st.sampled_from("xyz"),
        st.integers(0, 10),
        moments,
    ),
    max_size=12,
)


def kept(book: Gradebook) -> list[tuple]:
    """Return everything in the gradebook except the times at which results were graded."""
    rows = book._book.execute(
        "SELECT learner, exercise, path, digest, contract, seed, submitted_at, earned, maximum, report FROM results"
    ).fetchall()
    return [*rows, *book.wanted(), *((u.learner, u.exercise, u.reason) for u in book.ungraded())]


@given(results)
@settings(max_examples=20)
def test_recording_everything_again_changes_nothing(rows) -> None:
    with Gradebook(None) as book:
        given_data = [
            data(learner=a, exercise=b, digest=c, earned=d, submitted_at=e)
            for a, b, c, d, e in sorted(rows, key=lambda row: row[-1])
        ]
        for each in given_data:
            book.record(**each)
        once = kept(book)
        for each in given_data:
            assert book.is_graded(
                *(each[n] for n in ("learner", "exercise", "digest", "contract", "submitted_at"))
            )
            book.record(**each)
        assert kept(book) == once


@given(results)
@settings(max_examples=20)
def test_of_several_results_the_last_that_was_handed_in_counts(rows) -> None:
    with Gradebook(None) as book:
        for a, b, c, d, e in rows:
            book.record(**data(learner=a, exercise=b, digest=c + str(d) + e, earned=d, submitted_at=e))
        for entry in book.entries():
            history = book.history(entry.learner, entry.exercise)
            assert entry.submitted_at == max(past.submitted_at for past in history)
            assert entry in history
        assert len(book.entries()) == len({row[:2] for row in rows})


def test_a_notebook_handed_in_again_after_another_counts_again() -> None:
    first, second, third = (f"2026-11-0{day}T00:00:00.000000+00:00" for day in (1, 2, 3))
    with Gradebook(None) as book:
        book.record(**data(digest="one", earned=5, submitted_at=first))
        book.record(**data(digest="two", earned=10, submitted_at=second))
        assert book.is_graded("ada", "05", "one", "c", first), "last week's folder may be graded again"
        assert book.record(**data(digest="one", earned=5, submitted_at=third)).score == 5
        assert [e.digest for e in book.history("ada", "05")] == ["one", "two", "one"]
        assert book.is_graded("ada", "05", "one", "c", None), (
            "a copy of the file that counts is graded already"
        )


def test_other_bytes_a_sandbox_and_a_wish_each_ask_for_a_new_result() -> None:
    with Gradebook(None) as book:
        book.record(**data())
        assert book.is_graded("ada", "05", "d", "c")
        assert book.is_graded("ada", "05", "d", "newer"), "newer checks alone cause no regrading"
        assert not book.is_graded("ada", "05", "other", "c")
        assert not book.is_graded("ada", "05", "d", "c+unsafe")
        assert not book.is_graded("bob", "05", "d", "c") and not book.is_graded("ada", "06", "d", "c")
        book.want([("ada", "05"), ("ada", "05")])
        assert not book.is_graded("ada", "05", "d", "c")
        book.record(**data(earned=5))
        assert book.wanted() == set() and [e.score for e in book.history("ada", "05")] == [10, 5]
        assert book.entries()[0].score == 5


def test_a_failure_of_ours_is_no_zero_and_ends_with_a_result() -> None:
    with Gradebook(None) as book:
        for _ in range(2):
            book.record_ungraded(Ungraded("ada", "05", "p", "d", "no sandbox", ""))
        assert book.entries() == [] and [(u.reason, u.tries) for u in book.ungraded()] == [("no sandbox", 2)]
        book.record(**data())
        assert book.ungraded() == [] and len(book.entries()) == 1


def test_overrides_count_with_their_reason_and_can_be_taken_back() -> None:
    with Gradebook(None) as book:
        book.record(**data(earned=5))
        entry = book.override("ada", "05", 9.5, "solved it on the board", "Prof. X")
        assert (entry.score, entry.earned, entry.override) == (9.5, 5, 9.5)
        assert "solved it on the board" in entry.override_reason and "Prof. X" in entry.override_reason
        book.override("ada", "05", 0.0, "a mistake", "Prof. X")
        assert book.entries()[0].score == 0.0, "an override may be zero"
        assert book.override("ada", "05", None, "taken back", "Prof. X").score == 5
        assert [o.score for o in book.overrides()] == [9.5, 0.0, None] and all(o.at for o in book.overrides())


def test_who_was_ill_or_could_not_be_graded_gets_an_entry_by_an_instructors_word() -> None:
    with Gradebook(None) as book:
        book.record(**data(learner="ada"))
        book.record(**data(learner="ada", exercise="06"))
        book.record(**data(learner="bob", exercise="06"))
        book.record_ungraded(Ungraded("cy", "05", "p", "d", "no sandbox", ""))
        for learner in ("bob", "cy"):
            entry = book.override(learner, "05", 7, "ill", "X")
            assert (entry.score, entry.earned, entry.maximum) == (7, 0, 10)
            assert entry.report["reason"] == "nothing was graded" and entry.failed == ()
        assert [e.learner for e in book.entries("05")] == ["ada", "bob", "cy"]
        assert book.override("bob", "05", None, "was not ill", "X").score == 0
        assert [e.learner for e in book.entries("05")] == ["ada", "cy"]
        assert book.record(**data(learner="cy", earned=10)).score == 7, (
            "the override counts until it is taken back"
        )
        with pytest.raises(CourseError):
            book.override("bob", "07", 7, "ill", "X")


@pytest.mark.parametrize(
    ("score", "reason", "by", "learner", "told"),
    [
        (5, "", "x", "ada", "a reason"),
        (5, "r", " ", "ada", "instructor"),
        (-1, "r", "x", "ada", "0 or more"),
        (float("nan"), "r", "x", "ada", "0 or more"),
        (5, "r", "x", "adda", "as in ada in 05"),
    ],
)
def test_an_override_without_reason_name_or_sense_is_refused(score, reason, by, learner, told) -> None:
    with Gradebook(None) as book:
        book.record(**data(earned=5))
        with pytest.raises(CourseError, match=told):
            book.override(learner, "05", score, reason, by)
        assert book.entries()[0].score == 5 and book.overrides() == []


def test_the_reference_helpers_count_unless_the_learners_own_do(tmp_path: Path) -> None:
    late = {"submitted_at": "2026-11-02T12:00:00.000000+00:00"}
    with Gradebook(tmp_path / "book") as book:
        book.record(**data(learner="ada", earned=2, again=8, **late))
        book.record(**data(learner="bo", earned=5, again=3, **late))
        assert [(e.earned, e.helped, e.score) for e in book.entries()] == [(2, 6, 8), (5, 0, 5)]
        book.set_policy(None, due="2026-11-01T12:00Z", late="50%/day")
        assert [e.penalty for e in book.entries()] == [5, 5]
        book.set_helpers("own")
        with pytest.raises(CourseError, match="reference, own"):
            book.set_helpers("mine")
    with Gradebook(tmp_path / "book") as book:
        assert [(e.penalty, e.helped, e.score) for e in book.entries()] == [(2, 0, 0), (5, 0, 0)]
        assert [e.earned_with_reference for e in book.entries()] == [8, 5]
        assert "(2 earned, 2 off for 1 d late; 6 more with the reference's helpers, not counted; graded by" in headline(book.entries()[0])  # fmt: skip


def test_a_result_of_an_earlier_version_counts_as_it_was_earned() -> None:
    made = data(earned=5)
    del made["report"]["earned_with_reference"]
    with Gradebook(None) as book:
        book.record(**made)
        assert [(e.score, e.earned_with_reference) for e in book.entries()] == [(5, 5)]


def test_the_deadline_of_the_exercise_goes_before_that_of_all() -> None:
    with Gradebook(None) as book:
        for exercise in ("05", "06"):
            book.record(**data(exercise=exercise, submitted_at="2026-11-02T12:00:00.000000+00:00"))
        book.set_policy(None, due="2026-11-01T12:00Z", late="10%/day")
        assert [(e.late_s, e.penalty, e.score) for e in book.entries()] == [(86400, 1, 9)] * 2
        book.set_policy("06", due="2026-11-03T12:00Z")
        assert [(e.late_s, e.score) for e in book.entries()] == [(86400, 9), (0, 10)]
        book.set_policy(None, late="")
        assert [e.score for e in book.entries()] == [10, 10]
        with pytest.raises(CourseError):
            book.set_policy(None, due="tomorrow")


def test_only_one_run_at_a_time_writes(tmp_path: Path) -> None:
    with Gradebook(tmp_path / "book") as one, Gradebook(tmp_path / "book") as other:
        with one.sole_writer(), pytest.raises(CourseError, match="under way"), other.sole_writer():
            pass
        with other.sole_writer():
            pass


def test_a_book_is_nobody_elses_to_read(tmp_path: Path) -> None:
    with Gradebook(tmp_path / "book") as book:
        book.record(**data())
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert set(modes.values()) == {0o600} and {"book", "book-wal"} <= set(modes)


def test_after_a_run_was_killed_the_file_alone_holds_its_results(tmp_path: Path) -> None:
    with Gradebook(tmp_path / "book") as book:
        book.record(**data())
        (tmp_path / "copy").write_bytes((tmp_path / "book").read_bytes())  # without -wal and -shm
        with Gradebook(tmp_path / "copy", create=False) as copy:
            assert [entry.learner for entry in copy.entries()] == [data()["learner"]]


def test_a_full_disk_is_an_error_and_costs_no_result(tmp_path: Path) -> None:
    with Gradebook(tmp_path / "book") as book:
        pages = book._book.execute("PRAGMA page_count").fetchone()[0]
        book._book.execute(f"PRAGMA max_page_count = {pages + 20}")
        with pytest.raises(CourseError, match="make room"):
            for number in range(1000):
                book.record(**data(learner=f"{number:03}"))
        assert [e.learner for e in book.entries()] == [f"{n:03}" for n in range(number)] and number > 5
    with Gradebook(tmp_path / "book") as book:
        assert len(book.entries()) == number and book.record(**data()).score == 10


def test_the_class_seed_stays(tmp_path: Path) -> None:
    with Gradebook(tmp_path / "a") as book, Gradebook(tmp_path / "b") as other:
        assert book.class_seed != other.class_seed
        book.use_class_seed(7)
        book.record(**data())
        book.use_class_seed(7)
        with pytest.raises(CourseError, match="omit --seed"):
            book.use_class_seed(8)
    with Gradebook(tmp_path / "a") as book:
        assert book.class_seed == 7


def foreign(path: Path, kind: str) -> None:
    if kind == "text":
        path.write_text("learner,score\nada,10\n" * 100)
    elif kind == "another program's":
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE results (learner, exercise)")
    else:
        Gradebook(path).close()
        with sqlite3.connect(path) as database:
            database.execute(
                {
                    "newer": "PRAGMA user_version = 99",
                    "a trigger": "CREATE TRIGGER up AFTER INSERT ON results BEGIN UPDATE results SET earned = 10; END",
                    "a view": "CREATE VIEW better AS SELECT 10 AS earned",
                    "another table": "CREATE TABLE notes (text)",
                    "a table too few": "DROP TABLE overrides",
                }[kind]
            )


@pytest.mark.parametrize(
    "kind",
    [
        "text",
        "another program's",
        "newer",
        "a trigger",
    ],
)
def test_a_file_that_is_no_gradebook_of_ours_is_refused_and_left_as_it_is(tmp_path: Path, kind: str) -> None:
    foreign(tmp_path / "book", kind)
    before = (tmp_path / "book").read_bytes()
    with pytest.raises(CourseError):
        Gradebook(tmp_path / "book")
    assert (tmp_path / "book").read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE results SET earned = 11",
        "UPDATE results SET earned = 9e999",
        "UPDATE results SET earned = 9",
        "UPDATE results SET maximum = 20",
        "UPDATE results SET report = '__import__(\"os\").getcwd()'",
        'UPDATE results SET report = \'{"earned": 10, "points": 10}\'',
        'UPDATE results SET report = replace(report, \'"points": 2\', \'"points": "2"\')',
        "UPDATE results SET report = replace(report, '_reference\": 10', '_reference\": 11')",
        'UPDATE results SET report = replace(report, \'"earned_again": 0\', \'"earned_again": "x"\')',
        f"UPDATE results SET report = '{'[' * 50_000}'",
        "UPDATE results SET graded_at = 'yesterday'",
        "UPDATE results SET submitted_at = '2026-11-01T00:00:00'",
        "INSERT INTO overrides VALUES (1, 'ada', '05', -5, 'r', 'b', 'a')",
        "INSERT INTO policies VALUES ('', 'never', '10%/day')",
    ],
)
def test_rows_that_somebody_edited_are_refused(tmp_path: Path, change: str) -> None:
    with Gradebook(tmp_path / "book") as book:
        book.record(**data())
    with sqlite3.connect(tmp_path / "book") as database:
        database.execute(change)
    database.close()
    with Gradebook(tmp_path / "book") as book, pytest.raises(CourseError):
        book.entries()


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    with Gradebook(tmp_path / "book") as book:
        for number in range(50):
            book.record(**data(learner=str(number)))
    content = bytearray((tmp_path / "book").read_bytes())
    content[8192:20480] = b"\xa5" * 12288
    (tmp_path / "book").write_bytes(content)
    with pytest.raises(CourseError):
        Gradebook(tmp_path / "book").entries()


def test_a_migration_that_fails_leaves_the_old_book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Gradebook(tmp_path / "book") as book:
        book.record(**data())
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, ("CREATE TABLE later (x)", "no SQL")))
        with pytest.raises(CourseError):
            Gradebook(tmp_path / "book")
    with Gradebook(tmp_path / "book") as book:
        assert len(book.entries()) == 1
