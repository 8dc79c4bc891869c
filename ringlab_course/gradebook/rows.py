"""Rows of the gradebook as they are read: a file that somebody edited is refused, never believed blindly."""

from __future__ import annotations

import json
import math
from datetime import datetime
from typing import Any

from ringlab.errors import CourseError
from ringlab_course.gradebook.entry import Entry

RESULT = "learner, exercise, path, digest, contract, seed, submitted_at, graded_at, seconds, earned, maximum, report"
CHOSEN = "ORDER BY coalesce(submitted_at, '') DESC, id DESC"
TEXT_CHARACTERS = 100_000
MOST_POINTS = 1e6
BIGGEST_CSV = 1 << 20
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
    """A row of a gradebook that ringlab did not write so."""

    def __init__(self, got: str) -> None:
        super().__init__(
            "a gradebook whose rows are as ringlab wrote them", got[:500], "restore a copy of it"
        )


def entry_of(row: tuple[Any, ...]) -> Entry:
    """Return the entry of a row of results. Raises: DamagedError."""
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
        raise ValueError(f"row {row[0]} does not say what its report says")
    if earned > maximum or report["exercise"] not in (exercise, ""):
        raise ValueError(f"row {row[0]} has more points than there are, or another exercise's")
    for stage in report["stages"]:
        checked_text(stage["stage"], "stage")
        for check in stage["checks"]:
            for name, kind in _CHECK.items():
                if not isinstance(check[name], kind):
                    raise TypeError(f"row {row[0]}: {name} of a check is no {kind.__name__}")
    return Entry(
        learner, exercise, path, digest, graded_at, seconds, report, earned, maximum, submitted_at,
        contract=contract, seed=int(seed),
    )  # fmt: skip


def checked_text(value: Any, what: str) -> str:
    """Return `value` if it is text of a bounded length. Raises: DamagedError."""
    if not isinstance(value, str) or len(value) > TEXT_CHARACTERS:
        raise DamagedError(f"{what} is no text of at most {TEXT_CHARACTERS} characters")
    return value


def checked_number(value: Any, what: str, most: float = MOST_POINTS) -> float:
    """Return `value` if it is a number from 0 to `most`. Raises: DamagedError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DamagedError(f"{what} is no number")
    if not math.isfinite(value) or not 0 <= value <= most:
        raise DamagedError(f"{what} is not between 0 and {most:g}")
    return value


def checked_moment(value: Any) -> str:
    """Return `value` if it is a time with its zone, ISO 8601. Raises: DamagedError."""
    try:
        if datetime.fromisoformat(checked_text(value, "time")).utcoffset() is not None:
            return str(value)
    except ValueError:
        pass
    raise DamagedError("a time that is none, or has no zone")
