"""The page that says which check finds which wrong answer: every wrong answer is run against every check of its stage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from multiprocessing import get_context

from ringlab_course.checking.contract import Stage
from ringlab_course.checking.loading import exercise_ids, load_exercise, load_stage
from ringlab_course.checking.reports import StageReport, run_in_process
from ringlab_course.checking.wrong_answers import WrongAnswer, namespace_of, wrong_answers

from .misconceptions import TOGETHER

NAME = "kill-matrix"
SEED = 1
_HEAD = """\
# Which check finds which wrong answer

A check is worth its points only if it finds a mistake, and a learner is helped only if the mistake is called by its
name. Each row below is a wrong answer that somebody could hand in (an entry of the exercise's `wrong_answers.md`), and
each column a check of the stage. {how}

- **●** the check that must find it, and that names the misconception of the second column ("–": it has no name)
- **○** another check that finds it
- empty: this check holds

A check stands **alone** for a wrong answer if no other check of its stage finds it: without the check, that answer
would pass. A check that stands alone for none has a line under the table that says what else it is good for.
"""
_RUN = (
    "All checks of all tiers ran on the same draw of the probes when this page was built; those of cost and speed only where "
    "no visible check of values had named the mistake."
)
_NOT_RUN = "Nothing was run when this page was built, so **○** is missing."
_COLUMNS = ("Exercise", "Stages", "Checks", "Wrong answers", "Checks that stand alone for some")


@dataclass(frozen=True)
class Row:
    """A wrong answer: the checks that find it, in the stage's order; those of them that name its mistake."""

    wrong: WrongAnswer
    failed: tuple[str, ...]
    naming: tuple[str, ...]


@cache
def rows(stage_id: str) -> tuple[Row, ...]:
    """Return the wrong answers to a stage, each with the checks that find it."""
    return tuple(_row(wrong) for wrong in wrong_answers(stage_id[:2]) if wrong.stage == stage_id)


@cache
def report(wrong: WrongAnswer) -> StageReport:
    """Return what the checks of its stage say of a wrong answer.

    Where a learner sees the mistake named by a check of values, those of cost and speed have nothing to add, and are not run.
    """
    stage = load_stage(wrong.stage)
    values = tuple(check for check in stage.checks if check.kind == "correctness")
    of_values = wrong.check in {check.id for check in values}
    if wrong.misconception and of_values and any(check.tier == "visible" for check in values):
        first = _report_of(wrong, replace(stage, checks=values))
        failed = [check for check in first.checks if check.tier == "visible" and not check.ok]
        if any(check.misconception == wrong.misconception for check in failed):
            return first
    return _report_of(wrong, stage)


def _report_of(wrong: WrongAnswer, stage: Stage) -> StageReport:
    space = namespace_of(wrong.source, f"{wrong.stage[:2]}/wrong_{wrong.name}.py")
    return run_in_process(stage, space, tier="all", seed=SEED)


def _row(wrong: WrongAnswer) -> Row:
    failed = [check for check in report(wrong).checks if not check.ok]
    naming = [c.id for c in failed if c.misconception and c.misconception == wrong.misconception]
    return Row(wrong, tuple(check.id for check in failed), tuple(naming))


def alone(stage: Stage) -> dict[str, list[str]]:
    """Return, by check, the names of the wrong answers that no other check of its stage finds."""
    return _sole(stage, lambda row: row.failed)


def worth(stage: Stage, check: str) -> str:
    """Return why the stage has a check that stands alone for no wrong answer; empty if nothing says why."""
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


def page(run: bool) -> str:
    """Return the page; without `run` it shows for each wrong answer only the check that must find it."""
    parts = [_HEAD.format(how=_RUN if run else _NOT_RUN)]
    if run:
        with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), _one_thread) as pool:
            lines, sections = zip(*pool.map(_run_exercise, exercise_ids()), strict=True)
        parts.append("\n".join([_line(_COLUMNS), _line("---" for _ in _COLUMNS), *lines]))
    else:
        sections = tuple(section(exercise_id, run=False) for exercise_id in exercise_ids())
    return "\n\n".join([*parts, *sections]) + "\n"


def _one_thread() -> None:
    """Keep torch to one thread, as many processes run side by side; kernels need no GPU."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import torch

    torch.set_num_threads(1)


def _run_exercise(exercise_id: str) -> tuple[str, str]:
    missing = _missing(exercise_id)
    return summary(exercise_id, missing), section(exercise_id, run=not missing)


def _missing(exercise_id: str) -> str:
    """Return the package without which the answers to an exercise do not run; "" if it is there."""
    kinds = {stage.kind for stage in load_exercise(exercise_id).stages}
    needed = [package for kind, package in (("mesh", "jax"), ("kernel", "triton")) if kind in kinds]
    return next((package for package in needed if find_spec(package) is None), "")


def section(exercise_id: str, run: bool = True) -> str:
    """Return the tables of an exercise."""
    exercise = load_exercise(exercise_id)
    parts = [f"## {exercise_id} · {exercise.title}"]
    for stage in exercise.stages:
        parts += [f"### {stage.id}: {stage.title}", "\n".join(_table(stage, run))]
        if run and (notes := list(_notes(stage))):
            parts.append("\n".join(notes))
    return "\n\n".join(parts)


def _notes(stage: Stage) -> Iterator[str]:
    for check, names in alone(stage).items():
        if not names:
            yield f"- `{check}`: {worth(stage, check) or 'nothing says why it is here'}"


def summary(exercise_id: str, missing: str = "") -> str:
    """Return the line of one exercise in the table at the head of the page; `missing`: a package it needs to run."""
    stages = load_exercise(exercise_id).stages
    single = f"not run: no {missing}"
    if not missing:
        single = str(sum(bool(names) for stage in stages for names in alone(stage).values()))
    checks = sum(len(stage.checks) for stage in stages)
    return _line((exercise_id, len(stages), checks, len(wrong_answers(exercise_id)), single))


def _table(stage: Stage, run: bool) -> Iterator[str]:
    checks = [check.id for check in stage.checks]
    yield _line(("Wrong answer", "Misconception", *checks))
    yield _line(["---", "---", *(":-:" for _ in checks)])
    found = rows(stage.id) if run else [Row(wrong, (), ()) for wrong in wrong_answers(stage.id[:2])]
    for row in found:
        if row.wrong.stage == stage.id:
            cells = ("●" if c == row.wrong.check else "○" if c in row.failed else "" for c in checks)
            yield _line((row.wrong.name, row.wrong.misconception or "–", *cells))


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
