"""Find and load exercises: the folder `exercises/eNN_name/` contains `contract.py` and `exercise.py`."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path

from ringlab.errors import CourseError
from ringlab_course.checking.contract import Exercise, Stage


def exercise_ids() -> tuple[str, ...]:
    """Return the ids of the exercises that have a contract, such as ("00", "01", …)."""
    return tuple(sorted(_folders()))


def folder_of(exercise_id: str) -> Path:
    """Return the folder of the exercise with this id, such as "05". Raises: CourseError if there is none."""
    if exercise_id not in _folders():
        raise CourseError(f"one of the exercises {', '.join(exercise_ids())}", repr(exercise_id))
    return _folders()[exercise_id]


def load_exercise(exercise_id: str) -> Exercise:
    """Return the contract of the exercise with this id. Raises: CourseError if there is none."""
    folder = folder_of(exercise_id)
    exercise: Exercise = importlib.import_module(f"ringlab_course.exercises.{folder.name}.contract").EXERCISE
    return exercise


def load_stage(stage_id: str) -> Stage:
    """Return the stage with this id, such as "05.forward". Raises: CourseError if there is none."""
    return load_exercise(stage_id.partition(".")[0]).stage(stage_id)


@cache
def _folders() -> dict[str, Path]:
    """Return the folders by exercise id; e05_emulated_ring has the id "05"."""
    found = (Path(__file__).parents[1] / "exercises").glob("e[0-9][0-9]_*/contract.py")
    return {path.parent.name[1:3]: path.parent for path in found}
