"""The judge gives honest submissions their points, explains visible checks, and hides the hidden probes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ringlab.errors import CourseError
from ringlab_course.checking.contract import Check, Exercise, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.judge.judge import grade, grade_many
from ringlab_course.judge.session import SandboxedSubject, Session
from tests.course.judge.small_contract import DOUBLE, EXERCISE, HINTS, RIGHT, notebook

pytestmark = pytest.mark.needs_bwrap


def checks(report) -> dict:
    return {check.id: check for stage in report.stages for check in stage.checks}


@pytest.mark.parametrize(
    "source",
    [
        RIGHT,
        "def helper(x):\n    return x * x.dtype.type(2)\ndouble = lambda x: helper(x)",
    ],
)
def test_honest_variants_get_everything(tmp_path, source) -> None:
    report = grade(notebook(tmp_path, "print('experiment')\n1 / 0", source, "plt.plot(double(3))"), EXERCISE)
    assert report.ok and (report.earned, report.points) == (5, 5) and not report.reason and not report.label


def test_hidden_checks_never_show_the_probe(tmp_path) -> None:
    report = grade(notebook(tmp_path, "def double(x):\n    return (2 * x).astype('float64')"), EXERCISE)
    found = checks(report)
    assert found["values"].ok and report.earned == 2
    assert (
        found["dtype"].message == "The answer should keep the dtype." and found["dtype"].counterexample == ""
    )
    quoting = "def double(x):\n    if x.ndim == 2: raise NotImplementedError(str(x))\n    return 2 * x"
    assert "[" not in "".join(
        c.message + c.counterexample for c in checks(grade(notebook(tmp_path, quoting), EXERCISE)).values()
    )


def test_visible_checks_show_a_counterexample_and_the_learners_line(tmp_path) -> None:
    wrong = checks(grade(notebook(tmp_path, "def double(x):\n    return 3 * x"), EXERCISE))["values"]
    assert "got" in wrong.counterexample and "expected" in wrong.counterexample
    raising = checks(grade(notebook(tmp_path, "", "def double(x):\n    return x['a']"), EXERCISE))["values"]
    assert (
        raising.message == "`double` raised IndexError."
        and "in double, line 2: return x['a']" in raising.counterexample
    )


def test_what_a_learner_writes_cannot_steer_the_terminal(tmp_path) -> None:
    report = grade(notebook(tmp_path, "def double(x):\n    raise ValueError('\\x1b[2J\\x07gone')"), EXERCISE)
    assert (
        "gone" in checks(report)["values"].counterexample
        and "\x1b" not in checks(report)["values"].counterexample
    )


def test_probes_are_fresh_unless_a_seed_is_given(tmp_path) -> None:
    path = notebook(tmp_path, "def double(x):\n    return 3 * x")
    one, two, three = (grade(path, EXERCISE, seed=seed) for seed in (None, 7, 7))
    assert checks(two)["values"].counterexample == checks(three)["values"].counterexample
    assert checks(one)["values"].counterexample != checks(two)["values"].counterexample
    assert one.seed not in (0, 7)


def test_a_skeleton_is_not_written(tmp_path) -> None:
    report = grade(
        notebook(tmp_path, 'def double(x):\n    raise NotImplementedError("stage: double it")'), EXERCISE
    )
    assert report.stages[0].status == "not written" and report.earned == 0
    report = grade(notebook(tmp_path, "# nothing here"), EXERCISE)
    assert "no function `double`" in checks(report)["values"].message


def test_unreadable_notebooks_get_zero_with_a_reason_and_stop_nobody(tmp_path) -> None:
    (tmp_path / "a.ipynb").write_text("{")
    (tmp_path / "b.ipynb").symlink_to("/etc/passwd")
    (tmp_path / "c.ipynb").write_bytes(b"\xff\xfe")
    notebook(tmp_path, "x = 1", grade="no such exercise.f", name="d.ipynb")
    (tmp_path / "e.ipynb").write_text('{"nbformat": 4, "cells": []}')
    notebook(tmp_path, RIGHT, name="f.ipynb")
    reports = list(grade_many([tmp_path], EXERCISE))
    assert [r.reason for r in reports[:3]] == [
        "broken JSON: save the notebook in JupyterLab",
        "a symbolic link: hand in the notebook itself",
        "text that is not UTF-8: save the notebook in JupyterLab",
    ]
    assert [r.earned for r in reports] == [0, 0, 0, 0, 0, 5] and all(r.points == 5 for r in reports)
    own = list(grade_many([tmp_path / "d.ipynb", tmp_path / "e.ipynb", tmp_path / "missing.ipynb"]))
    assert all(r.reason and r.earned == 0 for r in own)


def test_an_unknown_exercise_is_the_callers_mistake(tmp_path) -> None:
    with pytest.raises(CourseError):
        grade(notebook(tmp_path, RIGHT), "no such exercise")


def test_calls_measure_memory_and_keep_arguments_apart() -> None:
    code = "import numpy as np\ndef f(x, n=1):\n    x += 1\n    return float(np.ones((n, 1 << 17)).sum())"
    with Session([code], {"f": ["x"]}, torch=False) as session:
        subject, x = SandboxedSubject(session, "f"), np.zeros(3)
        for mib in (64, 8, 32):
            measured = subject.measure(x, n=mib)
            assert measured.answer == mib * 2.0**17
            # The kernel counts pages per processor, and adds some hundreds of KiB to the total only later. So
            # the peak may be a little off.
            assert mib - 2 <= measured.peak_bytes / 2**20 <= mib + 2
        assert x.tolist() == [0, 0, 0]


def test_a_session_is_given_up_after_three_lost_workers_and_after_its_time() -> None:
    with Session(["import os\ndef f(): os._exit(1)"], ["f"], torch=False) as session:
        subject = SandboxedSubject(session, "f")
        messages = []
        for _ in range(5):
            try:
                subject.call()
            except AssertionError as failure:
                messages.append(failure.message)
        assert ["ended its process" in m for m in messages] == [True] * 3 + [
            False
        ] * 2 and "Not run" in messages[-1]
    late = Session(["def f(): return 1"], ["f"], torch=False, total_seconds=-1)
    with late, pytest.raises(AssertionError, match="used up"):
        SandboxedSubject(late, "f").call()


def test_a_function_whose_workers_end_takes_no_points_from_the_others(tmp_path) -> None:
    first = Stage(
        "90.first",
        "first",
        "first",
        tuple(replace(DOUBLE.checks[0], id=f"values{n}") for n in range(5)),
        HINTS,
    )
    both = Exercise("90", "90_small", "small", (first, DOUBLE))
    report = grade(notebook(tmp_path, f"import os\ndef first(x):\n    os._exit(0)\n{RIGHT}"), both, seed=1)
    told = [check.message for check in report.stages[0].checks]
    assert ["Not run" in message for message in told] == [False, False, False, True, True]
    assert report.stages[1].ok and report.earned == DOUBLE.points


def test_texts_of_megabytes_do_not_get_into_the_report(tmp_path) -> None:
    def quote(subject, rng):
        raise Failure("wrong", "x" * 10**6 + str(subject.call(0)))

    stage = replace(DOUBLE, checks=(Check("values", 2, "visible", "values", quote),))
    (check,) = grade(notebook(tmp_path, RIGHT), replace(EXERCISE, stages=(stage,))).stages[0].checks
    assert len(check.counterexample) == 5000
