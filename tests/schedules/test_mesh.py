"""Rows of ranks have each of their ranks' tokens once, at the place that the row's layout gives.

If a block backend computes whole steps, every schedule gives it as many K/V blocks as announced, even if a
mask skips some blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringlab.layout import Layout, Run, contiguous, zigzag
from ringlab.mask import Mask
from ringlab.plan import tiles
from ringlab.schedules import available
from ringlab.schedules.all_to_all import heads_of
from ringlab.schedules.mesh import rows_of_ranks
from tests.laws.draw import MAKERS
from tests.schedules.problems import Problem, assert_equals_the_oracle, solve


def law_rows_hold_their_ranks_tokens(layout: Layout, ulysses: int) -> None:
    rows = rows_of_ranks.__wrapped__(layout, ulysses)
    assert rows.layout.P == layout.P // ulysses
    for rank in range(layout.P):
        row = rank // ulysses
        of_row, own = rows.layout.positions(row), layout.positions(rank)
        seen = np.zeros(len(own), int)
        for stretch in rows.spans[rank]:
            assert (of_row[stretch.in_row] == own[stretch.in_rank]).all()
            seen[stretch.in_rank] += 1
        assert (seen == 1).all()
    assert sum(rows.layout.lengths) == layout.S  # the layout itself refuses tokens with two owners


@given(st.sampled_from(MAKERS), st.integers(0, 40), st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 2), (2, 3)]))
def test_rows_hold_their_ranks_tokens(make: object, S: int, degrees: tuple[int, int]) -> None:
    ring, ulysses = degrees
    law_rows_hold_their_ranks_tokens(make(S, ring * ulysses), ulysses)  # type: ignore[operator]


def test_runs_in_another_order_are_laid_where_they_belong() -> None:
    """Runs in any stored order are placed rightly; ringlab's own layouts have their runs in order."""
    layout = Layout(8, 2, "any", ((Run(6, 1, 2), Run(0, 1, 2)), (Run(2, 1, 4),)))
    for ulysses in (1, 2):
        law_rows_hold_their_ranks_tokens(layout, ulysses)


@pytest.mark.parametrize("make", [contiguous, zigzag])
def test_a_row_has_as_few_tiles_as_a_rank(make: Callable[[int, int], Layout]) -> None:
    layout, alone = make(64, 8), make(64, 4)
    rows = rows_of_ranks(layout, 2).layout
    for row in range(4):
        assert (rows.positions(row) == alone.positions(row)).all()
        assert len(tiles(rows, row, 0)) <= len(tiles(alone, row, 0))
    assert [tile.causal for tile in tiles(rows_of_ranks(layout, 8).layout, 0, 0)] == [True]


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 4))
def test_a_rank_has_the_key_value_head_of_each_of_its_query_heads(K: int, ranks: int, group: int) -> None:
    H = K * group
    if H % ranks or (K % ranks and ranks % K):
        return
    held = []
    for member in range(ranks):
        queries, keys = heads_of(H, member, ranks), heads_of(K, member, ranks)
        here = queries.stop - queries.start
        inside = here // (keys.stop - keys.start)  # query heads per key/value head, on this rank
        for number, head in enumerate(range(queries.start, queries.stop)):
            assert keys.start + number // inside == head // group
        held += range(queries.start, queries.stop)
    assert held == list(range(H))


FEW = Problem(contiguous(24, 4), 4, 2, Mask(documents=(12, 9, 3)), D=16, dtype=torch.float32)


@pytest.mark.needs_triton
@pytest.mark.parametrize("schedule", available())
def test_documents_that_save_hops(schedule: str) -> None:
    assert_equals_the_oracle(solve(FEW, schedule, block="triton"), FEW)
