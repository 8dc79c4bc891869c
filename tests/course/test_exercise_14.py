"""Exercise 14: its expected values agree with PyTorch on one process and with ringlab.nn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from ringlab import layout as layouts
from ringlab.nn.loss import next_tokens
from ringlab_course.checking.answers import relative_error
from ringlab_course.exercises.e14_training import loss as e14_loss
from ringlab_course.exercises.e14_training import shard as e14_shard
from ringlab_course.exercises.e14_training import step as e14_step

pytestmark = pytest.mark.thorough


def test_the_labels_are_those_of_the_package():
    tokens = torch.arange(12).view(2, 6)
    every = np.ones((2, 6), dtype=bool)
    assert (e14_shard.truth(tokens, every, np.arange(6))[1] == next_tokens(tokens).numpy()).all()


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


def test_the_update_is_the_gradient_by_finite_differences():
    case = e14_step.problem(np.random.default_rng(1), layouts.contiguous(5, 1))
    step = e14_step.truth(case)
    for number, name in enumerate(e14_step.WEIGHTS, 1):
        moved = dict(case.weights)
        slopes = []
        for shift in (1e-5, -1e-5):
            moved[name] = case.weights[name].clone()
            moved[name][1, 2] += shift
            there = e14_step.Problem(moved, case.tokens, case.counts, case.layout, "")
            slopes.append(e14_step.truth(there)[0])
        slope = (slopes[0] - slopes[1]) / 2e-5
        assert -e14_step.RATE * slope == pytest.approx(step[number][1, 2], rel=1e-5, abs=1e-9), name
