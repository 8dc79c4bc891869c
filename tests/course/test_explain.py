"""A wrong answer's mistake is found by making known mistakes on its arguments, and named if only one fits."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from ringlab_course.checking import explain
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.in_process import InProcessSubject
from ringlab_course.checking.loading import load_stage
from ringlab_course.checking.reports import run_in_process

CAUSAL = load_stage("01.causal")
HERE = np.arange(4)


def noted(function, *calls, stage=CAUSAL) -> list[explain.Call]:
    """Call a learner's function with each (queries, keys) of `calls`, and return the recorded calls."""
    subject = explain.Noted(InProcessSubject(stage, {stage.function: function}))
    for args in calls:
        with contextlib.suppress(Failure):
            subject.call(*args)
    return subject.calls


def name(calls, check: str = "any", failure: Failure | None = None) -> str | None:
    return explain.explained(failure or Failure("wrong"), CAUSAL, check, calls).misconception


def strict(queries, keys, window=None):
    return np.array([[key < query for key in keys] for query in queries])


def by_index(queries, keys, window=None):
    return np.tri(len(queries), len(keys), dtype=bool)


def test_a_mistake_in_another_style_is_named_with_the_text_and_the_example_of_the_check() -> None:
    failure = Failure("wrong values", "queries at …")
    found = explain.explained(failure, CAUSAL, "origin", noted(strict, (HERE, HERE)))
    assert (found.misconception, found.counterexample) == ("strict", "queries at …")
    assert found.message == CAUSAL.misconception("strict").message
    report = run_in_process(CAUSAL, {"causal_mask": strict})
    assert report.checks[0].misconception == "strict"


def test_it_has_to_fit_every_call() -> None:
    def once(queries, keys, window=None):
        return strict(queries, keys) if len(queries) == 4 else queries[:, None] >= keys

    assert name(noted(once, (HERE, HERE))) == "strict"
    assert name(noted(once, (HERE, HERE), (HERE[:3], HERE[:3]))) is None


def test_of_two_that_fit_the_check_names_its_own_or_none() -> None:
    calls = noted(by_index, (HERE + 3, HERE))
    assert name(calls, check="positions") == "indices_for_positions"
    assert name(calls, check="any") is None


def test_nothing_is_named_where_the_right_answer_fits_as_well() -> None:
    assert name(noted(lambda q, k, window=None: q[:, None] >= k, (HERE, HERE))) is None


def endless() -> list[object]:
    """Return a list that contains itself."""
    nest: list[object] = []
    nest.append(nest)
    return nest


@pytest.mark.parametrize("answer", [None, [1, [2]], np.array(["a"]), endless()])
def test_whatever_comes_back_can_be_compared(answer) -> None:
    call = explain.Call("call", (HERE, HERE), {}, answer)
    assert name([call]) is None


def test_a_call_that_breaks_off_on_large_arguments_is_not_made_again(monkeypatch) -> None:
    """A wrong answer that takes all memory is not called again, because it would take this process's memory."""

    def broken(queries, keys, window=None):
        raise MemoryError("all of it")

    monkeypatch.setattr(explain, "LARGEST", 7)
    monkeypatch.setattr(explain, "_programs", lambda stage: pytest.fail("a wrong answer is called"))
    assert name(noted(broken, (HERE, HERE))) is None


def test_variants_of_a_mistake_are_tried_too(monkeypatch) -> None:
    exercise, wrong = "01", explain.wrong_answers("01")
    first = next(w for w in wrong if w.misconception == "strict")
    assert "<" in first.source
    varied = [replace(w, variants=("<", "!=")) if w is first else w for w in wrong]
    monkeypatch.setattr(explain, "wrong_answers", lambda each: varied if each == exercise else ())
    explain._programs.cache_clear()
    try:
        calls = noted(lambda q, k, window=None: q[:, None] != k, (HERE, HERE))
        assert name(calls) == "strict"
    finally:
        explain._programs.cache_clear()


def test_answers_that_the_check_reads_alike_are_alike() -> None:
    calls = noted(lambda q, k, window=None: (strict(q, k), "and more"), (HERE, HERE))
    failure = Failure("wrong")
    assert name(calls, failure=failure) is None
    failure.read = lambda answer: answer[0] if isinstance(answer, tuple) else answer
    assert name(calls, failure=failure) == "strict"


def test_what_else_it_may_be_is_said_only_where_no_mistake_fits() -> None:
    failure = Failure("wrong")
    failure.otherwise = Failure("some other", "", "some_other")
    assert name(noted(strict, (HERE, HERE)), "origin", failure) == "strict"
    assert name(noted(lambda q, k, window=None: q, (HERE, HERE)), failure=failure) == "some_other"


@pytest.fixture
def replays(monkeypatch) -> list[explain.Call]:
    """Return the list of calls that are made again, in their order."""
    made: list[explain.Call] = []
    again = explain._answer
    monkeypatch.setattr(explain, "_answer", lambda subject, call: made.append(call) or again(subject, call))
    return made


def test_the_calls_that_are_made_again_are_limited_and_the_message_says_so(monkeypatch, replays) -> None:
    """30 known wrong answers differ from the learner's only in the last of 10 calls; 10 of them are tried."""

    class Gives:
        def __init__(self, right: bool) -> None:
            self.right = right

        def call(self, number: int) -> float:
            return -1.0 if self.right or number == 9 else float(number)

    fakes = [explain._Program("strict", "any", False, Gives(False)) for _ in range(30)]
    monkeypatch.setattr(
        explain, "_programs", lambda _: (explain._Program("", "", False, Gives(True)), *fakes)
    )
    calls = [explain.Call("call", (number,), {}, float(number)) for number in range(10)]
    failure = Failure("Wrong values.")
    failure.otherwise = Failure("some other", "", "some_other")
    found = explain.explained(failure, CAUSAL, "any", calls)
    assert len(replays) == 30 + explain.PASSES * len(calls)
    assert found.misconception is None and found.message == (
        "Wrong values. No known mistake is named: within 110 calls, only 10 of the 30 known wrong answers could be tried."
    )
