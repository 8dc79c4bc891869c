"""Which check finds which wrong answer: `python -m tests.course.matrix` writes docs/kill-matrix.md.

`--check` writes nothing and fails where the page is not what the contracts and submissions make of it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ringlab.course.contract import Stage
from ringlab.course.contracts import exercise_ids, load_exercise
from tests.course.matrix_notes import TOGETHER
from tests.course.submissions_of import CHECKOUT, Expectation, expectation, report, submissions

PAGE = CHECKOUT / "docs" / "kill-matrix.md"
HEAD = """# Which check finds which wrong answer

Written by `python -m tests.course.matrix` (`--only 05` for one exercise); a test holds it to what the checks say today.

Why this page: a check is worth its points only if it finds a mistake, and a learner is helped only if the mistake is
called by its name. Each row below is a wrong answer that somebody could hand in
(`tests/course/submissions/NN/wrong_NAME.py`), and each column a check of the stage. All checks of all tiers run on the
same draw of the probes.

- **●** the check that must find it, and that names the misconception of the second column ("–": none has a name)
- **○** it falls to this check as well
- empty: this check holds

A check stands **alone** for a wrong answer if no other check of its stage finds it: take the check away, and that
answer passes. A check that stands alone for none has a line under the table that says what else it is good for.
"""
COLUMNS = (
    "Exercise",
    "Stages",
    "Checks",
    "Wrong answers",
    "Checks that stand alone for some",
)


@dataclass(frozen=True)
class Row:
    """One wrong answer: the checks that it falls to, in the stage's order; those of them that name its mistake."""

    path: Path
    expected: Expectation
    failed: tuple[str, ...]
    naming: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its name in the table."""
        return self.path.stem.removeprefix("wrong_")


@cache
def rows(stage_id: str) -> tuple[Row, ...]:
    """Return the wrong answers to a stage, each with what it falls to."""
    found = []
    for path in submissions("wrong_*"):
        if path.parent.name == stage_id[:2] and (expected := expectation(path)).stage == stage_id:
            failed = [c for c in report(path, stage_id).checks if not c.ok]
            naming = [c.id for c in failed if c.misconception and c.misconception == expected.misconception]
            found.append(Row(path, expected, tuple(c.id for c in failed), tuple(naming)))
    return tuple(found)


def alone(stage: Stage) -> dict[str, list[str]]:
    """Return the names of the wrong answers that each check finds and no other check of its stage does."""
    return _sole(stage, lambda row: row.failed)


def worth(stage: Stage, check: str) -> str:
    """Return why a check that stands alone for no wrong answer is there; empty if nobody says it."""
    visible = {c.id for c in stage.checks if c.tier == "visible"}
    if shown := _sole(stage, lambda row: [c for c in row.failed if c in visible])[check]:
        return f"in the notebook it is the only one to find {_listed(shown)}"
    if named := _sole(stage, lambda row: row.naming)[check]:
        return f"it alone says what is wrong with {_listed(named)}"
    if first := [row.name for row in rows(stage.id) if row.failed[:1] == (check,)]:
        return f"it is the first, with the smallest case, to find {_listed(first)}"
    return TOGETHER.get(f"{stage.id}:{check}", "")


def _sole(stage: Stage, found_by: Callable[[Row], Sequence[str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {check.id: [] for check in stage.checks}
    for row in rows(stage.id):
        if len(checks := found_by(row)) == 1:
            found[checks[0]].append(row.name)
    return found


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def page(only: Collection[str] = ()) -> str:
    """Return the whole page; where `only` names exercises, the others keep what PAGE says of them now."""
    old = PAGE.read_text(encoding="utf-8") if only else ""
    kept = {text[3:5]: text for text in re.split(r"^(?=## \d\d )", old, flags=re.MULTILINE)[1:]}
    lines = dict(re.findall(r"^(?=\| (\d\d) \|)(.*)$", old, flags=re.MULTILINE))
    parts = [HEAD, _line(COLUMNS), _line("---" for _ in COLUMNS)]
    fresh = [name for name in exercise_ids() if name in only or name not in kept]
    parts += [summary(name) if name in fresh else lines[name] for name in exercise_ids()]
    texts = [f"{section(name)}\n" if name in fresh else kept[name] for name in exercise_ids()]
    return "\n".join([*parts, "", "".join(texts)])


def section(exercise_id: str) -> str:
    """Return what the page says of one exercise."""
    exercise = load_exercise(exercise_id)
    lines = [f"## {exercise_id} · {exercise.title}", ""]
    for stage in exercise.stages:
        lines += [f"### {stage.id}: {stage.title}", "", *_table(stage), ""]
        others = [check for check, names in alone(stage).items() if not names]
        notes = [f"- `{check}`: {worth(stage, check) or 'nobody says why it is there'}" for check in others]
        lines += [*notes, ""] if notes else []
    return "\n".join(lines)


def summary(exercise_id: str) -> str:
    """Return the line of one exercise in the table at the head of the page."""
    exercise = load_exercise(exercise_id)
    checks = [names for stage in exercise.stages for names in alone(stage).values()]
    wrong = sum(len(rows(stage.id)) for stage in exercise.stages)
    single = sum(bool(names) for names in checks)
    return _line((exercise_id, len(exercise.stages), len(checks), wrong, single))


def _table(stage: Stage) -> list[str]:
    checks = [check.id for check in stage.checks]
    lines = [
        _line(("Wrong answer", "Misconception", *checks)),
        _line(["---", "---", *(":-:" for _ in checks)]),
    ]
    for row in rows(stage.id):
        cells = ("●" if c == row.expected.check else "○" if c in row.failed else "" for c in checks)
        lines.append(_line((row.name, row.expected.misconception or "–", *cells)))
    return lines


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Write the page, or look whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where the page would change"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="NN", help="exercises; the others stay as they are"
    )
    chosen = parser.parse_args()
    os.environ.setdefault("TRITON_INTERPRET", "1")
    text = page(chosen.only)
    if chosen.check:
        sys.exit(None if PAGE.read_text(encoding="utf-8") == text else f"{PAGE} is not up to date")
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
