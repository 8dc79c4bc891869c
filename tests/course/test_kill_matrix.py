"""All checks on every wrong answer: each check can fail and is worth having, and each mistake has its own message."""

from __future__ import annotations

import pytest

from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.checking.wrong_answers import WrongAnswer, wrong_answers
from tests.course.submissions_of import cases, submissions
from tools.website import kill_matrix
from tools.website.misconceptions import TOGETHER

FEWEST_WRONG = 6


@pytest.mark.parametrize("wrong", cases(submissions("*/wrong_*")))
def test_a_wrong_submission_falls_for_its_reason_among_all_checks(wrong):
    expected = wrong.expected
    result = kill_matrix.report(expected)
    failed = {c.id: c for c in result.checks if not c.ok}
    assert not any(c.broken for c in result.checks), [c.counterexample for c in result.checks if c.broken]
    assert expected.check in failed, f"{expected.check} holds; failed: {sorted(failed)}"
    check = failed[expected.check]
    assert check.misconception == expected.misconception, (check.misconception, check.message)


@pytest.mark.parametrize("exercise_id", cases(exercise_ids()))
def test_wrong_submissions_are_many_and_each_gets_its_own_message(exercise_id):
    """Variants of one mistake share one; wrong values that no mistake explains have nothing of their own to say."""
    assert len(wrong_answers(exercise_id)) >= FEWEST_WRONG
    messages: dict[str, WrongAnswer] = {}
    for wrong in wrong_answers(exercise_id):
        message = next(c.message for c in kill_matrix.report(wrong).checks if c.id == wrong.check)
        other = messages.setdefault(message, wrong)
        unnamed = wrong.misconception is None and "wrong values" in message
        variants = wrong.misconception == other.misconception and (unnamed or wrong.misconception is not None)
        assert message and (other is wrong or variants), (
            f"{wrong.name} and {other.name} have the same message"
        )


@pytest.mark.parametrize("exercise_id", cases(exercise_ids()))
def test_every_check_can_fail(exercise_id):
    """A check that finds no wrong submission checks nothing."""
    for stage in load_exercise(exercise_id).stages:
        failing = {check for row in kill_matrix.rows(stage.id) for check in row.failed}
        assert {check.id for check in stage.checks} - failing == set()


@pytest.mark.parametrize("exercise_id", cases(exercise_ids()))
def test_every_check_is_worth_having(exercise_id):
    """It stands alone for a wrong answer, or is the first to show or to name one, or there is a reason."""
    for stage in load_exercise(exercise_id).stages:
        for check, names in kill_matrix.alone(stage).items():
            assert names or kill_matrix.worth(stage, check), (
                f"{stage.id}:{check} finds nothing that others do not"
            )


def test_no_reason_is_given_for_a_check_that_needs_none():
    known = {
        f"{stage.id}:{check.id}"
        for e in exercise_ids()
        for stage in load_exercise(e).stages
        for check in stage.checks
    }
    assert set(TOGETHER) <= known
