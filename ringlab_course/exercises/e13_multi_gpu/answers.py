"""Answers of exercise 13 that are names and counts: right or wrong, never nearly right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.failures import Failure


@dataclass(frozen=True)
class Case:
    """One case: what the learner answered, what is right, the inputs of imitations, and the case in words."""

    answer: Any
    truth: Any
    inputs: Sequence[Any]
    text: str


def compare_exactly(
    cases: Iterable[Case], misconceptions: Sequence[Misconception], names: Sequence[str]
) -> None:
    """Return None when every answer is right; `names` are those of an answer's parts.

    Raises: the Failure of the first wrong one. It is named after a mistake only if that mistake gives the
    learner's answers in all cases, right ones too, and no other mistake does.
    """
    seen: list[Case] = []
    broken: Failure | None = None
    try:
        for case in cases:
            seen.append(case)
    except Failure as failure:  # what breaks off only leaves fewer cases to tell mistakes apart
        broken = failure
    first = next((case for case in seen if case.answer != case.truth), None)
    if first is None:
        if broken is not None:
            raise broken
        return
    example = f"{first.text}\ngot {first.answer!r}, expected {first.truth!r}"
    fitting = [m for m in misconceptions if all(_gives(m, case) for case in seen)]
    if len(fitting) == 1:
        raise fitting[0].failure(example)
    raise Failure(_parts_told(seen, names), example)


def _parts_told(seen: Sequence[Case], names: Sequence[str]) -> str:
    """Return which parts are wrong in some case, and which are right in all."""
    told = {
        name: all(case.answer[place] == case.truth[place] for case in seen)
        for place, name in enumerate(names)
    }
    wrong, held = ([name for name in names if told[name] is right] for right in (False, True))
    rest = f"; {' and '.join(held)}: right" if held else ""
    return f"{' and '.join(wrong)}: wrong{rest}."


def _gives(misconception: Misconception, case: Case) -> bool:
    if misconception.imitate is None:
        return False
    try:
        return bool(misconception.imitate(*case.inputs) == case.answer)
    except (ArithmeticError, ValueError, TypeError, IndexError):
        return False  # the mistake cannot be made on this input


def expect_pair(answer: Any, names: str, count: int) -> tuple[Any, ...]:
    """Return a tuple or list of `count` parts as a tuple. Raises: Failure for something else."""
    if answer is None:
        raise Failure("The result is None: is the `return` missing?")
    if not isinstance(answer, (tuple, list)) or len(answer) != count:
        raise Failure(f"The result should be {names}.", f"got a {type(answer).__name__}")
    return tuple(answer)


def expect_integer(value: Any, name: str) -> int:
    """Return a whole number as an int. Raises: Failure for something else."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int):
        raise Failure(f"{name} should be a whole number.", f"got {type(value).__name__}")
    return value
