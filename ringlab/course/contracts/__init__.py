"""The contracts of the exercises, one module each: `eNN.EXERCISE`."""

from __future__ import annotations

import importlib
import pkgutil

from ringlab.course.contract import Exercise, Stage
from ringlab.errors import CourseError


def exercise_ids() -> tuple[str, ...]:
    """Return the ids of the exercises that have a contract, as ("00", "01", …)."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name[1:] for name in names if name[:1] == "e" and name[1:].isdigit()))


def load_exercise(exercise_id: str) -> Exercise:
    """Return the contract of exercise `exercise_id`, as in "05". Raises: CourseError if there is none."""
    if exercise_id not in exercise_ids():
        raise CourseError(f"an exercise out of {', '.join(exercise_ids())}", repr(exercise_id))
    return importlib.import_module(f"ringlab.course.contracts.e{exercise_id}").EXERCISE


def load_stage(stage_id: str) -> Stage:
    """Return the stage `stage_id`, as in "05.forward". Raises: CourseError if there is none."""
    return load_exercise(stage_id.partition(".")[0]).stage(stage_id)
