"""Right answers pass and call nothing off limits, skeletons are not written, and each check finds a wrong answer.

The kill matrix (test_kill_matrix.py) has a run of every wrong answer. Here each check runs on one of them, so that a
change of ringlab or of the checks' tools cannot make a check blind. test_unearned.py runs solutions in all tiers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringlab_course.checking.forbidden import OffLimits
from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.checking.reports import run_in_process
from tests.course.submissions_of import cases, graded_code, namespace, solution_code, submissions

RIGHT = submissions("*/right_*")
ONE_FOR_EACH_CHECK = {each.expected.finder: each for each in submissions("*/wrong_*")}.values()


def assert_right(exercise_id, space):
    contract = load_exercise(exercise_id)
    for stage in contract.stages:
        result = run_in_process(stage, space, "visible", 7, OffLimits.of(contract))
        assert result.ok, (stage.id, [c for c in result.checks if not c.ok])


@pytest.mark.sweep(7)
@pytest.mark.parametrize("right", cases(RIGHT))
def test_a_right_submission_passes_the_visible_tier(right):
    """Right submissions pass the visible tier here, and all tiers in the sweep of tests/course/seeds.py."""
    assert_right(right.exercise, namespace(right))


@pytest.mark.parametrize("exercise_id", cases(exercise_ids()))
def test_the_solution_passes_the_visible_tier(exercise_id):
    assert_right(exercise_id, solution_code(exercise_id))


@pytest.mark.sweep(5)
@pytest.mark.parametrize("wrong", cases(ONE_FOR_EACH_CHECK))
def test_a_wrong_submission_falls_to_the_check_that_it_names(wrong):
    expected = wrong.expected
    stage = load_exercise(wrong.exercise).stage(expected.stage)
    named = replace(stage.check(expected.check), tier="visible", kind="correctness")
    (check,) = run_in_process(replace(stage, checks=(named,)), namespace(wrong), seed=1).checks
    assert not check.ok and not check.broken, (check.message, check.counterexample)
    assert check.misconception == expected.misconception, (check.misconception, check.message)


@pytest.mark.parametrize("exercise_id", cases(exercise_ids()))
def test_the_skeleton_fails_as_not_written_yet(exercise_id):
    space = graded_code("exercises", exercise_id)
    for stage in load_exercise(exercise_id).stages:
        result = run_in_process(stage, space, tier="all")
        assert result.status == "not written" and result.earned == 0, (stage.id, result)
