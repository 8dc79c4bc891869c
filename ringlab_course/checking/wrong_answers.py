"""The right and wrong answers to an exercise and the texts about its mistakes, read from its folder.

The solution in `exercise.py` is a right answer. Each `right/NAME.py` is another, and holds only what differs from
the solution. `wrong_answers.md` holds the wrong answers, each as an edit of a right answer (`ringlab.edits`). An
entry names the stage, the right answer that it edits, the check that must find the mistake, and the misconception
that the check must name. Learners read the text of the first entry that names a misconception. A misconception
without a wrong answer has its own entry without an edit.

`python -m ringlab_course.checking.wrong_answers 05 solution` prints a right answer.
"""

from __future__ import annotations

import argparse
import ast
import linecache
import symtable
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from ringlab import edits
from ringlab.errors import CourseError
from ringlab_course.checking.code_alone import code
from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.loading import exercise_ids, folder_of, load_exercise, load_stage

FILE = "wrong_answers.md"
SOLUTION = "solution"
"""The name of the right answer in `exercise.py`."""


@dataclass(frozen=True)
class WrongAnswer:
    """A wrong answer to one stage. `check` must find it, and name `misconception` if that is not None."""

    name: str
    stage: str
    check: str
    misconception: str | None
    right: str
    """The name of the right answer that this wrong answer edits."""
    hunks: str
    variants: tuple[str, ...] = ()
    """A part of the edit, then texts that make the same mistake in its place, such as "1e-9", "1e-6"."""

    @property
    def submission(self) -> str:
        """The answer's name among all answers, such as 05/wrong_step_overflows."""
        return f"{self.stage[:2]}/wrong_{self.name}"

    @property
    def finder(self) -> str:
        """The check that must find the answer, such as 05.forward:values."""
        return f"{self.stage}:{self.check}"

    @property
    def source(self) -> str:
        """The answer as Python code: the parts of the edited right answer that the stage uses."""
        exercise_id = self.stage[:2]
        where = f"{FILE} of exercise {exercise_id}, entry {self.name!r}"
        whole = edits.apply(self.hunks, right_answers(exercise_id)[self.right], where)
        stage = load_stage(self.stage)
        return used_by((stage.function, *stage.helpers), whole)

    @property
    def sources(self) -> tuple[str, ...]:
        """`source`, and a copy for each further variant, in which the further variant replaces the first one."""
        others = (self.source.replace(self.variants[0], other) for other in self.variants[1:])
        return self.source, *others


@cache
def right_answers(exercise_id: str) -> dict[str, str]:
    """Return the right answers to an exercise as Python code, by name in order.

    The solution has no comments. Every other answer has a file, whose definitions replace those of the solution.
    All answers are cut down to what the stages use.
    """
    folder = folder_of(exercise_id)
    stages = load_exercise(exercise_id).stages
    needed = {name for stage in stages for name in (stage.function, *stage.helpers)}
    solution = list(_statements(code((folder / "exercise.py").read_text(encoding="utf-8")) + "\n"))
    files = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("right/*.py")}
    found = {}
    for name, text in sorted({SOLUTION: "", **files}.items()):
        own = {bound for _, binds, _ in _statements(text) for bound in binds}
        rest = (
            part for part, binds, _ in solution if not binds <= own
        )  # statements that bind no name are left out too
        found[name] = used_by(needed, "".join(rest) + text)
    return found


@cache
def wrong_answers(exercise_id: str) -> tuple[WrongAnswer, ...]:
    """Return the wrong answers to an exercise, in the order of their file.

    Raises: CourseError for an edit that has no check, or that edits a right answer that does not exist.
    """
    return tuple(_wrong_answer(entry) for entry in entries(exercise_id) if entry.hunks)


def _wrong_answer(entry: edits.Entry) -> WrongAnswer:
    stage, check, right, misconception = map(entry.fields.get, ("stage", "check", "of", "misconception"))
    known = right_answers(str(stage)[:2])
    if stage is None or check is None or right not in known:
        raise CourseError(
            f"a check, and one of {', '.join(known)}, for entry {entry.name!r} of {stage}",
            f"check {check}, of {right}",
            f"complete its fields in {FILE}",
        )
    checks = [each.id for each in load_stage(stage).checks]
    if check not in checks:
        raise CourseError(
            f"one of the checks {', '.join(checks)} of {stage} for entry {entry.name!r}",
            f"check {check}",
            f"correct its field `check` in {FILE}",
        )
    variants = filter(None, entry.fields.get("variants", "").split(", "))
    return WrongAnswer(entry.name, stage, check, misconception, right, entry.hunks, tuple(variants))


