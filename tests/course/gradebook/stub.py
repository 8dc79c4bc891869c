"""A judge without a sandbox that gives each notebook the points written in it, and classes of such notebooks."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringlab.errors import SandboxError
from ringlab_course.checking.reports import CheckReport, StageReport
from ringlab_course.gradebook.collect import HandedIn, handed_in
from ringlab_course.judge.judge import GradeReport

POINTS = (2, 3, 5)


def report(path: str, exercise: str = "05", earned: int = 10, seed: int = 0, reason: str = "") -> GradeReport:
    """Return a report of three checks. As many of the first checks pass as `earned` points allow."""
    checks = []
    for number, points in enumerate(POINTS):
        ok = sum(POINTS[: number + 1]) <= earned
        message = "" if ok else f"check {number} fails; its probe had seed {seed}"
        tier, wrong = ("visible", "stress", "held-out")[number], None if ok else "averages_blocks"
        checks.append(CheckReport(f"c{number}", f"check {number}", tier, points, ok, message, "", wrong))
    status = "ok" if earned >= sum(POINTS) else "wrong"
    stages = (StageReport(f"{exercise}.step", status, tuple(checks)),)
    return GradeReport(path, exercise, stages, sum(POINTS), reason, seed=seed, seconds=0.25)


def judge(
    path: Path, exercise: str | None, *, unsafe: bool = False, seed: int | None = None, patience: float = 1.0
) -> GradeReport:
    """Return a report with the points that the file's first word gives, or fail if it names a failure."""
    word = Path(path).read_text().split()[0]
    if word == "sandbox":
        raise SandboxError("a worker that starts", "none", "try again")
    if word == "bug":
        raise ZeroDivisionError("a bug of\nthe judge")
    if word == "dies":
        os._exit(9)
    if word == "changes":
        Path(path).write_text("changes again")
    points = int(word) if word.isdigit() else 0
    return report(str(path), exercise or "05", points, seed or 0)


def write(folder: Path, learner: str, word: str, exercise: str = "05_emulated_ring") -> Path:
    """Write a notebook of `learner` for the stub judge and return its path."""
    path = folder / learner / f"{exercise}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{word} {learner}")
    return path


def submissions(folder: Path) -> list[HandedIn]:
    """Return the submissions below `folder`, in the order of the learners."""
    found = [handed_in(path, folder) for path in sorted(folder.rglob("*.ipynb"))]
    return sorted(found, key=lambda each: each.key)


def data(**changes: Any) -> dict[str, Any]:
    """Return the arguments of `Gradebook.record` for one result.

    earned: its points. again: its points with the reference's helpers, if not 0.
    """
    arguments = {
        "learner": "ada", "exercise": "05", "path": "ada/05.ipynb", "digest": "d", "contract": "c",
        "submitted_at": "2026-11-01T12:00:00.000000+00:00",
    }  # fmt: skip
    earned = changes.pop("earned", 10)
    again = changes.pop("again", 0)
    arguments |= changes
    made = report(arguments["path"], arguments["exercise"], earned)
    if again:
        made = replace(made, stages=(replace(made.stages[0], replaced=("ring_step",), earned_again=again),))
    return {**arguments, "report": made.as_dict()}


def read_csv(text: str) -> list[dict[str, str]]:
    """Return the lines of `csv_text` as dictionaries of text, with escapes removed."""
    csv.field_size_limit(1 << 20)
    header, *lines = csv.reader(io.StringIO(text, newline=""))
    return [dict(zip(header, (cell.removeprefix("'") for cell in line), strict=True)) for line in lines]
