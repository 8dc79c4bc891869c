"""Deadlines, and the points that late submissions lose, as in "10%/day, max 50%"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from ringlab.errors import CourseError

DAY_S = 86400
_LATE = re.compile(
    r"(\d{1,3}(?:\.\d{1,6})?)\s*%\s*(?:/|per)\s*day(?:\s*,\s*max\s+(\d{1,3}(?:\.\d{1,6})?)\s*%)?"
)
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)(?:T| +)([\d:.]+(?:Z|[+-][\d:]+)?)(?: +(\S+))?")


@dataclass(frozen=True)
class Late:
    """The cost of lateness, in shares of the exercise's maximum.

    per_day: the share lost for every day that has begun.
    most: the largest share lost in total.
    """

    per_day: float = 0.0
    most: float = 1.0

    def penalty(self, late_s: float, earned: float, maximum: float) -> float:
        """Return the points to take off: at least 0, and at most the points that were earned."""
        days_begun = math.ceil(max(0.0, late_s) / DAY_S)
        return min(self.per_day * days_begun * maximum, self.most * maximum, earned)


def parse_late(text: str) -> Late:
    """Return the policy that `text` describes; empty text costs nothing.

    Raises: CourseError for text in another form.
    """
    if not text.strip():
        return Late()
    found = _LATE.fullmatch(text.strip().lower())
    if found is None:
        raise CourseError("the cost of lateness", repr(text), 'as in "10%/day" or "10%/day, max 50%"')
    return Late(float(found[1]) / 100, float(found[2]) / 100 if found[2] else 1.0)


def parse_due(text: str) -> datetime:
    """Return the deadline `text` in UTC: "2026-11-30T23:59Z", "… 23:59+01:00" or "… 23:59 Europe/Berlin".

    A local time that a change of clocks repeats or skips means the later instant.
    Raises: CourseError for any other text, and for a time without a zone, because it could mean several
    instants.
    """
    found = _MOMENT.fullmatch(text.strip())
    try:
        if found is None:
            raise ValueError("no date and time")
        due = datetime.fromisoformat(f"{found[1]}T{found[2]}")
        if (due.tzinfo is None) != bool(found[3]):
            raise ValueError("no zone or two zones")
        if found[3]:
            local = ZoneInfo(found[3])
            return max(due.replace(tzinfo=local, fold=fold).astimezone(UTC) for fold in (0, 1))
        return due.astimezone(UTC)
    except (ValueError, OSError, KeyError, OverflowError):
        remedy = "as in 2026-11-30T23:59Z, 2026-11-30T23:59+01:00 or 2026-11-30T23:59 Europe/Berlin"
        raise CourseError("a date, a time and its zone", repr(text), remedy) from None


def utc(moment: datetime) -> str:
    """Return `moment` as UTC text; such texts sort in order of time."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def lateness_s(submitted_at: str | None, due: str) -> float:
    """Return the seconds from the deadline to the submission.

    It is 0 for a submission in time, without a deadline, or without a known time of submission.
    """
    if not submitted_at or not due:
        return 0.0
    late = datetime.fromisoformat(submitted_at) - datetime.fromisoformat(due)
    return max(0.0, late.total_seconds())
