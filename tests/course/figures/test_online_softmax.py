"""The state that the picture of online softmax shows is the softmax of the scores seen so far."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab_course.figures.online_softmax import example, stream

pytestmark = pytest.mark.thorough


def softmax_mean(scores: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    lse = float(np.logaddexp.reduce(scores))
    return float(np.exp(scores - lse) @ values), lse


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=20), st.integers(1, 7))
def test_after_every_block_the_state_is_the_softmax_of_what_was_seen(
    numbers: list[float], block: int
) -> None:
    scores, values = np.array(numbers), np.arange(len(numbers), dtype=float)
    steps = stream(scores, values, block)
    assert len(steps) == math.ceil(len(scores) / block)
    for step in steps:
        seen = slice(0, (step.block + 1) * block)
        out, lse = softmax_mean(scores[seen], values[seen])
        assert step.maximum == scores[seen].max()
        assert step.lse == pytest.approx(lse, abs=1e-9)
        assert step.out == pytest.approx(out, abs=1e-9)


def test_old_shares_shrink_by_the_factor_and_only_by_it() -> None:
    scores, values = example()
    steps = stream(scores, values, 4)
    for before, after in itertools.pairwise(steps):
        assert after.factor == pytest.approx(math.exp(before.maximum - after.maximum))
        assert after.shares[:-1] == pytest.approx([share * after.factor for share in before.shares])


def test_blocks_without_a_visible_key_leave_an_empty_state() -> None:
    scores = np.array([-math.inf, -math.inf, 1.0, 2.0])
    first, second = stream(scores, np.array([5.0, 6.0, 7.0, 8.0]), 2)
    assert (first.total, first.out, first.lse) == (0.0, 0.0, -math.inf)
    assert second.out == pytest.approx(softmax_mean(scores[2:], np.array([7.0, 8.0]))[0])
