"""Checks of cost give points only if the answers are right; checks of speed, only if the cost is right as well."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from ringlab.errors import CourseError
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.checking.reports import NOT_COUNTED, run_in_process
from ringlab_course.cli.grade_notebooks import _print_report
from ringlab_course.gradebook.entry import Entry
from ringlab_course.gradebook.learner_view import entry_view
from ringlab_course.gradebook.pages import learner_page
from ringlab_course.gradebook.readable import explained
from ringlab_course.judge.judge import GradeReport
from ringlab_course.nbgrader.submitted import _stage as told_by_nbgrader
from ringlab_course.nbgrader.submitted import view_of
from ringlab_course.notebook.checks import described
from tests.course.matrix import reported
from tests.course.submissions_of import submission

NARROW = submission("05/wrong_forward_low_precision_ring").expected
"""An answer that is right in float32 only. Its exchanges are right, but count only if its values are right."""

HINTS = ("What first?", "Be right.", "$1$")


def fails(subject, rng):
    raise Failure("wrong.")


def holds(subject, rng):
    pass


def stage_of(**run):
    points = {"correctness": 1, "cost": 2, "speed": 4}
    checks = tuple(
        Check(kind, points[kind], "visible", f"title of {kind}", how, kind=kind) for kind, how in run.items()
    )
    return Stage("91.gate", "f", "t", checks, HINTS)


@pytest.mark.parametrize(
    ("failing", "earned", "waiting"),
    [
        ((), 7, {}),
        (("correctness",), 0, {"cost": "correctness", "speed": "correctness"}),
        (("cost",), 1, {"speed": "cost"}),
        (("speed",), 3, {}),
        (("correctness", "cost"), 0, {"speed": "correctness"}),
    ],
)
def test_each_kind_counts_where_those_before_it_hold(failing, earned, waiting):
    stage = stage_of(**{k: fails if k in failing else holds for k in ("speed", "cost", "correctness")})
    result = run_in_process(stage, {"f": print})
    assert result.earned == earned and result.points == 7
    assert {c.id for c in result.checks if not c.ok} == set(failing), (
        "the report says which checks fail, whether they count or not"
    )
    assert {c.id: c.message for c in result.checks if not c.counted} == {
        kind: NOT_COUNTED[before] for kind, before in waiting.items()
    }


def test_a_check_that_could_not_read_the_answer_proves_nothing():
    def broken(subject, rng):
        raise KeyError

    assert run_in_process(stage_of(correctness=broken, cost=holds), {"f": print}).earned == 0


def test_wrong_values_with_perfect_bytes_earn_nothing_for_the_bytes():
    checks = {c.id: c for c in reported(NARROW).checks}
    assert not checks["bfloat16"].ok
    for name in ("rounds", "memory"):
        assert checks[name].ok and not checks[name].counted and checks[name].earned == 0


def test_right_values_that_cost_too_much_earn_nothing_for_speed():
    wrong = submission("06/wrong_overlap_repeats_heads_on_the_wire").expected
    checks = {c.id: c for c in reported(wrong).checks}
    assert checks["values"].earned == 2 and not checks["traffic"].ok
    assert checks["order"].ok and not checks["order"].counted


@pytest.mark.parametrize("exercise_id", exercise_ids())
def test_what_is_no_question_of_values_is_no_check_of_correctness(exercise_id):
    """No check of correctness is about costs: it would tell a learner that a right but costly answer is wrong."""
    words = ("byte", "exchange", "memory", "exposed", "hidden tiles", "launch", "never touched")
    for stage in load_exercise(exercise_id).stages:
        for check in stage.checks:
            if any(word in check.title for word in words) or check.id == "memory":
                of_values = stage.id in (
                    "06.threshold",
                    "13.launch",
                    "19.travel",
                )  # here bytes and launches are the answers
                assert check.kind != "correctness" or of_values, (stage.id, check.id)


def test_contracts_with_other_kinds_or_with_nothing_but_cost_are_refused():
    with pytest.raises(CourseError, match="one of the kinds"):
        Check("x", 1, "visible", "t", holds, kind="beauty")
    with pytest.raises(CourseError, match="a check of correctness"):
        stage_of(cost=holds)


def graded():
    stage = load_exercise("05").stage("05.forward")
    return stage, GradeReport("a.ipynb", "05", (reported(NARROW),), stage.points)


def test_everybody_who_tells_of_a_check_says_that_it_is_not_counted():
    stage, result = graded()
    said = NOT_COUNTED["correctness"]
    visible = replace(result.stages[0], checks=result.stages[0].checks[:4])
    text = described(stage, visible)
    assert "  ○ P − 1 exchanges" in text and "once the values are right" in text
    (view,) = view_of(result).stages
    waiting = [check for check in view.checks if not check.counted]
    assert {check.id for check in waiting} == {"rounds", "growth", "memory"}
    assert all(check.ok and check.earned == 0 for check in waiting) and said in str(waiting[0].message)
    assert "○ P − 1 exchanges" in str(told_by_nbgrader(view)) and "once the values are right" in str(
        told_by_nbgrader(view)
    )


def test_the_page_the_command_and_the_explanation_say_it_too():
    _, result = graded()
    entry = Entry(
        "ann",
        "05",
        "a.ipynb",
        "00",
        "2026-01-01T00:00:00+00:00",
        1.0,
        result.as_dict(),
        result.earned,
        result.points,
    )
    assert any("○ P − 1 exchanges" in line for line in explained(entry))
    assert entry_view(entry).stages[0].earned == result.earned
    page = learner_page("ann", [entry], "a class")
    assert "○ holds" in page and "once the values are right" in page
    console = Console(width=300, record=True, file=io.StringIO())
    _print_report(console, "a.ipynb", result.as_dict())
    printed = console.export_text()
    assert "○ 05.forward P − 1 exchanges" in printed and "(0 of 2)" in printed
