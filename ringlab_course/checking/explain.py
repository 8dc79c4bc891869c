"""Name the mistake behind a wrong answer: make known mistakes on the same arguments and compare the answers.

Each mistake is written once, as an edit in `wrong_answers.md`. While a check runs, the calls of the learner's
function are recorded. If the check finds a fault that it cannot name, the known wrong answers to the stage
are called with the recorded arguments, in this process.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab_course.checking.answers import resembles, to_numpy
from ringlab_course.checking.contract import Stage
from ringlab_course.checking.diagnosis import LARGEST, numbers_in
from ringlab_course.checking.failures import Failure, NotWritten
from ringlab_course.checking.in_process import InProcessSubject
from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.checking.subject import Measured
from ringlab_course.checking.wrong_answers import namespace_of, right_answers, used_by, wrong_answers

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Subject


@dataclass
class Call:
    """A call of the learner's function and its answer, or the Failure that the call raised."""

    method: str
    args: Sequence[Any]
    keywords: Mapping[str, Any]
    answer: Any


@dataclass
class Noted:
    """A subject that records the calls of its function."""

    subject: Subject
    calls: list[Call] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.subject, name)

    def call(self, *args: Any, **keywords: Any) -> Any:
        return self._note("call", args, keywords, self.subject.call)

    def measure(self, *args: Any, **keywords: Any) -> Measured:
        measured: Measured = self._note("measure", args, keywords, self.subject.measure)
        return measured

    def run_ring(self, *args: Any, **keywords: Any) -> Any:
        return self._note("run_ring", args, keywords, self.subject.run_ring)

    def alone(self, module: str, functions: Sequence[str]) -> Noted:
        return Noted(self.subject.alone(module, functions), self.calls)

    def _note(
        self, method: str, args: Sequence[Any], keywords: Mapping[str, Any], ask: Callable[..., Any]
    ) -> Any:
        try:
            answer = ask(*args, **keywords)
        except NotWritten:
            raise
        except Failure as failure:
            self.calls.append(Call(method, args, keywords, failure))
            raise
        self.calls.append(Call(method, args, keywords, answer))
        return answer


PASSES = 8
"""The number of known answers for which all calls of a failed check may be made again.

All calls are needed for the right answer, for the mistake that is named, and for nearly right answers. Each
other known wrong answer needs one call, and these calls are allowed in addition.
"""


class _TooManyReplays(Exception):
    """A diagnosis needs more calls than are allowed. The text says how many wrong answers were tried."""


def explained(failure: Failure, stage: Stage, check_id: str, calls: Sequence[Call]) -> Failure:
    """Return `failure`, named after a mistake if exactly one gives the learner's answer in every call.

    Mistakes that this check is meant to find take precedence over the stage's other mistakes. A false diagnosis
    is worse than none, so no mistake is named if two fit, or if the right answer fits too. If too many calls
    would have to be made again (see PASSES), no mistake is named either, and the message says so.
    """
    if failure.misconception:
        return failure
    try:
        name = _only_mistake(stage, check_id, calls, failure)
    except RecursionError:  # an answer may contain itself
        name = None
    except _TooManyReplays as stopped:
        failure.message = f"{failure.message} {stopped}"
        return failure
    if name:
        return stage.misconception(name).failure(failure.counterexample)
    return failure.otherwise or failure


def _only_mistake(stage: Stage, check_id: str, calls: Sequence[Call], failure: Failure) -> str | None:
    if not calls or any(numbers_in(_values(call.answer)) > LARGEST for call in calls):
        return None
    if any(isinstance(call.answer, Failure) and numbers_in(call.args) > LARGEST for call in calls):
        return None  # a known wrong answer might fill the memory of this process
    if not (programs := _programs(stage.id)):
        return None
    right, *wrong = programs
    calls = sorted(calls, key=_size)  # small calls first: most mistakes show there, and the calls are short
    own = [program for program in wrong if program.check == check_id]
    # Mistakes that only a check of a cost finds are left out, because they give right values and may need too
    # much memory.
    of_values = stage.check(check_id).kind == "correctness"
    others = [each for each in wrong if each.check != check_id and not (of_values and each.costly)]
    of = len(own) + len(others)
    replays = _Replays(failure, of, most=of + PASSES * len(calls))
    telling = next((call for call in calls if not replays.same(right, call)), None)
    if telling is None:
        return None
    # A call that the learner answers wrongly comes first. Most known wrong answers give another answer to
    # it, so only this one call has to be made for them.
    calls.sort(key=lambda call: call is not telling)
    for likely in (own, others):
        fitting: set[str] = set()
        for program in likely:
            if replays.fits(program, calls):
                fitting.add(program.mistake)
            if len(fitting) > 1:
                return None
        if fitting:
            return fitting.pop()
    return None


def _size(call: Call) -> tuple[int, int]:
    return int(call.args[0]) if call.method == "run_ring" else 0, numbers_in((call.args, call.keywords))


