"""Right answers pass and call nothing off limits, solutions pass every tier; wrong answers fail the check that they name.

A wrong answer must also fail for the mistake that it names.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringlab_course.checking.contract import TIERS
from ringlab_course.checking.forbidden import OffLimits
from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.checking.reports import run_in_process
from ringlab_course.checking.wrong_answers import FILE
from ringlab_course.judge.judge import joined
from tests.course.submissions_of import cases, graded_code, namespace, solution_code, submission, submissions


def every_tier(stage, space, seed, limits):
    """Return the report of all tiers. Calls off limits are refused in the visible tier only, to save time.

    If a right answer makes such a call only for hidden inputs, the judge's tests find it.
    """
    watched = {"visible": limits}
    return joined(stage, [run_in_process(stage, space, tier, seed, watched.get(tier)) for tier in TIERS])


RIGHT = [each for each in submissions("*/right_*") if each.stem != "right_solution"]
"""All right submissions but the solutions, which have their own test below."""


@pytest.mark.sweep(7)
@pytest.mark.parametrize("right", cases(RIGHT))
def test_a_right_submission_passes_the_visible_tier(right):
    """Right submissions pass the visible tier here, and all tiers in the sweep of tests/course/seeds.py.

    Solutions pass all tiers below.
    """
    contract, space = load_exercise(right.exercise), namespace(right)
    for stage in contract.stages:
        result = run_in_process(stage, space, "visible", 7, OffLimits.of(contract))
        assert result.ok, (stage.id, [c for c in result.checks if not c.ok])


@pytest.mark.sweep(9)
@pytest.mark.parametrize("wrong", cases(submissions("*/wrong_*")))
def test_a_wrong_submission_falls_to_the_check_that_it_names(wrong):
    expected = wrong.expected
    stage = load_exercise(wrong.exercise).stage(expected.stage)
    named = replace(stage.check(expected.check), tier="visible", kind="correctness")
    (check,) = run_in_process(replace(stage, checks=(named,)), namespace(wrong), seed=1).checks
    assert not check.ok, _not_found(stage, wrong)
    assert not check.broken, (check.message, check.counterexample)
    assert check.misconception == expected.misconception, (check.misconception, check.message)


def _not_found(stage, wrong):
    """Return the text for an entry of wrong_answers.md whose check does not find its answer."""
    checks = run_in_process(stage, namespace(wrong), tier="all", seed=1).checks
    found_by = ", ".join(check.id for check in checks if not check.ok) or "no check"
    return (
        f"entry {wrong.expected.name!r} in {FILE} of exercise {wrong.exercise}: its field `check` names "
        f"{wrong.expected.check!r}, which does not find the answer (found by: {found_by}); "
        "name another check, or edit the answer"
    )


def test_an_entry_whose_check_does_not_find_its_answer_is_told_which_checks_do():
    wrong = submission("01/wrong_strict")
    assert "names 'any', which does not find the answer (found by: " in _not_found(
        load_exercise("01").stage("01.causal"), replace(wrong, wrong=replace(wrong.expected, check="any"))
    )


@pytest.mark.parametrize("exercise_id", cases(exercise_ids()))
def test_the_skeleton_fails_as_not_written_yet(exercise_id):
    space = graded_code("exercises", exercise_id)
    for stage in load_exercise(exercise_id).stages:
        result = run_in_process(stage, space, tier="all")
        assert result.status == "not written" and result.earned == 0, (stage.id, result)


@pytest.mark.parametrize("exercise_id", cases(exercise_ids()))
def test_the_solution_passes_every_tier(exercise_id):
    contract, space = load_exercise(exercise_id), solution_code(exercise_id)
    for stage in contract.stages:
        result = every_tier(stage, space, 3, OffLimits.of(contract))
        assert result.ok, (stage.id, [c for c in result.checks if not c.ok])
        assert result.earned == stage.points
