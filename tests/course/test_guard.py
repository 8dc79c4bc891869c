"""`check()` finds code that leaves its work to ringlab or PyTorch, or changes its arguments, but no honest code.

The judge's tests use the same submissions, so neither `check()` nor the judge accepts what the other refuses.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from ringlab_course import check
from ringlab_course.checking.contract import Check, Exercise, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.forbidden import OffLimits
from ringlab_course.checking.guard import changed_argument, fingerprints
from ringlab_course.checking.in_process import InProcessSubject
from ringlab_course.checking.loading import load_exercise
from ringlab_course.checking.reports import run_in_process
from tests.course.borrowed import BORROWED, HONEST

X = torch.zeros(1, 2, 4, 4)


def one_check(limits: OffLimits, source: str, x: object = X, may_change: tuple[str, ...] = ()) -> str:
    """Return the message of a check that calls the f of `source` with x, or "" if the check passes."""

    def run(subject, rng):
        subject.call(x)

    checks = (Check("c", 1, "visible", "t", run),)
    stage = Stage("91.f", "f", "t", checks, ("Why?", "So.", "$1$"), may_change=may_change)
    space: dict = {"__name__": "__main__"}
    exec(compile(source, "<cell 1>", "exec"), space)
    return run_in_process(stage, space, limits=limits).checks[0].message


LIMITS = OffLimits(about=("ringlab.layout.striped",))
UNUSED = ("schedules", "an exercise")
"""Uses that only import: the judge lacks the modules; a notebook has them, but nothing of them is called."""
WHOSE = {"in a helper": "`helper`", "in a function inside": "`helper`", "in a lambda": "`<lambda>`"}


@pytest.mark.parametrize("use", [use for use in BORROWED if use not in UNUSED])
def test_borrowed_code_is_found_in_a_check(use) -> None:
    message = one_check(LIMITS, BORROWED[use])
    assert "put code of your own in its place" in message
    assert message.startswith(WHOSE.get(use, "`f`"))


@pytest.mark.parametrize("code", HONEST)
def test_honest_code_is_not_blamed(code) -> None:
    assert one_check(LIMITS, HONEST[code]) == ""


def test_exercises_differ_in_the_code_that_they_are_about() -> None:
    def blamed(use: str, exercise: str) -> bool:
        return "of your own" in one_check(OffLimits.of(load_exercise(exercise)), {**BORROWED, **HONEST}[use])

    assert not any((blamed("merge", "07"), blamed("by module", "10"), blamed("SDPA", "06")))
    assert all((blamed("merge", "02"), blamed("by module", "07"), blamed("SDPA", "03")))
    assert blamed("a layout", "08") and not blamed("a layout", "07")


def test_a_package_that_an_exercise_does_without_is_refused() -> None:
    softmax = "import torch\ndef f(x): return torch.softmax(torch.as_tensor(x), -1).numpy()"
    method = "import torch\ndef f(x): return torch.from_numpy(x).softmax(-1).numpy()"
    limits = OffLimits(without=("torch",))
    for source in (softmax, method):
        assert "of your own" in one_check(limits, source, np.ones(3))
        assert one_check(OffLimits(), source, np.ones(3)) == ""


def test_a_collection_of_garbage_is_no_call_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks of garbage collection, such as jax's, do not count as calls; an error in one may end Python."""
    monkeypatch.setattr(sys, "unraisablehook", (raised := []).append)
    space: dict = {"__name__": "jax._src.lib"}
    exec("def _xla_gc_callback(*args): pass", space)
    gc.callbacks.append(space["_xla_gc_callback"])
    garbage = "def f(x):\n    for _ in range(20_000):\n        one = []; one.append(one)\n    return x"
    try:
        assert one_check(OffLimits(without=("jax",)), garbage) == ""
    finally:
        gc.callbacks.remove(space["_xla_gc_callback"])
    assert gc.isenabled() and not raised


