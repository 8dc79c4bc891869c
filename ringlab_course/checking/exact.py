"""Compare answers that are names or counts, which are either right or wrong, without a tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ringlab_course.checking.diagnosis import Answered, raise_first
from ringlab_course.checking.failures import Failure


def compare_exactly(cases: Iterable[Answered], read: Callable[[Any], Any]) -> None:
    """Return None if every answer is right.

    `read` is the function by which the check reads an answer; the explanation of the failure uses it, too.
    Raises: the Failure of the first wrong answer.
    """
    raise_first(_failure(case, read) for case in cases)


def _failure(case: Answered, read: Callable[[Any], Any]) -> Failure | None:
    if case.answer == case.truth:
        return None
    failure = Failure(_verdict(case), f"{case.text}\ngot {case.answer!r}, expected {case.truth!r}")
    failure.read = read
    return failure


def _verdict(case: Answered) -> str:
    """Return which parts of a wrong answer are wrong, and which are right."""
    parts = zip(case.names, case.answer, case.truth, strict=True)
    right = {name: given == true for name, given, true in parts}
    wrong, held = ([name for name in right if right[name] is holds] for holds in (False, True))
    rest = f"; {' and '.join(held)} {'is' if len(held) == 1 else 'are'} right" if held else ""
    return f"{' and '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} wrong here{rest}."


def expect_integer(value: Any, name: str) -> int:
    """Return a whole number as an int. Raises: Failure for anything else."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int):
        raise Failure(f"{name} should be a whole number.", f"got {type(value).__name__}")
    return value
