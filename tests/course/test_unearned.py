"""Neither a lesson's code nor answers that are looked up earn the points of an exercise."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ringlab.checkout import find_checkout
from ringlab_course.builder import sources
from ringlab_course.checking import reports
from ringlab_course.checking.contract import Stage
from ringlab_course.checking.in_process import InProcessSubject
from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.checking.reports import run_in_process, run_stage
from ringlab_course.judge.loader import load
from tests.course.submissions_of import cases, graded_code, solution_code

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the search for the mistake behind a wrong answer, because it changes no points."""
    monkeypatch.setattr(reports, "explained", lambda failure, *of: failure)


SEEDS = (101, 202)
ASKED_BY_NAME = ("chart",)  # the argument is a patient's name; the answer is tested on that patient
TAUGHT = [each for each in exercise_ids() if each not in ("00", "21")]  # 00 has no task, 21 has no lesson


def best_pasted(exercise_id: str) -> dict[str, tuple[int, str]]:
    """Return, for each stage, the most points that a function of the lesson earns, and the function's name."""
    space = dict(graded_code("exercises", exercise_id))
    lesson = _lesson(exercise_id)
    best = {}
    for stage in load_exercise(exercise_id).stages:
        stub, found = space[stage.function], (0, "nothing")
        for name, function in lesson.items():
            if _takes_as_much(function, stub):
                earned = _earned(stage, {**lesson, **space, stage.function: function})
                found = max(found, (earned, name))
        best[stage.id] = found
        if found[0]:
            space[stage.function] = lesson[found[1]]
    return best


def _lesson(exercise_id: str) -> dict[str, Any]:
    root = find_checkout()
    (target,) = sources.targets(root, (f"notebooks/{exercise_id}",))
    cells = [cell.source for cell in sources.prepare(target, root).cells if cell.cell_type == "code"]
    names = [
        node.name
        for cell in cells
        for node in (ast.parse(cell).body if not cell.lstrip().startswith(("%", "!")) else ())
        if isinstance(node, ast.FunctionDef)
    ]
    space, _ = load(cells, names)
    return {name: space[name] for name in names if callable(space.get(name))}


def _takes_as_much(function: Callable[..., Any], stub: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(*inspect.signature(stub).parameters)
    except (TypeError, ValueError):
        return False
    return True


def _earned(stage: Stage, namespace: Mapping[str, Any]) -> int:
    with contextlib.redirect_stdout(io.StringIO()):
        return run_in_process(stage, namespace, tier="all", seed=5).earned


class Noted:
    """A subject that counts the digest of the inputs of every call."""

    def __init__(self, subject: Any, seen: Counter[str]) -> None:
        self._subject, self._seen = subject, seen

    def __getattr__(self, name: str) -> Any:
        made = getattr(self._subject, name)
        if name == "other":
            return lambda function: Noted(made(function), self._seen)
        if name not in ("call", "measure", "record", "examine", "run_ring", "efforts"):
            return made

        def noted(*args: Any, faults: Any = None, **kwargs: Any) -> Any:
            if self._subject.function not in ASKED_BY_NAME:
                self._seen[digest((self._subject.function, args, kwargs))] += 1
            return made(*args, **kwargs, **({"faults": faults} if faults is not None else {}))

        return noted


class Zeroed:
    """A subject that runs the right answer, with its traffic, memory and time, but returns zeros.

    zeroed: whether any nonzero number has been replaced.
    """

    def __init__(self, subject: Any, parent: Zeroed | None = None) -> None:
        self._subject, self._parent, self.zeroed = subject, parent or self, False

    def __getattr__(self, name: str) -> Any:
        made = getattr(self._subject, name)
        if name == "other":
            return lambda function: Zeroed(made(function), self._parent)
        if name not in ("call", "measure", "record", "examine", "run_ring", "efforts"):
            return made

        def answered(*args: Any, **kwargs: Any) -> Any:
            found = made(*args, **kwargs)
            if name == "call":
                return self._zero(found)
            if name == "efforts":
                return replace(found[0], results=self._zero(found[0].results)), found[1]
            part = "results" if name in ("run_ring", "examine") else "answer"
            return replace(found, **{part: self._zero(getattr(found, part))})

        return answered

    def _zero(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self._zero(item) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(map(self._zero, value))
        if hasattr(value, "dtype") or (isinstance(value, int | float) and not isinstance(value, bool)):
            self._parent.zeroed |= bool((value != 0).any() if hasattr(value, "any") else value != 0)
            return value * 0
        return value


def unlooked_at(exercise_id: str) -> list[str]:
    """Return the checks of cost and speed that pass although all answers have been replaced by zeros."""
    space, found = solution_code(exercise_id), []
    for stage in load_exercise(exercise_id).stages:
        for check in (each for each in stage.checks if each.kind != "correctness"):
            subject = Zeroed(InProcessSubject(stage, space))
            (report,) = run_stage(_alone(stage, check), subject, tier="all", seed=5).checks
            if report.broken or (report.ok and subject.zeroed):
                found.append(f"{stage.id}:{check.id} {report.message}")
    return found


def digest(value: Any) -> str:
    """Return a hash of the arguments of a call: the bytes of arrays, the text of all other values."""
    return hashlib.sha256(b"\0".join(_parts(value))).hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Mapping):
        value = sorted(value.items(), key=repr)
    if isinstance(value, tuple | list):
        yield b"("
        for item in value:
            yield from _parts(item)
        yield b")"
    elif hasattr(value, "detach"):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.detach().double().numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode() + value.tobytes()
    else:
        yield repr(value).encode()


def drawn(exercise_id: str, seed: int) -> dict[str, Counter[str]]:
    """Grade the exercise's solution in all tiers; return, by check, the digests of all inputs that it draws."""
    space, found = solution_code(exercise_id), {}
    for stage in load_exercise(exercise_id).stages:
        for check in stage.checks:
            seen: Counter[str] = Counter()
            subject = Noted(InProcessSubject(stage, space), seen)
            (report,) = run_stage(_alone(stage, check), subject, tier="all", seed=seed).checks
            assert report.ok, (stage.id, report)
            found[f"{stage.id}:{check.id}"] = seen
    return found


def _alone(stage: Stage, check: Any) -> Any:
    return replace(stage, checks=(replace(check, tier="visible", kind="correctness"),))


def repeated(exercise_id: str) -> list[str]:
    """Return a line for each check that draws the same inputs in another grading, with the number of such inputs."""
    first, second = (drawn(exercise_id, seed) for seed in SEEDS)
    lines = []
    for check in first:
        if again := len(first[check].keys() & second[check].keys()):
            lines.append(f"{check}: {again} of {len(first[check])} inputs are the same in another grading")
    return lines


@pytest.mark.parametrize("exercise_id", cases(TAUGHT))
def test_the_code_of_the_lesson_earns_less_than_half(exercise_id):
    best = best_pasted(exercise_id)
    assert 2 * sum(earned for earned, _ in best.values()) < load_exercise(exercise_id).points, best


@pytest.mark.parametrize("exercise_id", cases(exercise_ids()))
def test_cost_and_speed_earn_nothing_with_zeros_for_values(exercise_id):
    assert not unlooked_at(exercise_id)


@pytest.mark.parametrize("exercise_id", cases(exercise_ids()))
def test_the_solution_passes_two_gradings_and_no_input_of_one_comes_again_in_the_other(exercise_id):
    assert not repeated(exercise_id) or exercise_id == "00"  # has no task, and asks the same questions again
