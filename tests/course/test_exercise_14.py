"""Exercise 14: its truths against PyTorch on one process and against ringlab.nn, and what only a judge gets to see."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from ringlab import layout as layouts
from ringlab.nn.loss import next_tokens
from ringlab_course.checking.answers import relative_error
from ringlab_course.checking.loading import load_exercise
from ringlab_course.checking.reports import run_in_process
from ringlab_course.exercises.e14_training import loss as e14_loss
from ringlab_course.exercises.e14_training import shard as e14_shard
from ringlab_course.exercises.e14_training import step as e14_step
from ringlab_course.exercises.e14_training import sum as e14_sum
from ringlab_course.judge import grade
from tests.course.submissions_of import namespace, submission

RIGHT = namespace(submission("14/right_plain"))


def test_the_labels_are_those_of_the_package():
    tokens = torch.arange(12).view(2, 6)
    every = np.ones((2, 6), dtype=bool)
    assert (e14_shard.labels_of(tokens.numpy(), every, np.arange(6)) == next_tokens(tokens).numpy()).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 5), min_size=1, max_size=4), st.booleans())
def test_shares_add_up_to_the_mean_that_pytorch_has(seed, valid, narrow):
    rng = np.random.default_rng(seed)
    kept = [(max(n, 1), n) for n in valid] if sum(valid) else [(2, 1)]
    case = e14_loss.problem(rng, kept, narrow=narrow)
    logits = torch.cat([x.double() for x in case.logits], dim=1).flatten(0, 1)
    mean = F.cross_entropy(logits, torch.cat(case.labels, dim=1).flatten(), ignore_index=-100)
    assert sum(case.totals) / sum(case.counts) == pytest.approx(mean.item(), rel=1e-12)
    slopes = torch.cat([x.flatten(0, 1) for x in torch.autograd.grad(mean, case.logits)])
    own = np.concatenate([case.slope(rank)[0] for rank in range(len(kept))])
    assert relative_error(own, slopes.double()) < (2.0**-7 if narrow else 1e-6)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(2, 13), st.booleans())
def test_the_step_of_ranks_with_weights_of_their_own_is_that_of_one_process(seed, P, S, folded):
    """Summed over ranks, gradients do not depend on who owns what."""
    shared = e14_step.problem(np.random.default_rng(seed), layouts.dealt(S, P, chunk=1, folded=folded))
    alone = e14_step.Problem(shared.weights, shared.tokens, shared.counts, layouts.contiguous(S, 1), "")
    assert relative_error(e14_step.RIGHT(P - 1, shared), e14_step.RIGHT(0, alone)) < 1e-11


def test_the_update_is_the_gradient_by_finite_differences():
    case = e14_step.problem(np.random.default_rng(1), layouts.contiguous(5, 1))
    step = e14_step.RIGHT(0, case)
    for number, name in enumerate(e14_step.WEIGHTS, 1):
        moved = dict(case.weights)
        slopes = []
        for shift in (1e-5, -1e-5):
            moved[name] = case.weights[name].clone()
            moved[name][1, 2] += shift
            there = e14_step.Problem(moved, case.tokens, case.counts, case.layout, "")
            slopes.append(e14_step.RIGHT(0, there)[0])
        slope = (slopes[0] - slopes[1]) / 2e-5
        assert -e14_step.RATE * slope == pytest.approx(step[number][1, 2], rel=1e-5, abs=1e-9), name


@pytest.mark.parametrize("mistake", [m for m in e14_step.MISTAKES if m.imitate], ids=lambda m: m.name)
def test_every_imitation_of_a_step_differs_from_the_truth_and_from_every_other(mistake):
    case = e14_step.problem(np.random.default_rng(3), layouts.dealt(20, 4, chunk=2))
    answers = {other.name: other.imitate(1, case) for other in e14_step.MISTAKES if other.imitate}
    own = answers.pop(mistake.name)
    assert relative_error(own, e14_step.RIGHT(1, case)) > 100 * e14_step.BOUND
    for name, other in answers.items():
        assert relative_error(own, other) > 100 * e14_step.BOUND, name


def test_float32_steps_keep_well_within_the_bound():
    """What the plainest step in float32 is off by, beside what is allowed."""
    case = e14_step.problem(np.random.default_rng(0), layouts.zigzag(24, 4), rows=3, narrow=True)
    from ringlab import VirtualCluster

    arguments = case.weights, case.tokens, case.counts, case.owned, e14_step.RATE
    results = VirtualCluster(4).run(RIGHT["training_step"], *arguments).results
    worst = max(relative_error(e14_step._read(x, case), e14_step.RIGHT(0, case)) for x in results)
    assert worst < e14_step.BOUND / 2


NONSENSE = {
    "nothing": None,
    "text": "x",
    "a number": 3,
    "a triple": (None, None, None),
    "a pair": (1.0, {}),
    "a loss and a list": (torch.zeros(()), [1]),
    "texts": ("a", "b", "c", "d"),
    "other shapes": [torch.zeros(n) for n in range(4)],
    "not a number": (float("nan"), {name: torch.zeros(8, 8) for name in e14_step.WEIGHTS}),
}


@pytest.mark.parametrize("stage", load_exercise("14").stages, ids=lambda stage: stage.id)
def test_whatever_comes_back_a_check_can_read_it(stage):
    for name, value in NONSENSE.items():
        report = run_in_process(
            stage, {stage.function: lambda *args, value=value, **kwargs: value}, tier="all"
        )
        assert report.earned == 0 and not any(check.broken for check in report.checks), (name, report)


def test_a_loss_as_a_number_and_gradients_around_a_ring_are_fair():
    """Twice the exchanges of all_reduce, and still one reduction."""
    space = namespace(submission("14/right_by_hand"))
    report = run_in_process(load_exercise("14").stage("14.sum"), space, tier="all", seed=1)
    assert report.ok and len(e14_sum.SHAPES) > 2


def written(folder, code, stage):
    cell = {"cell_type": "code", "id": "x", "metadata": {"grade": stage}, "source": code, "outputs": []}
    path = folder / "14_training.ipynb"
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]}))
    return path


@pytest.mark.needs_bwrap
@pytest.mark.parametrize(
    "name",
    [
        "loss_nan_without_labels",
        "loss_without_a_gradient",
        "sum_leaves_out_none",
        "step_computes_everything",
    ],
)
def test_the_judge_finds_in_the_sandbox_what_the_notebook_finds(tmp_path, name):
    wrong = submission(f"14/wrong_{name}")
    expected = wrong.expected
    report = grade(written(tmp_path, wrong.source, expected.stage), "14", seed=1)
    stage = next(stage for stage in report.stages if stage.stage == expected.stage)
    check = next(check for check in stage.checks if check.id == expected.check)
    assert not check.ok and check.misconception == expected.misconception, check


@pytest.mark.needs_bwrap
def test_the_judge_gives_a_right_answer_all_points(tmp_path):
    report = grade(written(tmp_path, submission("14/right_by_hand").source, "14.shard"), "14", seed=2)
    assert report.ok and report.earned == report.points == 25, [
        c for s in report.stages for c in s.checks if not c.ok
    ]
