"""Tiles under any mask equal the mask's own definition, and blocks make as few hops as that definition allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab import plan
from ringlab.layout import Layout, contiguous, dealt, per_document, striped, zigzag
from ringlab.mask import Mask
from ringlab.tile import Tile, band
from tests.laws.refute import refute

Planner = Callable[[Layout, int, int, Mask, int | None], tuple[Tile, ...]]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Layout, Mask]:
    """A layout and a mask of its length, of every kind and of several at once."""
    S, P = draw(st.integers(0, 48)), draw(st.integers(1, 6))
    cuts = sorted(draw(st.lists(st.integers(0, S), max_size=5)))
    documents = tuple(b - a for a, b in pairwise([0, *cuts, S])) if cuts else ()
    if documents and draw(st.booleans()):
        layout = per_document(documents, P)
    else:
        layout = dealt(S, P, chunk=draw(st.integers(1, 12)), folded=draw(st.booleans()))
    causal = draw(st.booleans())
    one = st.integers(0, 9)
    each = st.tuples(*[one] * max(1, len(documents)))
    prefix = draw(st.one_of(st.just(0), one, each)) if causal else 0
    return layout, Mask(causal, draw(st.one_of(st.none(), st.integers(1, 50))), prefix, documents)


def painted(tiles: tuple[Tile, ...], rows: int, keys: int) -> np.ndarray:
    found = np.zeros((rows, keys), int)
    for tile in tiles:
        part = found[tile.rows, tile.keys]
        triangle = np.tri(*part.shape, dtype=int)
        part += (triangle.T if tile.mirrored else triangle) if tile.causal else 1
    return found


def law_tiles_paint_the_mask(tiles: Planner, layout: Layout, mask: Mask, largest: int | None) -> None:
    for rank in range(layout.P):
        for origin in range(layout.P):
            found = painted(
                tiles(layout, rank, origin, mask, largest), layout.length(rank), layout.length(origin)
            )
            assert np.array_equal(found, mask.visible(layout.positions(rank), layout.positions(origin)))


def law_tiles_hold_no_blind_row(tiles: Planner, layout: Layout, mask: Mask, largest: int | None) -> None:
    """A backend is never asked for a row without keys, nor for a triangle that is not square or is too large."""
    for rank in range(layout.P):
        for origin in range(layout.P):
            for tile in tiles(layout, rank, origin, mask, largest):
                rows, keys = tile.q_stop - tile.q_start, tile.k_stop - tile.k_start
                assert rows > 0 and keys > 0
                assert not tile.causal or (rows == keys and (largest is None or rows <= largest))


def law_blocks_go_where_they_are_seen(
    distances: Callable[[Layout, Mask], tuple[int, ...]], layout: Layout, mask: Mask
) -> None:
    P = layout.P
    seen = {
        (rank - origin) % P
        for rank in range(P)
        for origin in range(P)
        if mask.visible(layout.positions(rank), layout.positions(origin)).any()
    }
    assert distances(layout, mask) == tuple(range(P) if mask.plain else sorted(seen | {0}))


def distances(layout: Layout, mask: Mask) -> tuple[int, ...]:
    return plan.plan(layout, mask).distances


@given(problem=problems(), largest=st.sampled_from([None, 1, 2, 5]))
def test_tiles_paint_the_mask(problem: tuple[Layout, Mask], largest: int | None) -> None:
    law_tiles_paint_the_mask(plan.tiles, *problem, largest)
    law_tiles_hold_no_blind_row(plan.tiles, *problem, largest)
    law_blocks_go_where_they_are_seen(distances, *problem)


@given(n=st.integers(0, 20), m=st.integers(1, 20), lo=st.integers(-30, 30), hi=st.integers(-30, 30))
def test_a_band_is_cut_into_few_tiles(n: int, m: int, lo: int, hi: int) -> None:
    """No more than four for each stretch of rows as long as the band is wide, and two for what sticks out."""
    tiles = band(n, m, lo, hi)
    i, j = np.arange(n)[:, None], np.arange(m)
    assert np.array_equal(painted(tuple(tiles), n, m), (j >= i + lo) & (j <= i + hi))
    assert len(tiles) <= 6 * -(-n // max(1, hi - lo + 1))


# Mutants.


def the_window_in_local_indices(
    layout: Layout, rank: int, origin: int, mask: Mask, largest: int | None
) -> tuple[Tile, ...]:
    """A window laid over each block's own indices, a mistake found in published code."""
    rows, keys = layout.length(rank), layout.length(origin)
    if mask.window is None or not mask.causal:
        return plan.tiles(layout, rank, origin, mask, largest)
    return tuple(band(rows, keys, 1 - mask.window, 0 if rank == origin else keys))


