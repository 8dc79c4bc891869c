"""In the committed kill matrix each check fails on some answer and has a reason, and each mistake has its message.

tests/course/test_submissions.py runs each check that an entry names on one of these answers. The tests here run
the other checks, each on one answer that it found.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.checking.wrong_answers import wrong_answers
from tests.course import matrix
from tests.course.submissions_of import cases, submission, submissions
from tools.website import kill_matrix
from tools.website.misconceptions import TOGETHER

pytestmark = pytest.mark.thorough

FEWEST_WRONG = 6


COMMAND = "python -m tests.course.matrix"


def not_run():
    """Return the names of wrong answers without a committed run, and of runs without a wrong answer."""
    return sorted(set(kill_matrix.entries()) ^ {each.name for each in submissions("*/wrong_*")})


def unnamed():
    """Return the checks that no wrong answer names, each with the first wrong answer that it finds.

    If runs are missing, the result is empty, and
    `test_what_was_run_is_every_wrong_answer_and_contract_as_they_are` fails.
    """
    found = {}
    for exercise_id in [] if not_run() else exercise_ids():
        named = {wrong.finder for wrong in wrong_answers(exercise_id)}
        for stage in load_exercise(exercise_id).stages:
            for row in kill_matrix.rows(stage.id):
                for check in row.failed:
                    if f"{stage.id}:{check}" not in named:
                        found.setdefault(f"{stage.id}:{check}", submission(row.wrong.submission))
    return found


def test_what_was_run_is_every_wrong_answer_and_contract_as_they_are():
    """The matrix has a fresh entry of every wrong answer; `python -m tests.course.matrix` adds those missing."""
    entries, changed = kill_matrix.entries(), not_run()
    assert not changed, f"run `{COMMAND}`: entries were added or removed: {', '.join(changed[:9])}"
    assert not {name: entry["faults"] for name, entry in entries.items() if entry["faults"]}
    stale = [name for name, entry in entries.items() if not matrix.is_fresh(name, entry)]
    assert not stale, f"run `{COMMAND}`: answers, contracts or texts have changed: {', '.join(stale[:9])}"


def test_runs_that_are_missing_are_a_failing_test_and_no_error_of_collection(monkeypatch):
    entries = dict(kill_matrix.entries())
    gone = entries.popitem()[0]
    monkeypatch.setattr(kill_matrix, "entries", lambda: entries)
    assert gone in not_run() and unnamed() == {}


@pytest.mark.parametrize("wrong", cases(dict.fromkeys(unnamed().values())))
def test_what_was_run_is_what_the_checks_say_today(wrong):
    today, known = matrix.entry(wrong.name), kill_matrix.entries()[wrong.name]
    assert {**today, "message": ""} == {**known, "message": ""}


def said(*checks):
    """Return a stand-in for the reports of the checks of 00.axes."""
    return lambda wrong: SimpleNamespace(checks=checks)


def test_an_entry_tells_of_a_check_that_broke_and_of_one_that_holds(monkeypatch):
    wrong = submissions("00/wrong_*")[0]
    finder, other = wrong.expected.check, "another"
    held = SimpleNamespace(id=finder, ok=True, broken=False, message="", misconception=None)
    broke = SimpleNamespace(id=other, ok=False, broken=True, message="", misconception=None)
    monkeypatch.setattr(matrix, "reported", said(held, broke))
    assert matrix.entry(wrong.name)["faults"] == {"1": [f"{other} broke", f"{finder} holds"]}
    silent = SimpleNamespace(id=finder, ok=False, broken=False, message="", misconception=None)
    monkeypatch.setattr(matrix, "reported", said(silent))
    assert matrix.entry(wrong.name)["faults"] == {}


def test_an_entry_is_stale_when_what_is_said_about_mistakes_changes(monkeypatch):
    name, entry = next(iter(kill_matrix.entries().items()))
    assert matrix.is_fresh(name, entry) and not matrix.is_fresh(name, None)
    monkeypatch.setattr(matrix, "told_digest", lambda stage: "another")
    assert not matrix.is_fresh(name, entry)


@pytest.mark.parametrize("exercise_id", exercise_ids())
def test_wrong_submissions_are_many_and_each_gets_its_own_message(exercise_id):
    """Mistakes have different messages, except for variants of one and values that no mistake explains."""
    assert len(wrong_answers(exercise_id)) >= FEWEST_WRONG
    by_message = {}
    for wrong in wrong_answers(exercise_id):
        message = kill_matrix.entries()[wrong.submission]["message"]
        other = by_message.setdefault(message, wrong)
        variants = wrong.misconception == other.misconception and wrong.misconception is not None
        assert other is wrong or message == matrix.VALUES or variants, (
            f"{wrong.name} and {other.name} have the same message"
        )


@pytest.mark.parametrize("exercise_id", exercise_ids())
def test_the_check_that_must_find_a_mistake_names_it(exercise_id):
    entries = kill_matrix.entries()
    for wrong in wrong_answers(exercise_id):
        assert wrong.misconception is None or wrong.check in entries[wrong.submission]["naming"], wrong.name


@pytest.mark.parametrize("exercise_id", exercise_ids())
def test_every_check_can_fail(exercise_id):
    """Every check finds at least one wrong submission; otherwise it would check nothing."""
    for stage in load_exercise(exercise_id).stages:
        failing = {check for row in kill_matrix.rows(stage.id) for check in row.failed}
        assert {check.id for check in stage.checks} - failing == set()


@pytest.mark.parametrize("exercise_id", exercise_ids())
def test_every_check_is_worth_having(exercise_id):
    """Every check alone finds a wrong answer, or there is another reason to have it (`tools.website.kill_matrix.worth`)."""
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
