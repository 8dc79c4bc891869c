"""Exercise 12: its tables and its emulated step give the attention of the whole sequence under its mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ringlab import layout as layouts
from ringlab import oracle
from ringlab_course.checking.answers import relative_error
from ringlab_course.exercises.e12_triton_ring_step import steps
from ringlab_course.exercises.e12_triton_ring_step.cases import widened

pytestmark = pytest.mark.thorough

ROUNDED = 1e-6
"""The allowed error: `widened` rounds each key to float32, which changes a score of at most 10 by 6e-8 of it."""
LAYOUTS = {
    "contiguous": layouts.contiguous(77, 2),
    "striped": layouts.striped(75, 2),
    "zigzag": layouts.zigzag(83, 3),
    "fold": layouts.dealt(125, 2, chunk=1, folded=True, name="fold"),
}


@pytest.mark.parametrize("window", [None, 1, 17, 60])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_steps_by_the_tables_are_attention_under_the_mask_of_positions(name, window) -> None:
    layout, rng = LAYOUTS[name], np.random.default_rng(0)
    for rank in range(layout.P):
        chain = steps._of_layout(rng, layout, rank, 2, 1, window=window)
        origins = [(rank - step) % layout.P for step in range(layout.P)]
        queries, keys = layout.positions(rank), np.concatenate([layout.positions(o) for o in origins])
        seen = keys <= queries[:, None]
        if window:
            seen &= keys > queries[:, None] - window
        k, v = (
            torch.cat([widened(*step[at : at + 2]).nan_to_num() for step in chain.steps], 2) for at in (0, 2)
        )
        right = oracle.attention(chain.q, k, v, mask=seen)
        assert relative_error(chain.answer(), (right.out, right.lse)) < ROUNDED


def test_a_chain_that_goes_on_from_a_result_is_attention_over_all_keys() -> None:
    chain = steps._resuming(np.random.default_rng(0), 20, 5, (7, 18))
    whole = steps._chain(np.random.default_rng(0), 20, (5, 7, 18))
    assert relative_error(chain.answer(), whole.answer()) < ROUNDED