def without_the_documents(
    layout: Layout, rank: int, origin: int, mask: Mask, largest: int | None
) -> tuple[Tile, ...]:
    return plan.tiles(layout, rank, origin, dataclasses.replace(mask, documents=(), prefix=0), largest)


def without_the_prefix(
    layout: Layout, rank: int, origin: int, mask: Mask, largest: int | None
) -> tuple[Tile, ...]:
    return plan.tiles(layout, rank, origin, dataclasses.replace(mask, prefix=0), largest)


def one_key_more(layout: Layout, rank: int, origin: int, mask: Mask, largest: int | None) -> tuple[Tile, ...]:
    """i − j ≤ w instead of i − j < w."""
    wider = None if mask.window is None else mask.window + 1
    return plan.tiles(layout, rank, origin, dataclasses.replace(mask, window=wider), largest)


def not_mirrored(layout: Layout, rank: int, origin: int, mask: Mask, largest: int | None) -> tuple[Tile, ...]:
    """The left edge of the window drawn as a causal triangle."""
    found = plan.tiles(layout, rank, origin, mask, largest)
    return tuple(dataclasses.replace(tile, mirrored=False) for tile in found)


def one_triangle(layout: Layout, rank: int, origin: int, mask: Mask, largest: int | None) -> tuple[Tile, ...]:
    """Triangles are not cut to the size that the backend asks for."""
    return plan.tiles(layout, rank, origin, mask, None)


def one_hop_less(layout: Layout, mask: Mask) -> tuple[int, ...]:
    return distances(layout, mask)[:-1] or (0,)


def to_all_between(layout: Layout, mask: Mask) -> tuple[int, ...]:
    """Ranks that see nothing of a block are not passed over."""
    return tuple(range(distances(layout, mask)[-1] + 1))


def always_around(layout: Layout, mask: Mask) -> tuple[int, ...]:
    return tuple(range(layout.P))


MASKS = (
    Mask(window=3),
    Mask(False, window=4),
    Mask(window=5, documents=(7, 9)),
    Mask(prefix=3),
    Mask(documents=(4, 12), prefix=(2, 5)),
)
PROBLEMS: list[tuple[Any, ...]] = [
    (layout, mask)
    for mask in MASKS
    for layout in (contiguous(16, 4), zigzag(16, 4), striped(16, 2), contiguous(16, 2))
]
CUT: list[tuple[Any, ...]] = [(*problem, 2) for problem in PROBLEMS]


@pytest.mark.parametrize(
    ("law", "real", "mutant", "examples"),
    [
        (law_tiles_paint_the_mask, plan.tiles, the_window_in_local_indices, CUT),
        (law_tiles_paint_the_mask, plan.tiles, without_the_documents, CUT),
        (law_tiles_paint_the_mask, plan.tiles, without_the_prefix, CUT),
        (law_tiles_paint_the_mask, plan.tiles, one_key_more, CUT),
        (law_tiles_paint_the_mask, plan.tiles, not_mirrored, CUT),
        (law_tiles_hold_no_blind_row, plan.tiles, one_triangle, CUT),
        (law_blocks_go_where_they_are_seen, distances, one_hop_less, PROBLEMS),
        (law_blocks_go_where_they_are_seen, distances, to_all_between, PROBLEMS),
        (law_blocks_go_where_they_are_seen, distances, always_around, PROBLEMS),
    ],
)
def test_the_law_notices(
    law: Callable[..., None], real: Any, mutant: Any, examples: list[tuple[Any, ...]]
) -> None:
    refute(law, real, mutant, examples)
