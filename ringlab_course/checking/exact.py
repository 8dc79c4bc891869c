"""Compare answers that are names or counts, which are either right or wrong, without a tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ringlab_course.checking.failures import Failure


@dataclass(frozen=True)
class Case:
    """One case: the learner's answer, the right answer, and a description of the case in words."""

    answer: Any
    truth: Any
    text: str


def compare_exactly(cases: Iterable[Case], names: Sequence[str], read: Callable[[Any], Any]) -> None:
    """Return None if every answer is right; `names` are the names of an answer's parts.

    `read` is the function by which the check reads an answer; it is passed on to the explanation of the
    failure.
    Raises: the Failure of the first wrong answer.
    """
    seen: list[Case] = []
    broken: Failure | None = None
    try:
        for case in cases:
            seen.append(case)
    except Failure as failure:  # the cases so far may still explain a wrong answer
        broken = failure
    first = next((case for case in seen if case.answer != case.truth), None)
    if first is None:
        if broken is not None:
            raise broken
        return
    wrong = Failure(_verdict(first, names), f"{first.text}\ngot {first.answer!r}, expected {first.truth!r}")
    wrong.read = read
    raise wrong


def _verdict(case: Case, names: Sequence[str]) -> str:
    """Return which parts of a wrong answer are wrong, and which are right."""
    right = {name: given == true for name, given, true in zip(names, case.answer, case.truth, strict=True)}
    wrong, held = ([name for name in names if right[name] is holds] for holds in (False, True))
    rest = f"; {' and '.join(held)} {'is' if len(held) == 1 else 'are'} right" if held else ""
    return f"{' and '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} wrong here{rest}."


def expect_parts(answer: Any, names: str, count: int) -> tuple[Any, ...]:
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