@dataclass(frozen=True)
class _Program:
    """One of the course's own answers: its mistake ("" for a right answer) and the check that finds it.

    `costly` says whether this is a check of cost.
    """

    mistake: str
    check: str
    costly: bool
    subject: InProcessSubject


@cache
def _programs(stage_id: str) -> tuple[_Program, ...]:
    """Return the first right answer to a stage and the wrong answers that have a misconception.

    The result is empty for a stage that does not belong to this course.
    """
    exercise = stage_id[:2]
    stages = load_exercise(exercise).stages if exercise in exercise_ids() else ()
    if (stage := next((each for each in stages if each.id == stage_id), None)) is None:
        return ()
    right = used_by((stage.function, *stage.helpers), next(iter(right_answers(exercise).values())))
    wrong = [w for w in wrong_answers(exercise) if w.stage == stage.id and w.misconception]
    answers = [
        ("", "", right),
        *((w.misconception or "", w.check, source) for w in wrong for source in w.sources),
    ]
    checks = {check.id: check.kind for check in stage.checks}
    made = []
    for number, (mistake, check, source) in enumerate(answers):
        space = namespace_of(source, f"<answer {number} to {stage.id}>")
        space["print"] = lambda *_, **__: None  # one of the mistakes prints
        costly = checks.get(check) == "cost"
        made.append(_Program(mistake, check, costly, InProcessSubject(stage, space, memory=False)))
    return tuple(made)


@dataclass
class _Replays:
    """Calls that are made again with the course's own answers.

    of: the number of known wrong answers to try. most: the number of calls that may be made. tried: the number of
    wrong answers that were tried. made: the number of calls that were made.
    """

    failure: Failure
    of: int
    most: int
    tried: int = 0
    made: int = 0

    def fits(self, program: _Program, calls: Sequence[Call]) -> bool:
        """Return whether a known wrong answer gives the learner's answer in every call."""
        fits = all(self.same(program, call) for call in calls)
        self.tried += 1
        return fits

    def same(self, program: _Program, call: Call) -> bool:
        """Return whether `program` gives the learner's answer to `call`, as the failed check reads answers."""
        if self.made == self.most:
            raise _TooManyReplays(
                f"No known mistake is named: within {self.most} calls, only {self.tried} of the {self.of} known wrong "
                "answers could be tried."
            )
        self.made += 1
        failure = self.failure
        with np.errstate(all="ignore"):
            answer = _answer(program.subject, call)
            return _same(_read(call.answer, failure), _read(answer, failure), failure.allowed)


def _read(answer: Any, failure: Failure) -> Any:
    """Return the part of an answer that the failed check looked at."""
    if failure.read is None or isinstance(answer, Failure):
        return answer
    try:
        return failure.read(_values(answer))
    except Failure as unreadable:
        return unreadable


def _answer(subject: InProcessSubject, call: Call) -> Any:
    method = "call" if call.method == "measure" else call.method  # the cost is not needed
    try:
        return getattr(subject, method)(*call.args, **call.keywords)
    except Failure as failure:
        return failure


def _values(answer: Any) -> Any:
    """Return the values that a call answered, without the memory or trace that was measured with them."""
    if isinstance(answer, Measured):
        return answer.answer
    return answer.results if hasattr(answer, "results") and hasattr(answer, "trace") else answer


def _same(got: Any, made: Any, allowed: Sequence[float]) -> bool:
    got, made = _values(got), _values(made)
    if isinstance(got, Failure) or isinstance(made, Failure):
        return type(got) is type(made) and got.message == made.message
    if isinstance(got, Mapping) and isinstance(made, Mapping):
        return got.keys() == made.keys() and all(_same(got[key], made[key], allowed) for key in got)
    if _is_array(got) and _is_array(made):
        return _same_arrays(got, made, allowed)
    if isinstance(got, (tuple, list)) and isinstance(made, (tuple, list)):
        of_parts = (
            [[each] for each in allowed]
            if type(got) is tuple and len(got) == len(allowed)
            else [allowed] * len(got)
        )
        return len(got) == len(made) and all(map(_same, got, made, of_parts))
    if is_dataclass(got) and type(got) is type(made):
        return all(
            _same(getattr(got, name), getattr(made, name), allowed) for name in got.__dataclass_fields__
        )
    return type(got) is type(made) and bool(got == made)


def _is_array(value: Any) -> bool:
    return isinstance(value, numbers.Number) or (hasattr(value, "shape") and hasattr(value, "dtype"))


def _same_arrays(got: Any, made: Any, allowed: Sequence[float]) -> bool:
    left, right = to_numpy(got), to_numpy(made)
    if left.shape != right.shape or left.dtype.kind in "OUS" or right.dtype.kind in "OUS":
        return left.shape == right.shape and bool(np.all(left == right))
    return resembles(left, right, max(allowed, default=0.0))
