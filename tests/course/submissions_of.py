"""Functions that find and run the course's own right and wrong answers to its exercises.

The file also makes a small course in a temporary folder, for tests of the builder.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ringlab.checkout import find_checkout
from ringlab_course.builder import sources
from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.checking.wrong_answers import (
    SOLUTION,
    WrongAnswer,
    namespace_of,
    right_answers,
    wrong_answers,
)
from ringlab_course.judge.loader import load

CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Submission:
    """A right or wrong answer; its `name` is like 05/right_loops or 05/wrong_step_overflows."""

    name: str
    wrong: WrongAnswer | None = None

    @property
    def exercise(self) -> str:
        return self.name[:2]

    @property
    def stem(self) -> str:
        return self.name.partition("/")[2]

    @property
    def source(self) -> str:
        if self.wrong is not None:
            return self.wrong.source
        return right_answers(self.exercise)[self.stem.removeprefix("right_")]

    @property
    def expected(self) -> WrongAnswer:
        """Return a wrong answer's entry, with its stage, its check and its misconception."""
        assert self.wrong is not None, f"{self.name} is a right answer"
        return self.wrong


def cases(items: Iterable[Any]) -> list[Any]:
    """Return exercise ids or submissions as cases of a test, marked if they need Triton's interpreter or JAX."""
    return [pytest.param(item, marks=_needs(item), id=getattr(item, "name", item)) for item in items]


def _needs(item: Any) -> list[pytest.MarkDecorator]:
    kinds = _kinds(getattr(item, "exercise", item))
    marks = {"kernel": pytest.mark.needs_interpreter, "mesh": pytest.mark.needs_jax}
    return [mark for kind, mark in marks.items() if kind in kinds]


@functools.cache
def _kinds(exercise_id: str) -> frozenset[str]:
    return frozenset(stage.kind for stage in load_exercise(exercise_id).stages)


def submissions(pattern: str = "*") -> list[Submission]:
    """Return all submissions but the solutions whose names match, as "05/wrong_*" does, exercise by exercise."""
    return [found for name, found in _submissions().items() if fnmatch.fnmatchcase(name, pattern)]


def submission(name: str) -> Submission:
    """Return the submission with a name such as 05/right_loops."""
    return _submissions()[name]


@functools.cache
def _submissions() -> dict[str, Submission]:
    found = []
    for exercise in exercise_ids():
        found += [
            Submission(f"{exercise}/right_{name}") for name in right_answers(exercise) if name != SOLUTION
        ]
        wrong = sorted(wrong_answers(exercise), key=lambda each: each.name)
        found += [Submission(each.submission, each) for each in wrong]
    return {each.name: each for each in found}


def namespace(submission: Submission) -> dict[str, Any]:
    """Return the namespace that a submission defines."""
    return namespace_of(submission.source, f"{submission.name}.py")


def solution_code(exercise_id: str) -> dict[str, Any]:
    """Return the namespace that the solution of an exercise defines."""
    return graded_code("solutions", exercise_id)


def graded_code(kind: str, exercise_id: str) -> dict[str, Any]:
    """Return the namespace that the judge loads from a notebook; `kind` is the notebook's folder."""
    root = find_checkout()
    (target,) = sources.targets(root, (f"{kind}/{exercise_id}",))
    cells = [cell.source for cell in sources.prepare(target, root).cells if cell.cell_type == "code"]
    names = [n for stage in load_exercise(exercise_id).stages for n in (stage.function, *stage.helpers)]
    space, notes = load(cells, names)
    assert not notes, notes
    return space


LESSON = """# %% [markdown]
# # 91 · A small lesson
# **Afterwards you can** see. **You need first** nothing. **Minutes** 3.

# %%
import sys

from ringlab_course import compare, predict
from ringlab.viz.style import new_figure, show, styled

# %%
print("one", flush=True)
print("two", file=sys.stdout)
1 + 1

# %% tags=["nbval-ignore-output"]
predict("91.n", "How many?", choices=["1", "2"])

# %%
compare("91.n", "2")

# %%
with styled():
    figure = new_figure((2, 1))
    figure.subplots().plot([1, 2, 4])
show(figure, alt="a line that rises faster and faster")

# %%
import_free = True

# %%
import_free = True

# %% [markdown]
# ## Recap
# ## Self-check
# [the exercise](../exercises/91_small.ipynb)
"""

EXERCISE = '''# %% [markdown]
# # Exercise 91
# **Minutes** 3. **Not allowed:** NumPy.

# %%
from ringlab_course import check, hint

# %% grade="91.double"
def double(x):
    """Twice x."""
    # BEGIN SOLUTION return twice x
    y = x + x
    return y
    # END SOLUTION

# %%
double_or_not = "kept"

# %% tags=["solution-only"]
print(double(4))

# %%
# check("91.double")
'''


def small_course(root: Path) -> Path:
    """Write the sources of a course with one lesson and one exercise below `root`, and return `root`."""
    for path, text in (
        (lesson_source(root), LESSON),
        (exercise_source(root), EXERCISE),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def lesson_source(root: Path) -> Path:
    """Return the path of the lesson's source."""
    return root / "ringlab_course/lessons/91_small.py"


def exercise_source(root: Path) -> Path:
    """Return the path of the exercise's source."""
    return root / "ringlab_course/exercises/e91_small/exercise.py"
