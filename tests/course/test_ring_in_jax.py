"""Exercise 17 finds programs that are no ring, and shows no text that a worker sends."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from ringlab import zigzag
from ringlab.errors import CourseError
from ringlab_course.checking import requirements
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.loading import load_exercise
from ringlab_course.checking.protocol import ProtocolError
from ringlab_course.checking.reports import run_in_process
from ringlab_course.checking.wrong_answers import SOLUTION, right_answers
from ringlab_course.exercises.e17_ring_in_jax.cases import case, look
from ringlab_course.judge import grade
from ringlab_course.mesh.examine import Examined, taken_in

pytestmark = pytest.mark.thorough

EXERCISE = load_exercise("17")


def test_where_jax_is_missing_everybody_is_told_what_to_type(monkeypatch, tmp_path):
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "jax"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jax", None)  # importing it fails
    report = run_in_process(EXERCISE.stages[0], namespace_like(lambda *_: None))
    assert all("pip install" in check.message and not check.broken for check in report.checks)
    with pytest.raises(CourseError, match="pip install"):
        grade(written(tmp_path, "x = 1", "17.forward"), "17", unsafe=True)


def namespace_like(function):
    """Return a namespace in which `function` is the answer to every stage."""
    return {stage.function: function for stage in EXERCISE.stages}


@pytest.mark.needs_jax
def test_more_devices_than_there_are_is_no_crash():
    from ringlab_course.mesh.examine import examine

    positions = np.arange(9).reshape(9, 1)
    with pytest.raises(Failure, match="restart the kernel"):
        examine(
            lambda q, k, v, positions: (q, q[..., 0]), positions, [np.zeros((1, 1, 9, 4), np.float32)] * 3
        )


def written(folder, code, stage):
    cell = {"cell_type": "code", "id": "x", "metadata": {"grade": stage}, "source": code, "outputs": []}
    path = folder / "17_ring_in_jax.ipynb"
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]}))
    return path


def solution_with(old="", new=""):
    """Return the namespace of the solution with one edit."""
    source = right_answers("17")[SOLUTION]
    assert old in source
    space = {"__name__": "solution"}
    exec(source.replace(old, new) if old else source, space)
    return space


@pytest.mark.needs_jax
@pytest.mark.parametrize("ranks", [3, 8])
def test_a_gather_on_some_numbers_of_devices_alone_is_found(ranks):
    """An all-gather is found even if the program is a ring on all other numbers of devices."""
    state = (
        "    state = attend(q, k, v, sees(positions, 0))\n    (",
        (
            "    K, V = (lax.all_gather(x, 'ring', axis=2, tiled=True) for x in (k, v))\n"
            f"    if len(positions) == {ranks} and q.dtype == jnp.float32:\n"
            "        deal = jnp.asarray(positions)\n"
            "        return attend(q, K, V, deal[lax.axis_index('ring')][:, None] >= deal.ravel())\n"
            "    state = attend(q, k, v, sees(positions, 0))\n    ("
        ),
    )
    report = run_in_process(EXERCISE.stage("17.forward"), solution_with(*state), tier="all")
    failed = {check.id: check.misconception for check in report.checks if not check.ok}
    assert failed == {"any" if ranks == 8 else "messages": "gathers"}, report


@pytest.mark.needs_jax
def test_blocks_do_not_travel_by_way_of_python():
    stage = EXERCISE.stage("17.forward")
    space = solution_with(
        "    state = attend(q, k, v,", "    jax.pure_callback(lambda x: x, q, q)\n    state = attend(q, k, v,"
    )
    report = run_in_process(stage, space, tier="all")
    assert report.earned == 0
    assert all("lax.ppermute" in check.message and not check.broken for check in report.checks), report


@pytest.mark.needs_jax
def test_what_a_program_writes_into_its_positions_changes_no_truth():
    space = solution_with()
    right = space["ring_forward"]

    def sees_nothing_later(q, k, v, positions):
        positions[...] = np.arange(positions.size).reshape(positions.shape)
        return right(q, k, v, positions)

    report = run_in_process(EXERCISE.stage("17.forward"), {"ring_forward": sees_nothing_later}, tier="all")
    assert {check.id for check in report.checks if check.ok} == {"values"}, report


FORGED = {
    "an escape sequence": {"fault": "\x1b[31m"},
    "a long text": {"fault": "x" * 1000},
    "a reason nobody gives": {"not_run": "later"},
    "fewer than none": {"messages": -1},
    "not a number": {"blocks": float("nan")},
    "a type with a line break": {"types": {"bf16\n": 1.0}},
    "neither yes nor no": {"untold": 1},
    "blocks that are no number": {"types": {"bfloat16": "8"}},
    "numbers of another type": {"results": (np.zeros(2),)},
    "something more": {"points": 25},
}


@pytest.mark.parametrize("name", FORGED)
def test_what_a_worker_says_is_looked_at_before_anybody_reads_it(name):
    assert taken_in(Examined().as_dict()) == Examined()
    with pytest.raises(ProtocolError):
        taken_in(Examined().as_dict() | FORGED[name])


def test_no_word_of_a_worker_stands_in_a_message():
    """Messages contain no text of a worker, because a hidden check shows its message, but not its example."""

    class Forger:
        def examine(self, *args, **keywords):
            return Examined(fault="the hidden input was")

    with pytest.raises(Failure) as raised:
        look(Forger(), case(np.random.default_rng(0), zigzag(16, 4)), {})
    assert "hidden" not in raised.value.message and "hidden" in raised.value.counterexample
