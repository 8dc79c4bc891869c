"""The gradebook: an SQLite file with one transaction per result, readable while a run writes to it.

Only one process writes at a time. Its lock is released when the process ends, for whatever reason.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ringlab.errors import CourseError
from ringlab_course.checking.loading import exercise_ids
from ringlab_course.gradebook.entry import Entry, Override, Ungraded
from ringlab_course.gradebook.policy import Late, lateness_s, parse_due, parse_late, utc
from ringlab_course.gradebook.schema import (
    CHOSEN,
    RESULT,
    DamagedError,
    checked_moment,
    checked_number,
    checked_text,
    connect,
    entry_of,
)
from ringlab_course.gradebook.versions import Today, is_unsafe


def _unwritable(path: object, reason: object) -> CourseError:
    remedy = "make room and allow writing there, or copy the gradebook elsewhere"
    return CourseError("a gradebook that can be written", f"{path}: {reason}", remedy)


Key = tuple[str, str]
HELPERS = ("reference", "own")
"""Whose helpers the points of a stage are based on.

By default, the reference's functions replace wrong helpers. The alternative is the learner's own helpers.
"""


class Gradebook:
    """The gradebook in the file `path`, which is created if it does not exist and `create` is on.

    If `path` is None, the gradebook is in memory.
    If a learner has several results in an exercise, the notebook that was handed in last counts. If this
    notebook has several results, the newest one counts. No result is ever deleted.
    Raises: CourseError if the file is not a gradebook of ours.
    """

    def __init__(self, path: str | os.PathLike[str] | None, *, create: bool = True) -> None:
        self.path = None if path is None else Path(path)
        self._book = connect(self.path, create=create)

    def __enter__(self) -> Gradebook:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._book.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Apply all changes or none, even if the process is killed in between.

        Only one process writes at a time.
        """
        try:
            self._book.execute("BEGIN IMMEDIATE")
            yield
            self._book.execute("COMMIT")
        except BaseException as error:
            if self._book.in_transaction:  # SQLite itself rolls back when the disk is full
                self._book.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise _unwritable(self.path, error) from None
            raise

    @contextlib.contextmanager
    def sole_writer(self) -> Iterator[None]:
        """Keep other runs from grading into this gradebook.

        Raises: CourseError if another run already does.
        """
        try:
            import fcntl
        except ImportError:  # Windows has no fcntl; SQLite's own lock still keeps each result whole
            yield
            return
        if self.path is None:
            yield
            return
        try:
            descriptor = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unwritable(f"{self.path}.lock", error.strerror) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            remedy = "wait for that run, or use another gradebook for this one"
            got = f"{self.path}: a run is under way"
            raise CourseError("a gradebook that no other run writes", got, remedy) from None
        finally:
            os.close(descriptor)

    @property
    def class_seed(self) -> int:
        """The seed from which the seeds of all submissions are derived."""
        row = self._book.execute("SELECT value FROM settings WHERE name = 'class_seed'").fetchone()
        return int(checked_number(row and int(row[0]), "class_seed", most=2**64))

    def use_class_seed(self, seed: int) -> None:
        """Set the class seed. Raises: CourseError if results with another class seed exist."""
        with self._transaction():
            used = self._book.execute("SELECT count(*) FROM results").fetchone()[0]
            if used and seed != self.class_seed:
                got = f"{seed}; this book was begun with {self.class_seed}"
                raise CourseError("the seed of this gradebook", got, "omit --seed, or use a new gradebook")
            self._book.execute("UPDATE settings SET value = ? WHERE name = 'class_seed'", (str(seed),))

    def record(
        self, *, learner: str, exercise: str, path: str, digest: str, report: Mapping[str, Any],
        contract: str = "", submitted_at: str | None = None, seconds: float | None = None,
    ) -> Entry:  # fmt: skip
        """Store a result and return the learner's entry; an identical result is not stored twice.

        The same transaction ends a requested regrading and removes an earlier failure to grade.
        """
        took = float(report["seconds"] if seconds is None else seconds)
        row = (
            learner, exercise, path, digest, contract, str(report["seed"]), submitted_at, _now(), took,
            float(report["earned"]), float(report["points"]), json.dumps({**report, "path": path}),
        )  # fmt: skip
        with self._transaction():
            if not self._is_kept(learner, exercise, digest, contract, submitted_at):
                marks = ", ".join("?" * len(row))
                self._book.execute(f"INSERT INTO results ({RESULT}) VALUES ({marks})", row)
            for table in ("wanted", "ungraded"):
                self._book.execute(
                    f"DELETE FROM {table} WHERE learner = ? AND exercise = ?", (learner, exercise)
                )
        return self.entries(exercise, learner)[0]

    def record_ungraded(self, failed: Ungraded) -> None:
        """Record that we could not grade a submission; existing results stay."""
        with self._transaction():
            self._book.execute(
                "INSERT INTO ungraded VALUES (?, ?, ?, ?, ?, ?, 1) ON CONFLICT DO UPDATE SET path = excluded.path,"
                " digest = excluded.digest, reason = excluded.reason, at = excluded.at, tries = tries + 1",
                (
                    failed.learner,
                    failed.exercise,
                    failed.path,
                    failed.digest,
                    failed.reason,
                    failed.at or _now(),
                ),
            )

    def is_graded(
        self, learner: str, exercise: str, digest: str, contract: str, submitted_at: str | None = None
    ) -> bool:
        """Return whether this notebook has a result and no regrading is requested.

        A result from other checks also counts, until somebody requests a new one. A result without a sandbox
        counts only if `contract` is without a sandbox, too.
        """
        return self._is_kept(learner, exercise, digest, contract, submitted_at, is_unsafe)

    def _is_kept(
        self, learner: str, exercise: str, digest: str, contract: str, at: str | None,
        kind: Callable[[str], Any] = str,
    ) -> bool:  # fmt: skip
        """Return whether this notebook has a result of version `contract`, and no regrading is requested.

        Two versions count as equal if `kind` returns the same value for them.
        """
        if self._book.execute(
            "SELECT 1 FROM wanted WHERE learner = ? AND exercise = ?", (learner, exercise)
        ).fetchone():
            return False
        rows = self._book.execute(
            f"SELECT digest, contract, submitted_at FROM results WHERE learner = ? AND exercise = ? {CHOSEN}",
            (learner, exercise),
        ).fetchall()
        found = [(row[0], kind(row[1]), row[2] or "") for row in rows]
        result = digest, kind(contract)
        same = [when for *key, when in found if tuple(key) == result]
        # The result of another notebook of this learner may count instead. If this notebook is handed in later
        # than both results, the learner has returned to it, so it is a new submission.
        return bool(same) and (found[0][:2] == result or max(*same, found[0][2]) >= (at or ""))

    def want(self, keys: Iterable[Key]) -> None:
        """Request that these (learner, exercise) pairs are graded again, in addition to open earlier requests."""
        with self._transaction():
            self._book.executemany("INSERT OR IGNORE INTO wanted VALUES (?, ?)", list(keys))

    def wanted(self) -> set[Key]:
        """Return the (learner, exercise) pairs whose regrading is requested and not done yet."""
        return {(str(a), str(b)) for a, b in self._book.execute("SELECT learner, exercise FROM wanted")}

    def ungraded(self) -> list[Ungraded]:
        """Return the submissions that we could not grade, sorted by learner and exercise."""
        rows = self._book.execute(
            "SELECT learner, exercise, path, digest, reason, at, tries FROM ungraded ORDER BY 1, 2"
        )
        found = []
        for row in rows:
            learner, exercise, path, digest, reason, at = (checked_text(text, "ungraded") for text in row[:6])
            tries = int(checked_number(row[6], "tries"))
            found.append(Ungraded(learner, exercise, path, digest, reason, at, tries))
        return found

    def set_policy(self, exercise: str | None, *, due: str | None = None, late: str | None = None) -> None:
        """Store a deadline and the cost of lateness for `exercise`, or the default of all exercises (None).

        A value of None keeps the stored value. Raises: CourseError for text in another form, and for an
        unknown exercise.
        """
        if exercise is not None and exercise not in exercise_ids():
            raise CourseError(f"one of the exercises {', '.join(exercise_ids())}", repr(exercise))
        stamp = None if due is None else utc(parse_due(due)) if due else ""
        if late is not None:
            parse_late(late)
        with self._transaction():
            before = self.policies().get(exercise or "", ("", ""))
            values = [old if new is None else new for old, new in zip(before, (stamp, late), strict=True)]
            self._book.execute(
                "INSERT INTO policies VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET due = excluded.due, late = excluded.late",
                (exercise or "", *values),
            )

    @property
    def counts_reference(self) -> bool:
        """Whether a stage's points with the reference's functions in place of wrong helpers count."""
        row = self._book.execute("SELECT value FROM settings WHERE name = 'helpers'").fetchone()
        return row is None or checked_text(row[0], "helpers") == HELPERS[0]

    def set_helpers(self, helpers: str) -> None:
        """Set whose helpers the points of stages are based on, one of HELPERS. Raises: CourseError for another word."""
        if helpers not in HELPERS:
            raise CourseError(f"one of {', '.join(HELPERS)}", repr(helpers))
        with self._transaction():
            self._book.execute(
                "INSERT INTO settings VALUES ('helpers', ?) ON CONFLICT DO UPDATE SET value = excluded.value",
                (helpers,),
            )

    def policy(self, exercise: str) -> tuple[str, Late]:
        """Return the exercise's deadline (UTC, ISO 8601, or "" without one) and its cost of lateness."""
        policies = self.policies()
        own, general = policies.get(exercise, ("", "")), policies.get("", ("", ""))
        return own[0] or general[0], parse_late(own[1] or general[1])

    def policies(self) -> dict[str, tuple[str, str]]:
        """Return (deadline, cost of lateness) by exercise; "" is the key for exercises without their own."""
        rows = self._book.execute("SELECT exercise, due, late FROM policies").fetchall()
        return {
            checked_text(exercise, "exercise"): (
                checked_moment(due) if due else "",
                checked_text(late, "late"),
            )
            for exercise, due, late in rows
        }

    def override(self, learner: str, exercise: str, score: float | None, reason: str, by: str) -> Entry:
        """Make an instructor's score count, or with None the computed score again; return the entry.

        A learner who handed in nothing, or could not be graded, gets an entry.
        Raises: CourseError without a reason or a name, for a score that is not a number of at least 0, and
        for a learner or an exercise that is not in the gradebook.
        """
        for what, text, option in (
            ("a reason", reason, "--reason"),
            ("the name of an instructor", by, "--by"),
        ):
            if not text.strip():
                raise CourseError(
                    f"{what} for the override", "nothing", f"{option}=…; it is kept with the score"
                )
        if score is not None and not (math.isfinite(score) and 0 <= score <= 1e6):
            raise CourseError("a score of 0 or more", repr(score))
        if not (self._knows("learner", learner) and self._knows("exercise", exercise)):
            raise self._unknown(learner, exercise)
        with self._transaction():
            self._book.execute(
                "INSERT INTO overrides (learner, exercise, score, reason, given_by, at) VALUES (?, ?, ?, ?, ?, ?)",
                (learner, exercise, score, reason.strip(), by.strip(), _now()),
            )
        return next(
            iter(self.entries(exercise, learner)), self._by_word(Override(learner, exercise, None, "", ""))
        )

    def _knows(self, column: str, value: str) -> bool:
        tables = (f"SELECT 1 FROM {table} WHERE {column} = ?" for table in ("results", "ungraded"))
        return any(self._book.execute(query, (value,)).fetchone() for query in tables)

    def _by_word(self, word: Override) -> Entry:
        """Return the entry of a learner who has an override but no result."""
        maximum = self._book.execute(
            "SELECT coalesce(max(maximum), 0) FROM results WHERE exercise = ?", (word.exercise,)
        ).fetchone()[0]
        report = {
            "path": "", "exercise": word.exercise, "stages": [], "points": maximum, "reason": "nothing was graded",
            "notes": [], "label": "", "seed": 0, "seconds": 0.0, "earned": 0, "ok": False,
        }  # fmt: skip
        return Entry(word.learner, word.exercise, "", "", word.at or _now(), 0.0, report, 0.0, maximum)

    def _unknown(self, learner: str, exercise: str) -> CourseError:
        import difflib

        known = [f"{entry.learner} in {entry.exercise}" for entry in self.entries()]
        near = difflib.get_close_matches(f"{learner} in {exercise}", known, 3, 0.5) or known[:3]
        remedy = f"as in {'; '.join(near)}" if near else "grade something first"
        return CourseError(
            "a learner and an exercise that the gradebook has", f"{learner} in {exercise}", remedy
        )

    def overrides(self, learner: str | None = None, exercise: str | None = None) -> list[Override]:
        """Return every override that was ever given, the oldest first."""
        rows = self._book.execute(
            "SELECT learner, exercise, score, reason, given_by, at FROM overrides WHERE"
            " (?1 IS NULL OR learner = ?1) AND (?2 IS NULL OR exercise = ?2) ORDER BY id",
            (learner, exercise),
        ).fetchall()
        return [
            Override(
                checked_text(row[0], "learner"), checked_text(row[1], "exercise"),
                None if row[2] is None else checked_number(row[2], "score"),
                *(checked_text(text, "override") for text in row[3:]),
            )
            for row in rows
        ]  # fmt: skip

    def entries(self, exercise: str | None = None, learner: str | None = None) -> list[Entry]:
        """Return the entries that count, sorted by learner and exercise.

        Raises: CourseError for a damaged row.
        """
        chosen: dict[Key, Entry] = {}
        overrides = {(each.learner, each.exercise): each for each in self.overrides(learner, exercise)}
        today = Today()
        for entry in self._results(exercise, learner):
            chosen.setdefault((entry.learner, entry.exercise), self._judged(entry, overrides, today))
        for key, word in overrides.items():
            if word.score is not None and key not in chosen:
                chosen[key] = self._judged(self._by_word(word), overrides, today)
        return [chosen[key] for key in sorted(chosen)]

    def history(self, learner: str, exercise: str) -> list[Entry]:
        """Return every result of a learner in an exercise, each with its penalty, in the order of grading."""
        rows, today = self._results(exercise, learner, order="ORDER BY id"), Today()
        return [self._judged(entry, {}, today) for entry in rows]

    def _results(self, exercise: str | None, learner: str | None, order: str = CHOSEN) -> Iterator[Entry]:
        query = (
            f"SELECT id, {RESULT} FROM results WHERE (?1 IS NULL OR exercise = ?1)"
            f" AND (?2 IS NULL OR learner = ?2) {order}"
        )
        try:
            rows = self._book.execute(query, (exercise, learner))
            yield from map(entry_of, rows)
        except sqlite3.Error as error:
            raise DamagedError(f"{self.path}: {error}") from None

    def _judged(self, entry: Entry, overrides: Mapping[Key, Override], today: Today) -> Entry:
        due, late = self.policy(entry.exercise)
        late_s = lateness_s(entry.submitted_at, due)
        word = overrides.get((entry.learner, entry.exercise))
        given = word is not None and word.score is not None
        helped = entry.earned_with_reference - entry.earned if self.counts_reference else 0.0
        return replace(
            entry, late_s=late_s, helped=helped,
            penalty=late.penalty(late_s, entry.earned + helped, entry.maximum),
            override=word.score if word and given else None,
            override_reason=f"{word.reason} ({word.by}, {word.at})" if word and given else "",
            older_checks=today.differs(entry.exercise, entry.contract),
        )  # fmt: skip


def _now() -> str:
    return utc(datetime.now(UTC))
