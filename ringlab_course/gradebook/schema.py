"""The gradebook's file: its tables, their versions, and how to recognise a file that ringlab wrote.

A row is refused if its values are not in the expected form, because then somebody has edited it.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sqlite3
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ringlab.errors import CourseError
from ringlab_course.gradebook.entry import Entry

APPLICATION_ID = 0x52494E47  # "RING"
BLOB_BYTES = 16 << 20  # the length of the longest text that is read back, in bytes
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE settings (name TEXT PRIMARY KEY NOT NULL, value TEXT NOT NULL)",
        """CREATE TABLE results (
            id INTEGER PRIMARY KEY, learner TEXT NOT NULL, exercise TEXT NOT NULL, path TEXT NOT NULL,
            digest TEXT NOT NULL, contract TEXT NOT NULL, seed TEXT NOT NULL, submitted_at TEXT,
            graded_at TEXT NOT NULL, seconds REAL NOT NULL, earned REAL NOT NULL, maximum REAL NOT NULL,
            report TEXT NOT NULL)""",
        "CREATE INDEX results_of ON results (learner, exercise)",
        """CREATE TABLE ungraded (
            learner TEXT NOT NULL, exercise TEXT NOT NULL, path TEXT NOT NULL, digest TEXT NOT NULL,
            reason TEXT NOT NULL, at TEXT NOT NULL, tries INTEGER NOT NULL, PRIMARY KEY (learner, exercise))""",
        """CREATE TABLE wanted (
            learner TEXT NOT NULL, exercise TEXT NOT NULL, PRIMARY KEY (learner, exercise))""",
        """CREATE TABLE overrides (
            id INTEGER PRIMARY KEY, learner TEXT NOT NULL, exercise TEXT NOT NULL, score REAL,
            reason TEXT NOT NULL, given_by TEXT NOT NULL, at TEXT NOT NULL)""",
        "CREATE TABLE policies (exercise TEXT PRIMARY KEY NOT NULL, due TEXT NOT NULL, late TEXT NOT NULL)",
    ),
)
"""The SQL statements that upgrade each version to the next one."""


def connect(path: Path | None, *, create: bool) -> sqlite3.Connection:
    """Return a connection to the gradebook at `path` (None: in memory), upgraded to the newest version.

    A gradebook in a place that cannot be written can still be read.

    Raises: CourseError if there is no file (unless `create`), or the file is not a gradebook of ours.
    """
    if path is not None and not create and not path.is_file():
        raise CourseError("a gradebook", f"no file {path}", "`ringlab grade FOLDER --book FILE` makes one")
    if path is not None and not path.parent.is_dir():
        raise CourseError("a folder for the gradebook", f"no folder {path.parent}", "make it first")
    try:
        if path is not None and not path.exists():  # only the owner may read grades and the class seed
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        book = sqlite3.connect(_address(path), timeout=60, isolation_level=None, uri=True)
    except (sqlite3.Error, OSError) as error:
        raise _foreign(path, str(error)) from None
    try:
        book.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, BLOB_BYTES)
        book.execute("PRAGMA trusted_schema = OFF")
        book.execute("PRAGMA foreign_keys = ON")
        book.execute("PRAGMA wal_autocheckpoint = 1")  # even after a kill, results are in the main file
        _open(book, path, create=create)
        return book
    except sqlite3.Error as error:
        book.close()
        raise _foreign(path, str(error)) from None
    except BaseException:
        book.close()
        raise


def _address(path: Path | None) -> str:
    """Return the address that SQLite opens.

    Normally SQLite writes files beside a database even to read it. If it cannot write there, the address opens
    the database for reading only. If no log beside it contains further results, the address also declares the
    database immutable, so that SQLite needs no such files.
    """
    if path is None:
        return ":memory:"
    address = f"file:{quote(os.fsencode(path.absolute()))}"
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        return address
    log = Path(f"{path}-wal")  # the log may contain results that the main file lacks
    return f"{address}?mode=ro" if log.exists() and log.stat().st_size else f"{address}?immutable=1"


def _open(book: sqlite3.Connection, path: Path | None, *, create: bool) -> None:
    version = _identify(book, path)
    if version == 0 and not create:
        remedy = f"after a run was killed, its results may be in {path}-wal: keep both files together"
        raise CourseError("a gradebook", f"an empty file {path}", remedy)
    if version < len(MIGRATIONS):
        book.execute("PRAGMA journal_mode = WAL")
        book.execute("BEGIN IMMEDIATE")
        try:
            # checked again, as another process may have upgraded it first
            _migrate(book, _identify(book, path))
            book.execute("COMMIT")
        except BaseException:
            book.execute("ROLLBACK")
            raise
    book.execute("PRAGMA synchronous = FULL")  # results that were reported also survive a power cut
    _check_tables(book, path)


def _identify(book: sqlite3.Connection, path: Path | None) -> int:
    """Return the version of a gradebook, or 0 for an empty file. Raises: CourseError for any other file."""
    application = book.execute("PRAGMA application_id").fetchone()[0]
    version = book.execute("PRAGMA user_version").fetchone()[0]
    tables = book.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if (application, version, tables) == (0, 0, 0):
        return 0
    if application != APPLICATION_ID:
        raise _foreign(path, "another program's database")
    if version > len(MIGRATIONS):
        needed = f"a gradebook of version {len(MIGRATIONS)} or older"
        raise CourseError(
            needed, f"version {version} in {path}", "use the ringlab that made it, or a newer one"
        )
    return int(version)


def _migrate(book: sqlite3.Connection, version: int) -> None:
    for statements in MIGRATIONS[version:]:
        for statement in statements:
            book.execute(statement)
    if version == 0:
        book.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        book.execute("INSERT INTO settings VALUES ('class_seed', ?)", (str(secrets.randbits(64)),))
    book.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")


def _check_tables(book: sqlite3.Connection, path: Path | None) -> None:
    """Refuse tables, views and triggers that are not ours, as they could change what is read and written."""
    if _tables(book) != expected_tables():
        raise _foreign(path, "tables that ringlab did not make")
    if (word := book.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise CourseError("an undamaged gradebook", f"{path}: {word[:200]}", "restore a copy of it")


def expected_tables() -> set[tuple[str, str, str]]:
    """Return (type, name, SQL) of every object in a gradebook of the newest version."""
    fresh = sqlite3.connect(":memory:")
    try:
        for statements in MIGRATIONS:
            for statement in statements:
                fresh.execute(statement)
        return _tables(fresh)
    finally:
        fresh.close()


def _tables(book: sqlite3.Connection) -> set[tuple[str, str, str]]:
    rows = book.execute("SELECT type, name, coalesce(sql, '') FROM sqlite_master").fetchall()
    return {(kind, name, " ".join(sql.split())) for kind, name, sql in rows}


def _foreign(path: Path | None, got: str) -> CourseError:
    return CourseError("a gradebook of ringlab", f"{path}: {got}", "name another file, or a new one")


RESULT = "learner, exercise, path, digest, contract, seed, submitted_at, graded_at, seconds, earned, maximum, report"
CHOSEN = "ORDER BY coalesce(submitted_at, '') DESC, id DESC"
TEXT_CHARACTERS = 100_000
MOST_POINTS = 1e6
_CHECK = {
    "id": str,
    "title": str,
    "tier": str,
    "points": int,
    "ok": bool,
    "message": str,
    "counterexample": str,
}


class DamagedError(CourseError):
    """A row of a gradebook is not in the form in which ringlab writes rows."""

    def __init__(self, got: str) -> None:
        super().__init__(
            "a gradebook whose rows are as ringlab wrote them", got[:500], "restore a copy of it"
        )


def entry_of(row: tuple[Any, ...]) -> Entry:
    """Return the entry of a row of results. Raises: DamagedError for a damaged row."""
    try:
        return _entry(row)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedError(f"result {row[0]}: {type(error).__name__}: {error}") from None


def _entry(row: tuple[Any, ...]) -> Entry:
    learner, exercise, path, digest, contract, seed = (checked_text(value, "text") for value in row[1:7])
    submitted_at, graded_at = (None if row[7] is None else checked_moment(row[7])), checked_moment(row[8])
    seconds, earned, maximum = (checked_number(value, f"number of row {row[0]}") for value in row[9:12])
    report = json.loads(row[12])
    if not isinstance(report, dict) or (report["earned"], report["points"]) != (earned, maximum):
        raise ValueError(f"row {row[0]} differs from its report")
    if earned > maximum or report["exercise"] not in (exercise, ""):
        raise ValueError(f"row {row[0]} has more points than its maximum, or a report of another exercise")
    if checked_number(report.get("earned_with_reference", earned), "earned_with_reference") > maximum:
        raise ValueError(f"row {row[0]} has more points with the reference's helpers than its maximum")
    for stage in report["stages"]:
        checked_text(stage["stage"], "stage")
        checked_number(stage.get("earned_again", 0), "earned_again")
        for name in stage.get("replaced", ()):
            checked_text(name, "replaced")
        for check in stage["checks"]:
            for name, kind in _CHECK.items():
                if not isinstance(check[name], kind):
                    raise TypeError(f"row {row[0]}: {name} of a check is not of type {kind.__name__}")
    return Entry(
        learner, exercise, path, digest, graded_at, seconds, report, earned, maximum, submitted_at,
        contract=contract, seed=int(seed), id=row[0],
    )  # fmt: skip


def checked_text(value: Any, what: str) -> str:
    """Return `value` if it is text of limited length. Raises: DamagedError otherwise."""
    if not isinstance(value, str) or len(value) > TEXT_CHARACTERS:
        raise DamagedError(f"{what} is not text of at most {TEXT_CHARACTERS} characters")
    return value


def checked_number(value: Any, what: str, most: float = MOST_POINTS) -> float:
    """Return `value` if it is a number from 0 to `most`. Raises: DamagedError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DamagedError(f"{what} is not a number")
    if not math.isfinite(value) or not 0 <= value <= most:
        raise DamagedError(f"{what} is not between 0 and {most:g}")
    return value


def checked_moment(value: Any) -> str:
    """Return `value` if it is an ISO 8601 time with a zone. Raises: DamagedError otherwise."""
    try:
        if datetime.fromisoformat(checked_text(value, "time")).utcoffset() is not None:
            return str(value)
    except ValueError:
        pass
    raise DamagedError("an invalid time, or one without a zone")
