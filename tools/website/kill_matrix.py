"""The page that shows which check finds which wrong answer.

Every wrong answer was run against every check of its stage, by `python -m tests.course.matrix`, and the
results are committed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ringlab.errors import CourseError
from ringlab_course.checking.contract import Stage
from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.checking.wrong_answers import WrongAnswer, wrong_answers

from .misconceptions import TOGETHER

NAME = "kill-matrix"
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "judge" / "kill_matrix.json"
_HEAD = """\
# Which check finds which wrong answer

A check is worth its points only if it finds a mistake, and a learner is helped only if the mistake is called by its
name. Each row below is a wrong answer that somebody could hand in (an entry of the exercise's `wrong_answers.md`), and
each column a check of the stage. All checks of all tiers ran on the same draw of the probes.

- **●** the check that must find it, and that names the misconception of the second column ("–": it has no name)
- **○** another check that finds it
- empty: this check holds

A check stands **alone** for a wrong answer if no other check of its stage finds it: without the check, that answer
would pass. A check that stands alone for none has a line under the table that says what else it is good for.
"""
_COLUMNS = ("Exercise", "Stages", "Checks", "Wrong answers", "Checks that stand alone for some")


@dataclass(frozen=True)
class Row:
    """A wrong answer, the checks that find it, in the stage's order, and those that name its mistake."""

    wrong: WrongAnswer
    failed: tuple[str, ...]
    naming: tuple[str, ...]


@cache
def entries() -> dict[str, Any]:
    """Return the committed runs, by the answer's name, such as 05/wrong_step_overflows."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))["entries"] if RESULTS.exists() else {}


@cache
def rows(stage_id: str) -> tuple[Row, ...]:
    """Return the wrong answers to a stage, each with the checks that find it.

    Raises: CourseError if one of them was not run.
    """
    return tuple(_row(wrong) for wrong in wrong_answers(stage_id[:2]) if wrong.stage == stage_id)


def _row(wrong: WrongAnswer) -> Row:
    run = entries().get(wrong.submission)
    if run is None:
        raise CourseError(
            f"a run of {wrong.submission} in {RESULTS}", "none", "python -m tests.course.matrix"
        )
    return Row(wrong, tuple(run["failed"]), tuple(run["naming"]))


def alone(stage: Stage) -> dict[str, list[str]]:
    """Return, by check, the names of the wrong answers that no other check of the stage finds."""
    return _sole(stage, lambda row: row.failed)


def worth(stage: Stage, check: str) -> str:
    """Return why the stage has a check that finds no wrong answer alone, or "" if no reason is known."""
    visible = {c.id for c in stage.checks if c.tier == "visible"}
    if shown := _sole(stage, lambda row: [c for c in row.failed if c in visible])[check]:
        return f"in the notebook it is the only one to find {_listed(shown)}"
    if named := _sole(stage, lambda row: row.naming)[check]:
        return f"it alone says what is wrong with {_listed(named)}"
    if first := [row.wrong.name for row in rows(stage.id) if row.failed[:1] == (check,)]:
        return f"it is the first, with the smallest case, to find {_listed(first)}"
    return TOGETHER.get(f"{stage.id}:{check}", "")


def _sole(stage: Stage, found_by: Callable[[Row], Sequence[str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {check.id: [] for check in stage.checks}
    for row in rows(stage.id):
        if len(checks := found_by(row)) == 1:
            found[checks[0]].append(row.wrong.name)
    return found


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def page() -> str:
    """Return the page of all exercises."""
    table = [_line(_COLUMNS), _line("---" for _ in _COLUMNS), *map(summary, exercise_ids())]
    return "\n\n".join([_HEAD, "\n".join(table), *map(section, exercise_ids())]) + "\n"


def section(exercise_id: str) -> str:
    """Return the tables of an exercise."""
    exercise = load_exercise(exercise_id)
    parts = [f"## {exercise_id} · {exercise.title}"]
    for stage in exercise.stages:
        parts += [f"### {stage.id}: {stage.title}", "\n".join(_table(stage))]
        if notes := list(_notes(stage)):
            parts.append("\n".join(notes))
    return "\n\n".join(parts)


def _notes(stage: Stage) -> Iterator[str]:
    for check, names in alone(stage).items():
        if not names:
            yield f"- `{check}`: {worth(stage, check) or 'nothing says why it is here'}"


def summary(exercise_id: str) -> str:
    """Return the line of one exercise in the table at the top of the page."""
    stages = load_exercise(exercise_id).stages
    single = sum(bool(names) for stage in stages for names in alone(stage).values())
    checks = sum(len(stage.checks) for stage in stages)
    return _line((exercise_id, len(stages), checks, len(wrong_answers(exercise_id)), single))


def _table(stage: Stage) -> Iterator[str]:
    checks = [check.id for check in stage.checks]
    yield _line(("Wrong answer", "Misconception", *checks))
    yield _line(["---", "---", *(":-:" for _ in checks)])
    for row in rows(stage.id):
        cells = ("●" if c == row.wrong.check else "○" if c in row.failed else "" for c in checks)
        yield _line((row.wrong.name, row.wrong.misconception or "–", *cells))


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
