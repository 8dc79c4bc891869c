"""An entry told to people: what fails, the mistake behind it, the next hint, and where the time went."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from ringlab.errors import CourseError
from ringlab_course.checking.loading import load_stage
from ringlab_course.gradebook.entry import Entry
from ringlab_course.notebook.checks import RUNGS

_INDENT = "      "


def headline(entry: Entry) -> str:
    """Return one line: learner, exercise, score, and what is behind a score that was not simply earned."""
    notes = []
    if entry.penalty:
        notes.append(f"{entry.earned:g} earned, {entry.penalty:g} off for {lateness(entry.late_s)}")
    if entry.override is not None:
        notes += [] if entry.penalty else [f"{entry.earned:g} earned"]
        notes.append(f"overridden: {entry.override_reason}")
        notes += ["more than there are to earn"] if 0 < entry.maximum < entry.override else []
    notes += filter(None, (entry.report.get("label"), entry.report.get("reason")))
    notes += ["graded by older checks"] if entry.older_checks else []
    tail = f"  ({'; '.join(notes)})" if notes else ""
    name = f"{entry.learner}  {entry.exercise or '?'}"
    return f"{name}: {entry.score:g} of {entry.maximum:g} points{tail}"


def explained(entry: Entry, history: Iterable[Entry] = ()) -> Iterator[str]:
    """Yield the lines that say what to tell the learner.

    The rung of the hint is the number of different notebooks that failed the stage: the first failure
    gets a question, the next a direction, then a line of mathematics.
    """
    yield headline(entry)
    yield f"  graded in {entry.seconds:.1f} s; handed in {entry.submitted_at or 'nobody knows when'}"
    past = [*history]
    for stage in entry.report["stages"]:
        failed = [check for check in stage["checks"] if not check["ok"]]
        took = sum(check.get("seconds") or 0.0 for check in stage["checks"])
        head = f"{len(stage['checks']) - len(failed)} of {len(stage['checks'])} checks hold"
        yield f"  {stage['stage']}: {stage['status']}, {head}, {took:.2f} s"
        told: set[str] = set()
        for check in failed:
            yield f"    ✗ {check['title']} ({check['tier']}, {check['points']} points, {check.get('seconds') or 0.0:.2f} s)"
            message = "the same as above" if check["message"] in told else check["message"]
            told.add(check["message"])
            if check.get("misconception"):
                message = f"{message} [{check['misconception']}]"
            yield from textwrap.wrap(message, 100, initial_indent=_INDENT, subsequent_indent=_INDENT)
        for check in stage["checks"]:
            if not check.get("counted", True):
                yield f"    ○ {check['title']} ({check['tier']}, {check['points']} points): holds, not counted"
        if failed:
            yield from _hint(stage["stage"], _failures(stage["stage"], past))


def lateness(late_s: float) -> str:
    """Return seconds as "2 d 3 h late"."""
    minutes = int(late_s // 60)
    parts = ((minutes // 1440, "d"), (minutes // 60 % 24, "h"), (minutes % 60, "min"))
    told = [f"{count} {unit}" for count, unit in parts if count][:2]
    return f"{' '.join(told) or 'less than a minute'} late"


def _failures(stage_id: str, history: Iterable[Entry]) -> int:
    return len(
        {
            entry.digest
            for entry in history
            for stage in entry.report["stages"]
            if stage["stage"] == stage_id and stage["status"] != "ok"
        }
    )


def _hint(stage_id: str, failures: int) -> Iterator[str]:
    try:
        hints = load_stage(stage_id).hints
    except CourseError:  # of a course that has another exercise by now
        return
    rung = min(max(1, failures), len(hints))
    text = f"hint {rung} of {len(hints)}, {RUNGS[rung - 1]}: {hints[rung - 1]}"
    yield from textwrap.wrap(text, 100, initial_indent="    → ", subsequent_indent=_INDENT)
