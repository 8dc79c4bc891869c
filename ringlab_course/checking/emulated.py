"""Name mistakes in kernels and JAX programs by emulators that make the same mistakes in NumPy or PyTorch.

Other stages find a mistake by running wrong answers again (`explain`). That takes too long for a kernel in
Triton's interpreter or for a program that JAX has to compile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringlab_course.checking.answers import is_close, resembles
from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.diagnosis import LARGEST, Answered, failure_of, numbers_in, raise_first
from ringlab_course.checking.failures import Failure


@dataclass(frozen=True)
class Emulated(Answered):
    """One case with the inputs that emulators take."""

    inputs: Sequence[Any] = ()


def compare_emulated(cases: Iterable[Emulated], mistakes: Sequence[Misconception]) -> None:
    """Return None if every answer is right.

    Raises: the Failure of the first wrong answer. It is named after a mistake only if the emulator of this mistake gives
    the learner's answers in all cases, even where they are right, and no other emulator does. Answers of
    more than LARGEST numbers are not explained.
    """
    seen: list[Emulated] = []
    failures: list[Failure | None] = []

    def compared() -> Iterator[Failure | None]:
        for case in cases:
            seen.append(case)
            failures.append(failure_of(case))
            yield failures[-1]

    try:
        raise_first(compared())
    except Failure as failure:
        if failure not in failures:  # the failure came from a call, and not from a wrong value
            raise
        raise _named(failure, seen, mistakes) from None


def is_wrong(case: Answered) -> bool:
    """Return whether the answer differs from the right one."""
    return not is_close(case.answer, case.truth, case.bound)


def _named(failure: Failure, cases: Sequence[Emulated], mistakes: Sequence[Misconception]) -> Failure:
    if any(numbers_in(case.truth) > LARGEST for case in cases):
        return failure
    fitting = {m.name: m for m in mistakes if all(_makes(m, case) for case in cases)}
    if len(fitting) != 1:
        return failure
    (mistake,) = fitting.values()
    return mistake.failure(failure.counterexample)


def _makes(mistake: Misconception, case: Emulated) -> bool:
    """Return whether the emulator of a mistake gives the learner's answer.

    Where the learner's answer is wrong, it is not enough that the emulator's answer is near it. The
    emulator's answer must be wrong too.
    """
    if mistake.imitate is None:
        return False
    with np.errstate(all="ignore"):
        try:
            emulated = mistake.imitate(*case.inputs)
            if is_wrong(case) and is_close(emulated, case.truth, case.bound):
                return False
            return resembles(case.answer, emulated, case.bound)
        except (ArithmeticError, ValueError, TypeError, IndexError):
            return False  # the mistake is impossible on this input, or the answer contains no numbers
