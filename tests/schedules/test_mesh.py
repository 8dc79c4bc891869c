"""Rows of ranks: every token of theirs once, where the row's layout says that it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.layout import Layout, Run, contiguous, striped, zigzag
from ringlab.plan import tiles
from ringlab.schedules import mesh
from ringlab.schedules.all_to_all import heads_of
from ringlab.schedules.mesh import rows_of_ranks
from tests.laws.draw import MAKERS


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
    assert sum(rows.layout.lengths) == layout.S  # the layout itself refuses tokens owned twice


@given(st.sampled_from(MAKERS), st.integers(0, 40), st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 2), (2, 3)]))
def test_rows_hold_their_ranks_tokens(make: object, S: int, degrees: tuple[int, int]) -> None:
    ring, ulysses = degrees
    law_rows_hold_their_ranks_tokens(make(S, ring * ulysses), ulysses)  # type: ignore[operator]


def test_the_law_notices_stretches_that_lie_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "_end_to_end", lambda runs: [slice(0, run.length) for run in runs])
    with pytest.raises(AssertionError):
        law_rows_hold_their_ranks_tokens(zigzag(16, 4), 2)


def test_runs_in_another_order_are_laid_where_they_belong() -> None:
    """A rank may store its runs as it likes; no layout that ringlab makes has them out of order."""
    layout = Layout(8, 2, "any", ((Run(6, 1, 2), Run(0, 1, 2)), (Run(2, 1, 4),)))
    for ulysses in (1, 2):
        law_rows_hold_their_ranks_tokens(layout, ulysses)


@pytest.mark.parametrize("make", [contiguous, zigzag])
def test_rows_of_a_layout_are_that_layout(make: object) -> None:
    """So the tiles of a row are as few as those of a rank."""
    layout = make(64, 8)  # type: ignore[operator]
    for ulysses in (2, 4):
        rows, alone = rows_of_ranks(layout, ulysses).layout, make(64, 8 // ulysses)  # type: ignore[operator]
        for row in range(8 // ulysses):
            assert (rows.positions(row) == alone.positions(row)).all()
            assert len(tiles(rows, row, 0)) <= len(tiles(alone, row, 0))


def test_one_row_is_the_sequence_itself() -> None:
    """Whatever the ranks hold, one causal tile."""
    for layout in (contiguous(50, 4), striped(50, 4), zigzag(50, 4)):
        rows = rows_of_ranks(layout, 4).layout
        assert rows.ranks == ((Run(0, 1, 50),),)
        assert [tile.causal for tile in tiles(rows, 0, 0)] == [True]


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