CHANGES = {
    "q": "def f(q): q /= 2; return q",
    "v": "def f(v): v[0] = 1; return v",
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_argument_is_named(name) -> None:
    for x in (np.arange(4.0), torch.arange(4.0)):
        assert f"changed its argument {name} in place" in one_check(OffLimits(), CHANGES[name], x)
        assert one_check(OffLimits(), CHANGES[name], x, may_change=(name,)) == ""


def test_arguments_are_compared_with_nan_and_in_nested_ones_too() -> None:
    def f(a, b, mask):
        pass

    a, pair, mask = (
        np.array([np.nan, -np.inf]),
        (torch.tensor([1, 2]), 3),
        torch.ones(2).bool()[None].expand(3, 2),
    )
    before = fingerprints(f, [a, pair], {"mask": mask})
    assert changed_argument(before, fingerprints(f, [a, pair], {"mask": mask})) is None
    other = fingerprints(f, [a, (torch.tensor([1, 3]), 3)], {"mask": mask})
    assert changed_argument(before, other) == "b" and changed_argument(before, other, ("b",)) is None
    assert changed_argument(before, fingerprints(f, [a, pair], {"mask": ~mask})) == "mask"
    assert changed_argument(before, fingerprints(f, [-a, pair], {"mask": mask})) == "a"
    strided = torch.arange(6.0)[::3]
    assert fingerprints(f, [strided], {}) == fingerprints(f, [strided.contiguous()], {})
    empty = torch.from_numpy(np.empty((2, 0, 3))), torch.empty(0, 4).T, np.empty((0, 2)), torch.ones(2).conj()
    assert changed_argument(fingerprints(f, empty, {}), fingerprints(f, empty, {})) is None


def stage(kind: str) -> Stage:
    """Return a stage for a function f, with one check that accepts every answer."""
    return Stage(
        "91.f",
        "f",
        "t",
        (Check("c", 1, "visible", "t", lambda s, _: None),),
        ("Why?", "So.", "$1$"),
        kind=kind,
    )


def test_an_answer_arrives_at_a_check_as_it_would_at_the_judge():
    @dataclass
    class Pair:
        out: torch.Tensor
        lse: Fraction

    def answer(x):
        return Pair(x.T, Fraction(1, 2)), {3}, range(2)

    subject = InProcessSubject(stage("function"), {"f": answer})
    (out, lse), members, steps = subject.call(torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True))
    assert out.shape == (3, 2) and out.dtype == torch.bfloat16 and not out.requires_grad
    assert (lse, members, steps) == (0.5, {3}, [0, 1])
    ring = InProcessSubject(stage("ring"), {"f": lambda ring, x: Pair(x, Fraction(1, 4))})
    assert [type(end) for end in ring.run_ring(2, [torch.zeros(1)] * 2).results] == [tuple, tuple]


@pytest.mark.parametrize("answer", [object(), lambda x: x, np.array([object()]), 1 << 64])
def test_an_answer_that_the_judge_could_not_receive_fails_in_a_check_too(answer):
    with pytest.raises(Failure, match="`f` should answer with arrays, numbers or texts") as failed:
        InProcessSubject(stage("function"), {"f": lambda: answer}).call()
    assert failed.value.counterexample.startswith("the answer holds ")
    with pytest.raises(Failure, match="`f` should answer"):
        InProcessSubject(stage("ring"), {"f": lambda ring, x: answer}).run_ring(1, [torch.zeros(1)])


def chain(first: str) -> Exercise:
    def needs(value: int):
        def run(subject, rng):
            if subject.call() != value:
                raise Failure("wrong.", "1 for 2", "a_mistake")

        return run

    hints = ("Why?", "So.", "$1$")
    return Exercise("91", "91_chain", "t", (
        Stage("91.one", "one", "t", (Check("c", 1, "visible", "t", needs(1)),), hints),
        Stage("91.two", "two", "t", (Check("c", 1, "visible", "t", needs(2)),), hints, helpers=("one",)),
    ))  # fmt: skip


def test_a_stage_whose_helper_is_wrong_says_that_and_no_more(monkeypatch, capsys) -> None:
    from ringlab_course.notebook import checks

    monkeypatch.setattr(checks, "load_exercise", lambda _: chain("x"))
    space = {"one": lambda: 7, "two": lambda: space["one"]() + 1}
    check("91.two", space)
    said = capsys.readouterr().out
    assert "First mend `one` (91.one): `two` may call it." in said and "1 for 2" not in said
    alone = chain("x")
    alone = replace(alone, stages=(alone.stages[0], replace(alone.stages[1], waits=False)))
    monkeypatch.setattr(checks, "load_exercise", lambda _: alone)
    check("91.two", space)
    assert "1 for 2" in capsys.readouterr().out
    monkeypatch.setattr(checks, "load_exercise", lambda _: chain("x"))
    space["one"] = lambda: 1
    check("91.two", space)
    assert "visible checks passed" in capsys.readouterr().out
    space["two"] = lambda: 5
    check("91.two", space)
    assert "wrong." in capsys.readouterr().out
