"""Right answers pass every tier; every wrong one falls to the check, and for the reason, that it names."""

from __future__ import annotations

import pytest

from ringlab.course.contracts import exercise_ids, load_exercise
from ringlab.course.reports import run_in_process
from tests.course import matrix
from tests.course.matrix_notes import TOGETHER
from tests.course.submissions_of import (
    cases,
    exercises,
    expectation,
    graded_code,
    namespace,
    report,
    solution_code,
    submissions,
)

FEWEST_WRONG = 6


@pytest.mark.parametrize("path", cases(submissions("right_*")))
def test_a_right_submission_passes_every_tier(path):
    space = namespace(path)
    for stage in load_exercise(path.parent.name).stages:
        result = run_in_process(stage, space, tier="all", seed=7)
        assert result.ok, (stage.id, [c for c in result.checks if not c.ok])
        assert result.earned == stage.points


@pytest.mark.parametrize("path", cases(submissions("wrong_*")))
def test_a_wrong_submission_falls_for_the_reason_it_names(path):
    expected = expectation(path)
    result = report(path, expected.stage)
    failed = {c.id: c for c in result.checks if not c.ok}
    assert not any(c.broken for c in result.checks), [c.counterexample for c in result.checks if c.broken]
    assert expected.check in failed, f"{expected.check} holds; failed: {sorted(failed)}"
    check = failed[expected.check]
    assert check.misconception == expected.misconception, (check.misconception, check.message)


@pytest.mark.parametrize("exercise_id", cases(exercises()))
def test_wrong_submissions_are_many_and_each_gets_its_own_message(exercise_id):
    paths = [p for p in submissions("wrong_*") if p.parent.name == exercise_id]
    assert len(paths) >= FEWEST_WRONG
    messages: dict[str, str] = {}
    for path in paths:
        expected = expectation(path)
        message = next(c.message for c in report(path, expected.stage).checks if c.id == expected.check)
        assert message and message not in messages, (
            f"{path.name} and {messages.get(message)} are told the same"
        )
        messages[message] = path.name


@pytest.mark.parametrize("exercise_id", cases(exercise_ids()))
def test_every_check_can_fail(exercise_id):
    """A check that no wrong submission falls to checks nothing."""
    killed = set()
    for path in (p for p in submissions("wrong_*") if p.parent.name == exercise_id):
        stage = expectation(path).stage
        killed |= {(stage, c.id) for c in report(path, stage).checks if not c.ok}
    every = {(s.id, c.id) for s in load_exercise(exercise_id).stages for c in s.checks}
    assert every - killed == set()


@pytest.mark.parametrize("exercise_id", cases(exercise_ids()))
def test_every_check_is_worth_having(exercise_id):
    """It stands alone for a wrong answer, or is the first to show or to name one, or somebody says why not."""
    for stage in load_exercise(exercise_id).stages:
        for check, names in matrix.alone(stage).items():
            assert names or matrix.worth(stage, check), f"{stage.id}:{check} finds nothing that others do not"


def test_no_reason_is_given_for_a_check_that_needs_none():
    known = {
        f"{stage.id}:{check.id}"
        for e in exercise_ids()
        for stage in load_exercise(e).stages
        for check in stage.checks
    }
    assert set(TOGETHER) <= known


@pytest.mark.parametrize("exercise_id", cases(exercise_ids()))
def test_the_page_of_checks_and_wrong_answers_is_up_to_date(exercise_id):
    assert matrix.section(exercise_id) in matrix.PAGE.read_text(encoding="utf-8"), (
        "run: python -m tests.course.matrix"
    )


@pytest.mark.parametrize("exercise_id", cases(exercise_ids()))
def test_what_a_check_says_it_kills_exists(exercise_id):
    stems = {p.stem.removeprefix("wrong_") for p in submissions("wrong_*") if p.parent.name == exercise_id}
    for stage in load_exercise(exercise_id).stages:
        known = stems | {m.name for m in stage.misconceptions}
        for check in stage.checks:
            assert set(check.kills) <= known, f"{stage.id}:{check.id} names {set(check.kills) - known}"


@pytest.mark.parametrize("exercise_id", cases(exercise_ids()))
def test_the_skeleton_fails_as_not_written_yet(exercise_id):
    space = graded_code("exercises", exercise_id)
    for stage in load_exercise(exercise_id).stages:
        result = run_in_process(stage, space, tier="all")
        assert result.status == "not written" and result.earned == 0, (stage.id, result)


@pytest.mark.parametrize("exercise_id", cases(exercise_ids()))
def test_the_solution_passes_every_tier(exercise_id):
    space = solution_code(exercise_id)
    for stage in load_exercise(exercise_id).stages:
        result = run_in_process(stage, space, tier="all", seed=3)
        assert result.ok, (stage.id, [c for c in result.checks if not c.ok])
