"""The tile plan equals the position mask: each visible (query, key) pair once, no other pair ever."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab import plan
from ringlab.layout import LAYOUTS as REGISTERED
from ringlab.layout import Layout, contiguous, dealt, striped, zigzag
from ringlab.plan import Tile
from tests.laws.draw import refute

Planner = Callable[[Layout, int, int, bool], tuple[Tile, ...]]

LAYOUTS = st.one_of(
    st.builds(
        lambda S, P, chunk, folded: dealt(S, P, chunk=chunk, folded=folded),
        st.integers(0, 120),
        st.integers(1, 9),
        st.integers(1, 40),
        st.booleans(),
    ),
    st.builds(
        lambda make, S, P: make(S, P),
        st.sampled_from([*REGISTERED.values()]),
        st.integers(0, 200),
        st.integers(1, 9),
    ),
)


def pairs_of_ranks(layout: Layout) -> itertools.product[tuple[int, ...]]:
    return itertools.product(range(layout.P), repeat=2)


def visible_pairs(layout: Layout, rank: int, origin: int, causal: bool) -> np.ndarray:
    queries, keys = layout.positions(rank)[:, None], layout.positions(origin)
    return queries >= keys if causal else np.ones((len(queries), len(keys)), bool)


def law_tiles_paint_the_mask(tiles: Planner, layout: Layout, causal: bool) -> None:
    for rank, origin in pairs_of_ranks(layout):
        painted = np.zeros((layout.length(rank), layout.length(origin)), int)
        for tile in tiles(layout, rank, origin, causal):
            part = painted[tile.rows, tile.keys]
            part += np.tri(*part.shape, dtype=int) if tile.causal else 1
        assert np.array_equal(painted, visible_pairs(layout, rank, origin, causal))


def law_tiles_are_rectangles_in_range(tiles: Planner, layout: Layout, causal: bool) -> None:
    for rank, origin in pairs_of_ranks(layout):
        for tile in tiles(layout, rank, origin, causal):
            assert 0 <= tile.q_start < tile.q_stop <= layout.length(rank)
            assert 0 <= tile.k_start < tile.k_stop <= layout.length(origin)
            assert not tile.causal or tile.k_stop - tile.k_start <= tile.q_stop - tile.q_start
            assert causal or not tile.causal


def law_scores_count_the_pairs(tiles: Planner, layout: Layout, causal: bool) -> None:
    for rank, origin in pairs_of_ranks(layout):
        scores = sum(tile.scores for tile in tiles(layout, rank, origin, causal))
        assert scores == visible_pairs(layout, rank, origin, causal).sum()


def law_a_rank_alone_needs_one_tile(tiles: Planner, layout: Layout, causal: bool) -> None:
    """Where positions ascend in local order, a rank meets its own keys in one causal launch."""
    for rank in range(layout.P):
        if layout.length(rank) and (np.diff(layout.positions(rank)) > 0).all():
            assert len(tiles(layout, rank, rank, causal)) == 1


@pytest.mark.parametrize("causal", [True, False])
@given(layout=LAYOUTS)
def test_tiles_paint_the_mask(causal: bool, layout: Layout) -> None:
    law_tiles_paint_the_mask(plan.tiles, layout, causal)
    law_tiles_are_rectangles_in_range(plan.tiles, layout, causal)
    law_scores_count_the_pairs(plan.tiles, layout, causal)
    law_a_rank_alone_needs_one_tile(plan.tiles, layout, causal)


@given(layout=LAYOUTS)
def test_work_adds_up_to_the_triangle(layout: Layout) -> None:
    total = sum(plan.work(layout, rank, origin) for rank, origin in pairs_of_ranks(layout))
    assert total == layout.S * (layout.S + 1) // 2


# Mutants of the plan.


def all_full(layout: Layout, rank: int, origin: int, causal: bool) -> tuple[Tile, ...]:
    return tuple(dataclasses.replace(tile, causal=False) for tile in plan.tiles(layout, rank, origin, causal))


def strictly_before(layout: Layout, rank: int, origin: int, causal: bool) -> tuple[Tile, ...]:
    """The diagonal is left out: a query does not see its own key."""
    return tuple(
        dataclasses.replace(tile, q_start=tile.q_start + 1, k_stop=tile.k_stop - 1) if tile.causal else tile
        for tile in plan.tiles(layout, rank, origin, causal)
    )


def in_local_indices(layout: Layout, rank: int, origin: int, causal: bool) -> tuple[Tile, ...]:
    """The mask is applied to local indices, the classical mistake outside the contiguous layout."""
    rows, keys = layout.length(rank), layout.length(origin)
    if not (rows and keys) or (causal and origin > rank):
        return ()
    return (
        Tile(0, rows, 0, min(rows, keys) if causal and rank == origin else keys, causal and rank == origin),
    )


def misses_the_last_tile(layout: Layout, rank: int, origin: int, causal: bool) -> tuple[Tile, ...]:
    tiles = plan.tiles(layout, rank, origin, causal)
    return tiles[:-1] if len(tiles) > 1 else tiles


def paints_one_twice(layout: Layout, rank: int, origin: int, causal: bool) -> tuple[Tile, ...]:
    tiles = plan.tiles(layout, rank, origin, causal)
    return tiles + tiles[-1:]


def swaps_rows_and_keys(layout: Layout, rank: int, origin: int, causal: bool) -> tuple[Tile, ...]:
    return plan.tiles(layout, origin, rank, causal)


def keeps_empty_tiles(layout: Layout, rank: int, origin: int, causal: bool) -> tuple[Tile, ...]:
    return (*plan.tiles(layout, rank, origin, causal), Tile(0, 0, 0, 0, False))


def more_keys_than_rows(layout: Layout, rank: int, origin: int, causal: bool) -> tuple[Tile, ...]:
    keys = layout.length(origin)
    return tuple(
        dataclasses.replace(tile, q_start=tile.q_stop - 1, k_stop=keys) if tile.causal else tile
        for tile in plan.tiles(layout, rank, origin, causal)
    )


def one_row_at_a_time(layout: Layout, rank: int, origin: int, causal: bool) -> tuple[Tile, ...]:
    """Right, but with as many launches as queries."""
    visible = visible_pairs(layout, rank, origin, causal)
    return tuple(
        Tile(i, i + 1, j, j + 1, False) for i, row in enumerate(visible) for j, seen in enumerate(row) if seen
    )


EXAMPLES: list[tuple[Any, ...]] = [
    (layout, causal)
    for S, P, causal in itertools.product((7, 16, 23), (1, 2, 4), (True, False))
    for layout in (
        contiguous(S, P),
        striped(S, P),
        zigzag(S, P),
        dealt(S, P, chunk=1, folded=True),
        dealt(S, P, chunk=3),
    )
]


@pytest.mark.parametrize(
    ("law", "mutant"),
    [
        (law_tiles_paint_the_mask, all_full),
        (law_tiles_paint_the_mask, strictly_before),
        (law_tiles_paint_the_mask, in_local_indices),
        (law_tiles_paint_the_mask, misses_the_last_tile),
        (law_tiles_paint_the_mask, paints_one_twice),
        (law_tiles_paint_the_mask, swaps_rows_and_keys),
        (law_tiles_are_rectangles_in_range, keeps_empty_tiles),
        (law_tiles_are_rectangles_in_range, more_keys_than_rows),
        (law_scores_count_the_pairs, all_full),
        (law_a_rank_alone_needs_one_tile, one_row_at_a_time),
    ],
)
def test_the_law_notices(law: Callable[..., None], mutant: Planner) -> None:
    refute(law, plan.tiles, mutant, EXAMPLES)
