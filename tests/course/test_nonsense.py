"""Nonsense returned by a learner's function earns no points and breaks no check."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ringlab_course.checking import reports
from ringlab_course.checking.explain import explained
from ringlab_course.checking.loading import exercise_ids, load_exercise
from ringlab_course.checking.reports import run_in_process
from tests.course.submissions_of import cases

pytestmark = pytest.mark.thorough

# Infinity alone is not nonsense, because for some inputs of exercise 10 an error is infinite.
NONSENSE = {
    "nothing": None,
    "text": "x",
    "a number": 3,
    "not a number": float("nan"),
    "an array without axes": np.array(3),
    "one axis": np.zeros(3),
    "a tensor": torch.zeros(2),
    "objects": np.array([[None, 1], [2, 3]], object),
    "a set": {1, 2},
    "ragged lists": [[1, 2], [3]],
    "a dictionary": {0: np.zeros(1, np.int64)},
    "a pair of nothing": (None, None),
    "a pair of tensors": (torch.zeros(1), torch.zeros(1)),
    "a pair of numbers": (float("inf"), 1),
    "a loss and a dictionary": (float("nan"), {"wq": torch.zeros(8, 8)}),
    "three numbers": (1, 2, 3),
    "a tile of text": [(0, "a", 0, 1, True)],
    "infinitely many": [(0, float("inf"), 0, 1, True)],
    "an array in a tile": [(0, 1, 0, 1, np.zeros(2))],
    "names that nobody knows": (["else"], 1),
}


@pytest.mark.parametrize("exercise_id", cases(exercise_ids()))
def test_a_check_can_read_whatever_comes_back(exercise_id, monkeypatch):
    """Every check of values reads all nonsense, and every check of cost a fifth of it.

    For each nonsense only one check of values, each time another one, also looks for the mistake behind it. That
    takes much longer than reading, because all wrong answers to the stage run on the check's inputs.
    """
    looked_for = []

    def explained_once(failure, stage, check_id, calls):
        return explained(failure, stage, check_id, calls) if check_id in looked_for else failure

    monkeypatch.setattr(reports, "explained", explained_once)
    exercise = load_exercise(exercise_id)
    for stage in exercise.stages:
        of_values = [check.id for check in stage.checks if check.kind == "correctness"]
        for number, (name, value) in enumerate(NONSENSE.items()):
            looked_for[:] = [of_values[number % len(of_values)]]
            space = {stage.function: lambda *args, value=value, **kwargs: value}
            reading = tuple(
                check
                for place, check in enumerate(stage.checks)
                if check.kind == "correctness" or (place + number) % 5 == 0
            )
            report = run_in_process(replace(stage, helpers=(), checks=reading), space, tier="all")
            broken = [check.id for check in report.checks if check.broken]
            assert (report.earned, broken) == (0, []), (stage.id, name)


MESH = {
    "one array": lambda q: q,
    "three arrays": lambda q: (q, q, q),
    "numbers": lambda q: (0.0, 1.0),
    "the wrong way round": lambda q: (q[..., 0], q),
    "whole numbers": lambda q: (q.astype(int), q[..., 0].astype(int)),
    "not a number": lambda q: (q * np.nan, q[..., 0] * np.nan),
}


@pytest.mark.needs_jax
@pytest.mark.parametrize("name", MESH)
def test_a_check_of_jax_can_read_what_is_made_of_its_inputs(name):
    for stage in load_exercise("17").stages:
        space = {stage.function: lambda q, *args, **kwargs: MESH[name](q)}
        report = run_in_process(stage, space, tier="all")
        assert report.earned == 0 and not any(check.broken for check in report.checks), (stage.id, report)
