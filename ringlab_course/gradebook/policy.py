"""Deadlines, and what lateness costs: "10%/day, max 50%, grace 15 min"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from ringlab.errors import CourseError

UNITS_S = {"minute": 60, "min": 60, "hour": 3600, "h": 3600, "day": 86400, "d": 86400, "week": 604800}
_NUMBER = r"(\d{1,6}(?:\.\d{1,6})?)"
_AMOUNT = rf"{_NUMBER}\s*(%|points?|pts?)"
_UNIT = r"(minute|min|hour|h|day|d|week)s?"
_RATE = re.compile(rf"{_AMOUNT}\s*(?:/|per)\s*{_UNIT}", re.IGNORECASE)
_MOST = re.compile(rf"max(?:imum)?\s*:?\s*{_AMOUNT}", re.IGNORECASE)
_GRACE = re.compile(rf"grace\s*:?\s*{_NUMBER}\s*{_UNIT}", re.IGNORECASE)
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)(?:T| +)([\d:.]+(?:Z|[+-][\d:]+)?)(?: +(\S+))?")
_HELP = 'as in "10%/day, max 50%, grace 15 min" or "2 points/hour"'


@dataclass(frozen=True)
class Late:
    """The cost of lateness: `amount` for every unit of `unit_s` seconds that has begun, `most` in all.

    Amounts are points, or where `…_is_share` says so shares of the exercise's maximum. A submission
    that is up to `grace_s` late costs nothing; a later one counts from the deadline.
    """

    amount: float = 0.0
    amount_is_share: bool = False
    unit_s: float = 86400.0
    most: float = math.inf
    most_is_share: bool = False
    grace_s: float = 0.0

    def penalty(self, late_s: float, earned: float, maximum: float) -> float:
        """Return the points to take off: 0 or more, and no more than was earned."""
        if late_s <= self.grace_s or late_s <= 0:
            return 0.0
        begun = math.ceil(late_s / self.unit_s)
        points = self.amount * begun * (maximum if self.amount_is_share else 1.0)
        limit = self.most * maximum if self.most_is_share else self.most
        return max(0.0, min(points, limit, earned))


def parse_late(text: str) -> Late:
    """Return the policy that `text` describes; empty text costs nothing. Raises: CourseError."""
    values: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        for name, pattern in (("amount", _RATE), ("most", _MOST), ("grace", _GRACE)):
            if found := pattern.fullmatch(part):
                if name in values:
                    raise CourseError(f"one {name} of lateness", repr(text), _HELP)
                values |= _values(name, found)
                break
        else:
            raise CourseError("what lateness costs", repr(part), _HELP)
    if values and "amount" not in values:
        raise CourseError("what lateness costs per minute, hour, day or week", repr(text), _HELP)
    return Late(
        values.get("amount", 0.0), bool(values.get("amount_is_share")), values.get("unit_s", 86400.0),
        values.get("most", math.inf), bool(values.get("most_is_share")), values.get("grace", 0.0),
    )  # fmt: skip


def _values(name: str, found: re.Match[str]) -> dict[str, float]:
    if name == "grace":
        return {"grace": float(found[1]) * UNITS_S[found[2].lower()]}
    share = found[2] == "%"
    values = {name: float(found[1]) / (100 if share else 1), f"{name}_is_share": float(share)}
    return values | ({"unit_s": float(UNITS_S[found[3].lower()])} if name == "amount" else {})


def parse_due(text: str) -> datetime:
    """Return the deadline `text` in UTC: "2026-11-30T23:59Z", "… 23:59+01:00" or "… 23:59 Europe/Berlin".

    A local time that a change of clocks makes twice, or skips, is taken for the later instant.
    Raises: CourseError for anything else; a time without a zone is somebody else's midnight.
    """
    found = _MOMENT.fullmatch(text.strip())
    try:
        if found is None:
            raise ValueError("no date and time")
        due = datetime.fromisoformat(f"{found[1]}T{found[2]}")
        if (due.tzinfo is None) != bool(found[3]):
            raise ValueError("no zone, or two")
        if found[3]:
            local = ZoneInfo(found[3])
            return max(due.replace(tzinfo=local, fold=fold).astimezone(UTC) for fold in (0, 1))
        return due.astimezone(UTC)
    except (ValueError, OSError, KeyError, OverflowError):
        remedy = "as in 2026-11-30T23:59Z, 2026-11-30T23:59+01:00 or 2026-11-30T23:59 Europe/Berlin"
        raise CourseError("a date, a time and its zone", repr(text), remedy) from None


def utc(moment: datetime) -> str:
    """Return `moment` as UTC text that sorts as time does."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def lateness_s(submitted_at: str | None, due: str) -> float:
    """Return the seconds after the deadline; 0 without a deadline or a known time."""
    if not submitted_at or not due:
        return 0.0
    late = datetime.fromisoformat(submitted_at) - datetime.fromisoformat(due)
    return max(0.0, late.total_seconds())
