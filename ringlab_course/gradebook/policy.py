"""Deadlines, and what lateness costs: "10%/day, max 50%, grace 15 min".

Whose submission a path is, and of which exercise, as far as the path says.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from zoneinfo import ZoneInfo

from ringlab.errors import CourseError
from ringlab_course.catalogue import CAPSTONE, LESSONS
from ringlab_course.checking.loading import exercise_ids
from ringlab_course.gradebook.readable import shown_name

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
    """What lateness costs: `amount` for every unit of `unit_s` seconds that has begun, `most` in all.

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
    """Return the seconds after the deadline; 0 where there is none, or nobody knows when."""
    if not submitted_at or not due:
        return 0.0
    late = datetime.fromisoformat(submitted_at) - datetime.fromisoformat(due)
    return max(0.0, late.total_seconds())


_COPY = re.compile(r"(?:-Copy\d*| ?\(\d+\))$")
_SEPARATORS = "_. -"


def learner_of(path: Path, root: Path, exercise: str) -> str:
    """Return the learner whose notebook `path` is, found in the folder (or given as the file) `root`.

    In nbgrader's tree it is the folder below submitted/, else the first folder below `root` that is
    not called as an exercise is. A notebook without such a folder is called after its learner, as in
    alice_05.ipynb; if it is called as the exercise is, its folder is the learner's.
    """
    path, root = _absolute(path), _absolute(root)
    if nbgrader_folder(path, root) is not None:
        return shown_name(path.parts[-3])
    below = path.relative_to(root).parts[:-1] if root != path else ()
    for folder in below:
        if not exercise_named(folder):
            return shown_name(folder)
    rest = _without_exercise(path.name.removesuffix(".ipynb"), exercise)
    return shown_name(rest or (root.name if root != path else root.parent.name) or "/")


def exercise_of(path: Path) -> str:
    """Return the exercise that the path names: 05_emulated_ring as a folder or file, or …_05.ipynb; or ""."""
    stem = _COPY.sub("", path.name.removesuffix(".ipynb"))
    for identifier, slug in _slugs().items():
        if stem == slug or stem.startswith(slug) or stem.endswith(slug):
            return identifier
    last = re.search(rf"[{_SEPARATORS}](\d\d)$", stem)
    if last and last[1] in exercise_ids():
        return last[1]
    return exercise_named(path.parent.name)


def exercise_named(folder: str) -> str:
    """Return the exercise that is called exactly `folder`, as in 05_emulated_ring, or "".

    A bare number may as well be a learner's.
    """
    return next((identifier for identifier, slug in _slugs().items() if slug == folder), "")


def nbgrader_folder(path: Path, root: Path) -> Path | None:
    """Return the folder of one assignment of one learner in nbgrader's submitted/, or None.

    submitted/ is `root`, above it or right in it: further below it is a learner's, who may call
    folders as they like.
    """
    folder, root = _absolute(path).parent, _absolute(root)
    tree = folder.parent.parent
    if tree.name != "submitted" or not (root.is_relative_to(tree) or tree.parent == root):
        return None
    stamped = (folder / "timestamp.txt").is_file()
    return folder if stamped or exercise_named(folder.name) else None


def _without_exercise(stem: str, exercise: str) -> str:
    """alice_05 → alice; 05_emulated_ring (1) → ""; what names another exercise, or none, stays whole."""
    short = _COPY.sub("", stem)
    for name in filter(None, (_slugs().get(exercise, ""), exercise)):
        if short == name and name != exercise:
            return ""
        for rest in (short.removeprefix(name), short.removesuffix(name)):
            if rest != short and rest.strip(_SEPARATORS) != rest:
                return rest.strip(_SEPARATORS)
    return stem


@cache
def _slugs() -> dict[str, str]:
    return {lesson.id: lesson.slug for lesson in (*LESSONS, CAPSTONE) if lesson.id in exercise_ids()}


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))