@cache
def entries(exercise_id: str) -> tuple[edits.Entry, ...]:
    """Return all entries of an exercise's file, including those without an edit."""
    optional = ("check", "of", "misconception", "variants")
    return edits.read(folder_of(exercise_id) / FILE, required=("stage",), optional=optional)


def mistakes_of(where: str) -> Callable[..., Misconception]:
    """Return a function (name, imitate=None) → Misconception that reads the message in the exercise's file.

    `where` is a stage, such as "05.forward", or an exercise, such as "05". The message is the text of the
    first entry of `where` that names the misconception and has a text. If a stage has no such entry, the
    message is the first such text of the exercise. The returned function raises CourseError if there is no
    text at all.
    """
    texts: dict[str, str] = {}
    for entry in sorted(entries(where[:2]), key=lambda entry: not entry.fields["stage"].startswith(where)):
        if "misconception" in entry.fields and entry.text:
            texts.setdefault(entry.fields["misconception"], entry.text)

    def mistake(name: str, imitate: Callable[..., Any] | None = None) -> Misconception:
        if not texts.get(name):
            raise CourseError(
                f"a text for misconception {name!r} in {FILE} of exercise {where[:2]}",
                "no entry with one",
                "add the text to the first entry that names it",
            )
        return Misconception(name, texts[name], imitate)

    return mistake


@cache
def misconceptions_of(stage_id: str) -> tuple[Misconception, ...]:
    """Return the misconceptions that entries of a stage name, in the order of the file.

    The message is the text of the stage's first entry that has one, or else the first such text of the
    exercise.
    """
    named = [entry.fields for entry in entries(stage_id[:2]) if entry.fields["stage"] == stage_id]
    names = dict.fromkeys(fields["misconception"] for fields in named if "misconception" in fields)
    return tuple(map(mistakes_of(stage_id), names))


def found_by(stage_id: str) -> dict[str, set[str]]:
    """Return, for each check of a stage, the names of the answers and misconceptions that it must find."""
    found: dict[str, set[str]] = {}
    for entry in entries(stage_id[:2]):
        if entry.fields["stage"] == stage_id and "check" in entry.fields:
            found.setdefault(entry.fields["check"], set()).update(
                {entry.name, entry.fields.get("misconception", entry.name)}
            )
    return found


def namespace_of(source: str, name: str) -> dict[str, Any]:
    """Return the names that an answer defines. Tracebacks and Triton find the answer's lines under `name`."""
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    space: dict[str, Any] = {"__name__": name}
    exec(compile(source, name, "exec"), space)
    return space


def used_by(names: Collection[str], source: str) -> str:
    """Return the part of a module that defines `names`.

    It contains the statements that bind these names, those that bind a name that a kept statement uses, and
    those that bind no name at all.
    """
    kept, wanted = set[int](), set(names)
    statements = list(_statements(source))
    while more := {
        number
        for number, (_, binds, _) in enumerate(statements)
        if number not in kept and (not binds or binds & wanted)
    }:
        kept |= more
        wanted.update(*(statements[number][2] for number in more))
    return "".join(statements[number][0] for number in sorted(kept)).strip("\n") + "\n"


def _statements(source: str) -> Iterator[tuple[str, set[str], set[str]]]:
    """Yield the lines (with comments above), the bound names and the used global names of each statement."""
    lines, begin = source.splitlines(keepends=True), 0
    for node in ast.parse(source).body:
        text = "".join(lines[begin : node.end_lineno])
        begin = node.end_lineno or begin
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # the docstring describes the right answer and not this edit
        table = symtable.symtable(text, "<statement>", "exec")
        binds = {each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported()}
        yield text, binds, _globals_of(table)


def _globals_of(table: symtable.SymbolTable) -> set[str]:
    """Return the names of a module that a part of it uses, also within functions."""
    own = {each.get_name() for each in table.get_symbols() if each.is_global()}
    return own.union(*map(_globals_of, table.get_children()))


def main(arguments: list[str]) -> int:
    """Print a right answer."""
    parser = argparse.ArgumentParser(
        prog="python -m ringlab_course.checking.wrong_answers", description="Print a right answer."
    )
    parser.add_argument("exercise", choices=exercise_ids())
    parser.add_argument("name", help=f"{SOLUTION}, or that of a file in right/")
    asked = parser.parse_args(arguments)
    if asked.name not in (known := right_answers(asked.exercise)):
        parser.error(f"needed one of {', '.join(known)}; got {asked.name}")
    print(known[asked.name], end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
