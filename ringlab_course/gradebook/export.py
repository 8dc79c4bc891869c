"""Export grades for other programs, as JSON or as CSV. Spreadsheets read no cell of the CSV as a formula."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ringlab.errors import CourseError
from ringlab_course.gradebook.entry import Entry, Ungraded, failed_checks

COLUMNS = (
    "learner", "exercise", "score", "maximum", "earned", "earned_with_reference", "penalty", "late_s", "override", "override_reason",
    "submitted_at", "graded_at", "failed_checks", "reason", "path", "digest",
)  # fmt: skip
FORMULA = "=+-@\t\r\n＝＋－＠"
"""First characters that make a spreadsheet treat a cell as a formula."""
UNFINISHED = ".unfinished-"
"""The prefix of the names of files that are still being written."""


def failed_briefly(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the names, points and messages of a report's failed checks."""
    names = ("stage", "id", "title", "tier", "points", "message", "misconception")
    return [{name: check.get(name) for name in names} for check in failed_checks(report)]


def entry_data(entry: Entry) -> dict[str, Any]:
    """Return an entry as data for JSON: its report, scores, failed checks, lateness and override."""
    return {
        **entry.report, "learner": entry.learner, "exercise": entry.exercise, "path": entry.path,
        "score": entry.score, "maximum": entry.maximum, "failed_checks": failed_briefly(entry.report),
        "earned_with_reference": entry.earned_with_reference, "penalty": entry.penalty, "late_s": entry.late_s, "override": entry.override,
        "override_reason": entry.override_reason, "submitted_at": entry.submitted_at,
        "graded_at": entry.graded_at, "digest": entry.digest, "older_checks": entry.older_checks,
    }  # fmt: skip


def ungraded_data(each: Ungraded) -> dict[str, Any]:
    """Return a submission that we could not grade as data for JSON."""
    names = ("learner", "exercise", "path", "reason", "at", "tries")
    return {name: getattr(each, name) for name in names}


def csv_text(entries: Iterable[Entry], ungraded: Iterable[Ungraded] = ()) -> str:
    """Return one CSV line for every entry. An ungraded entry has a reason instead of a score."""
    file = io.StringIO()
    # Every cell is quoted, so that programs that use ; as the separator do not split a cell.
    writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(COLUMNS)
    for entry in entries:
        failed = "; ".join(f"{check['stage']} {check['id']}" for check in entry.failed)
        reason = entry.report.get("reason", "")
        values = {**entry_data(entry), "failed_checks": failed, "reason": reason}
        writer.writerow([escaped(values[name]) for name in COLUMNS])
    for each in ungraded:
        values = {**ungraded_data(each), "reason": f"not graded: {each.reason}", "digest": each.digest}
        writer.writerow([escaped(values.get(name)) for name in COLUMNS])
    return file.getvalue()


def escaped(value: Any) -> str:
    """Return a value as the text of a cell.

    Text that a spreadsheet would run as a formula, or that begins with ', gets a ' in front.
    """
    if isinstance(value, float):
        return f"{value:.15g}"
    text = "" if value is None else str(value)
    return f"'{text}" if text[:1] in (*FORMULA, "'") and text else text


def json_text(entries: Iterable[Entry], ungraded: Iterable[Ungraded] = ()) -> str:
    """Return entries, and submissions that could not be graded, as one JSON object."""
    data = {"entries": [*map(entry_data, entries)], "not_graded": [*map(ungraded_data, ungraded)]}
    return json.dumps(data, indent=2) + "\n"


def write(path: Path, text: str) -> None:
    """Write `text` in one step, readable only by its owner; readers find either the old text or the new text.

    Raises: CourseError if the file cannot be written.
    """
    unfinished = ""
    try:
        descriptor, unfinished = tempfile.mkstemp(
            dir=path.parent, prefix=UNFINISHED
        )  # only the owner may read grades
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(unfinished, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        if isinstance(error, OSError):
            raise CourseError("a file that can be written", f"{path}: {error.strerror}") from None
        raise
