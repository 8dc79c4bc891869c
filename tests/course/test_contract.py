"""A check gives a right answer its points, names the mistake of a wrong one, and shows the line of a crash."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from ringlab.errors import CourseError
from ringlab_course.checking.answers import (
    bound_from,
    compare_with,
    relative_error,
)
from ringlab_course.checking.contract import Check, Exercise, Misconception, Stage
from ringlab_course.checking.emulated import Emulated, compare_emulated
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.in_process import InProcessSubject
from ringlab_course.checking.loading import load_exercise
from ringlab_course.checking.reports import run_in_process, run_stage

SUMS = Misconception("sums", "You summed; the mean divides by the number of rows.", lambda x: x.sum(0))
FIRST = Misconception("first", "You took the first row.", lambda x: x[0])


def check_values(subject, rng):
    def cases():
        for n in (2, 5):
            x = rng.normal(size=(n, 3))
            yield Emulated(subject.call(x), x.mean(0), 1e-12, text=f"n={n}", inputs=(x,))

    compare_emulated(cases(), (SUMS, FIRST))


def check_input_is_kept(subject, rng):
    x = rng.normal(size=(2, 3))
    before = x.copy()
    subject.call(x)
    if not np.array_equal(x, before):
        raise Failure("your function changed its input.")


VALUES = Check("values", 2, "visible", "is the mean", check_values)
HIDDEN = Check("big", 3, "held-out", "is the mean of large numbers", check_values)
HINTS = ("What is a mean?", "Divide.", "$\\frac1n\\sum x_i$")
STAGE = Stage("91.mean", "mean", "The mean", (VALUES, HIDDEN), HINTS, (SUMS, FIRST))


def visible(function, stage=STAGE):
    return run_in_process(stage, {"mean": function})


def test_a_right_answer_earns_its_points_tier_by_tier():
    report = visible(lambda x: x.mean(0))
    assert report.ok and report.earned == report.points == 2 and [c.id for c in report.checks] == ["values"]
    everything = run_in_process(STAGE, {"mean": lambda x: x.mean(0)}, tier="all")
    assert everything.earned == STAGE.points == 5
    assert run_in_process(STAGE, {"mean": lambda x: x.mean(0)}, tier="held-out").points == 3


@pytest.mark.parametrize(("wrong", "name"), [(lambda x: x.sum(0), "sums"), (lambda x: x[0], "first")])
def test_a_wrong_answer_gets_the_name_of_its_mistake_on_the_smallest_input(wrong, name):
    (check,) = visible(wrong).checks
    assert check.misconception == name and check.message == STAGE.misconception(name).message
    assert check.counterexample.startswith("n=2\nthe result[")
    assert check.earned == 0


def nothing(x):
    pass


def crash(x):
    return x[0] + [][7]


def to_do(x):
    raise NotImplementedError("91.mean: divide the sum by n")


def nan(x):
    return x.mean(0) * np.nan


@pytest.mark.parametrize(
    ("function", "status", "words"),
    [
        (nothing, "wrong", "is the `return` missing?"),
        (crash, "wrong", "raised IndexError"),
        (to_do, "not written", "divide the sum by n"),
        (nan, "wrong", "there is a NaN"),
        (lambda x: x, "wrong", "wrong shape"),
        (lambda x: "mean", "wrong", "should be an array"),
        (None, "not written", "run the cell"),
    ],
)
def test_whatever_comes_back_gets_a_friendly_word(function, status, words):
    report = visible(function)
    assert report.status == status and words in report.checks[0].message
    assert not report.checks[0].broken and report.earned == 0


def test_a_crash_shows_the_learners_own_line():
    example = visible(crash).checks[0].counterexample
    assert "in crash, line" in example and "return x[0] + [][7]" in example and "IndexError" in example
    assert "subject.py" not in example and "_guarded" not in example


def test_a_check_that_fails_itself_is_not_blamed_on_the_learner():
    def buggy(subject, rng):
        raise KeyError("oops")

    stage = Stage("91.mean", "mean", "t", (Check("b", 1, "visible", "t", buggy),), HINTS)
    (check,) = visible(lambda x: x, stage).checks
    assert check.broken and "report the check" in check.message


def test_a_function_that_writes_into_its_arguments_cannot_alter_the_checks_own():
    def greedy(x):
        result = x.mean(0)
        x[:] = 0
        return result

    stage = Stage("91.mean", "mean", "t", (VALUES, Check("k", 1, "visible", "t", check_input_is_kept)), HINTS)
    assert "changed its argument x" in visible(greedy, stage).checks[0].message
    assert visible(greedy, replace(stage, may_change=("x",))).ok
    subject = InProcessSubject(replace(STAGE, may_change=("pair",)), {"mean": lambda pair: pair[0].zero_()})
    tensor = torch.ones(2)
    subject.call([tensor, {"x": tensor}])
    assert tensor.sum() == 2


def test_probes_depend_on_the_seed_and_on_the_check_alone():
    seen = []

    def look(subject, rng):
        seen.append(float(rng.random()))

    def stage(*names):
        return Stage("91.m", "m", "t", tuple(Check(n, 1, "visible", "t", look) for n in names), HINTS)

    for names, seed in ((("a", "b"), 1), (("b",), 1), (("b",), 2)):
        run_stage(stage(*names), InProcessSubject(stage(*names), {"m": print}), seed=seed)
    assert seen[1] == seen[2] and len(set(seen)) == 3


def test_memory_of_a_call_is_measured_for_numpy_and_torch():
    def numpy_two(n):
        first = np.zeros(n)
        return first + 1

    def torch_two(n):
        first = torch.zeros(n, dtype=torch.float64)
        return first + 1

    for function in (numpy_two, torch_two):
        subject = InProcessSubject(STAGE, {"mean": function})
        assert subject.measure(100_000).peak_bytes == pytest.approx(1_600_000, rel=0.02)
        assert subject.measure(200_000).peak_bytes == pytest.approx(3_200_000, rel=0.02)


def ring_stage(**kwargs):
    return Stage("91.ring", "program", "t", (VALUES,), HINTS, kind="ring", **kwargs)


def test_a_ring_program_runs_on_every_rank_with_its_own_shard():
    def program(ring, x, factor):
        return ring.shift(x) * factor

    subject = InProcessSubject(ring_stage(), {"program": program})
    outcome = subject.run_ring(3, [torch.full((1, 2), float(r)) for r in range(3)], factor=10)
    assert [float(r[0, 0]) for r in outcome.results] == [20.0, 0.0, 10.0]
    assert outcome.trace.rounds(0) == 1
    with pytest.raises(ValueError, match="3 entries"):
        subject.run_ring(3, [torch.zeros(1)] * 2)


def test_trouble_on_a_rank_is_told_as_the_learners():
    def crashing(ring, x):
        if ring.rank == 1:
            raise ValueError("no luck")
        return ring.shift(x)

    def waiting(ring, x):
        return ring.shift(x) if ring.rank == 0 else x

    def unwritten(ring, x):
        raise NotImplementedError("91.ring: shift x")

    shards = [torch.zeros(1, 1)] * 3
    with pytest.raises(Failure, match="raised ValueError") as crashed:
        InProcessSubject(ring_stage(), {"program": crashing}).run_ring(3, shards)
    assert 'raise ValueError("no luck")' in crashed.value.counterexample
    with pytest.raises(Failure, match="the ranks cannot finish"):
        InProcessSubject(ring_stage(), {"program": waiting}).run_ring(3, shards)
    with pytest.raises(Failure, match="not written yet"):
        InProcessSubject(ring_stage(), {"program": unwritten}).run_ring(3, shards)


def test_errors_are_relative_to_the_largest_value_and_nan_and_inf_must_match():
    assert relative_error([1.0, 2.0], [1.0, 4.0]) == 0.5  # the parts of a list are compared one by one
    truth = np.array([1.0, 4.0, -np.inf])
    assert relative_error(np.array([1.0, 3.0, -np.inf]), truth) == 0.25
    for wrong in ([1.0, 4.0, np.inf], [1.0, 4.0, 0.0], [1.0, 4.0, np.nan], [np.nan, 4.0, -np.inf]):
        assert relative_error(np.array(wrong), truth) == np.inf
    assert relative_error(np.array([1.0]), np.array([1.0, 1.0])) == np.inf
    assert relative_error((truth, truth), (truth,)) == np.inf


def test_the_bound_is_twice_the_plain_error_and_never_below_rounding():
    truth = np.array([1.0, 2.0])
    plain = np.array([1.0, 2.2], dtype=np.float32)
    assert bound_from(plain, truth) == pytest.approx(0.2, rel=1e-6)
    assert bound_from(truth.astype(np.float32), truth) == 4 * np.finfo(np.float32).eps
    assert bound_from(torch.tensor(truth, dtype=torch.bfloat16), truth) == 4 * torch.finfo(torch.bfloat16).eps


def test_the_counterexample_is_the_element_with_the_largest_error_in_digits_that_tell():
    truth = np.array([[1.0, 2.0], [3.0, 0.84561]])
    for wrong, line in (
        ([[1.1, 2.0], [3.5, 0.8]], "x[1, 0]: got 3.5, expected 3"),
        ([[1.0, 2.5], [3.0 + 0.5, 0.8]], "x[0, 1]: got 2.5, expected 2"),
        ([[1.0, 2.0], [3.0, 0.84562]], "x[1, 1]: got 0.84562, expected 0.84561"),
        ([[9.0, np.nan], [3.0, 0.8]], "x[0, 1]: got nan, expected 2"),
    ):
        with pytest.raises(Failure) as failure:
            compare_with(np.array(wrong), truth, bound=1e-7, names=("x",))
        assert failure.value.counterexample.splitlines()[0] == line


def test_of_wrong_whole_numbers_the_first_is_shown():
    """The largest of many wrong slots lies far behind the one that shows the mistake."""
    slots = np.arange(400)
    with pytest.raises(Failure, match="wrong values") as failure:
        compare_with(slots // 2, slots, bound=0.0, names=("slots",))
    assert failure.value.counterexample == "slots[1]: got 0, expected 1"


def emulated(answer, x):
    return Emulated(answer, x.mean(0), 1e-9, text=f"{len(x)} rows", inputs=(x,))


def test_an_emulator_that_gives_the_truth_explains_nothing():
    """A mistake that makes no difference on these inputs is not named, even if the answer is close to the truth."""
    x = np.zeros((1, 3)) + 2.0  # for one row the sum equals the mean
    with pytest.raises(Failure) as wrong:
        compare_emulated([emulated(x[0] + 5e-9, x)], (SUMS,))
    assert wrong.value.misconception is None


def test_an_emulated_mistake_is_named_by_all_cases_or_not_at_all():
    """Where two mistakes fit all cases, or no mistake does, the first wrong case is shown without a name."""
    one, two = np.array([[0.0, 0.0], [1.0, 1.0]]), np.array([[1.0, 2.0], [3.0, 4.0]])
    last = Misconception("last", "You took the last row.", lambda x: x[-1])
    for cases, name in (
        ([(one, one.sum(0))], None),  # with one row, the sum is also the last row
        ([(one, one.sum(0)), (two, two.sum(0))], "sums"),
        ([(one, one.sum(0)), (two, two[0])], None),
    ):
        with pytest.raises(Failure) as wrong:
            compare_emulated([emulated(answer, x) for x, answer in cases], (SUMS, FIRST, last))
        assert wrong.value.misconception == name and wrong.value.counterexample.startswith("2 rows")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Check("x", 1, "secret", "t", print),
        lambda: Stage("91.m", "m", "t", (VALUES,), HINTS[:2]),
        lambda: Stage("91.m", "m", "t", (VALUES, VALUES), HINTS),
        lambda: Stage("91.m", "m", "t", (HIDDEN,), HINTS),
        lambda: Stage("91.m", "m", "t", (VALUES,), HINTS, (SUMS, SUMS)),
        lambda: Exercise("92", "92_x", "t", (STAGE,)),
        lambda: Exercise("91", "91_x", "t", (STAGE, STAGE)),
        lambda: load_exercise("77"),
    ],
)
def test_a_contract_that_makes_no_sense_is_refused(make):
    with pytest.raises(CourseError):
        make()


@pytest.mark.parametrize(
    "exercise_id",
    [
        "01",
    ],
)
def test_the_checks_of_an_exercise_in_numpy_load_no_torch(exercise_id):
    """Checks in NumPy do not load torch, which would cost a judge's process 170 MB and a second at its start."""
    code = f"import sys; from ringlab_course.checking.loading import load_exercise; load_exercise('{exercise_id}')"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr
