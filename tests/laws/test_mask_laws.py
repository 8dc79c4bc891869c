"""Tiles under any mask equal the mask's definition, and blocks make as few hops as that definition allows.

Dropout draws Philox's number of each pair, on whichever rank the pair is computed. Soft caps have the right
slope.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringlab import plan
from ringlab.errors import MaskError
from ringlab.layout import Layout, contiguous, dealt, per_document, striped, zigzag
from ringlab.mask import Mask
from ringlab.scores import ScoreRules, philox
from ringlab.tile import Tile, band
from tests import philox as twin
from tests.laws.draw import refute

Planner = Callable[[Layout, int, int, Mask, int | None], tuple[Tile, ...]]


LENGTHS, RANKS = st.integers(0, 48), st.integers(1, 6)


@st.composite
def problems(
    draw: st.DrawFn,
    lengths: st.SearchStrategy[int] = LENGTHS,
    ranks: st.SearchStrategy[int] = RANKS,
) -> tuple[Layout, Mask]:
    """Draw a layout and a mask that fits its length. The mask has one rule or combines several."""
    S, P = draw(lengths), draw(ranks)
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
    """No tile has a row without keys, and every causal tile is square and at most the largest size."""
    for rank in range(layout.P):
        for origin in range(layout.P):
            for tile in tiles(layout, rank, origin, mask, largest):
                rows, keys = tile.q_stop - tile.q_start, tile.k_stop - tile.k_start
                assert rows > 0 and keys > 0
                assert not tile.causal or (rows == keys and (largest is None or rows <= largest))


def law_work_counts_the_pairs(tiles: Planner, layout: Layout, mask: Mask, largest: int | None) -> None:
    """The work is the number of visible pairs; a rank's own block in ascending order is one causal tile."""
    for rank in range(layout.P):
        for origin in range(layout.P):
            found = tiles(layout, rank, origin, mask, largest)
            visible = mask.visible(layout.positions(rank), layout.positions(origin))
            assert (
                sum(tile.scores for tile in found) == visible.sum() == plan.work(layout, rank, origin, mask)
            )
            if rank == origin and visible.any() and mask.plain and largest is None:
                assert len(found) == 1


def law_blocks_go_where_they_are_seen(
    offsets: Callable[[Layout, Mask], tuple[int, ...]], layout: Layout, mask: Mask
) -> None:
    P = layout.P
    seen = {
        (rank - origin) % P
        for rank in range(P)
        for origin in range(P)
        if mask.visible(layout.positions(rank), layout.positions(origin)).any()
    }
    assert offsets(layout, mask) == tuple(range(P) if mask.plain else sorted(seen | {0}))


def offsets(layout: Layout, mask: Mask) -> tuple[int, ...]:
    return plan.plan(layout, mask).offsets


@given(problem=problems(), largest=st.sampled_from([None, 1, 2, 5]))
def test_tiles_paint_the_mask(problem: tuple[Layout, Mask], largest: int | None) -> None:
    law_tiles_paint_the_mask(plan.tiles, *problem, largest)
    law_tiles_hold_no_blind_row(plan.tiles, *problem, largest)
    law_work_counts_the_pairs(plan.tiles, *problem, largest)
    law_blocks_go_where_they_are_seen(offsets, *problem)


@given(n=st.integers(0, 20), m=st.integers(1, 20), lo=st.integers(-30, 30), hi=st.integers(-30, 30))
def test_a_band_is_cut_into_few_tiles(n: int, m: int, lo: int, hi: int) -> None:
    """A band has at most six tiles for each stretch of rows as long as the band is wide, the last one included."""
    tiles = band(n, m, lo, hi)
    i, j = np.arange(n)[:, None], np.arange(m)
    assert np.array_equal(painted(tuple(tiles), n, m), (j >= i + lo) & (j <= i + hi))
    assert len(tiles) <= 6 * -(-n // max(1, hi - lo + 1))


# Mutants.


def the_window_in_local_indices(
    layout: Layout, rank: int, origin: int, mask: Mask, largest: int | None
) -> tuple[Tile, ...]:
    """A mutant that lays a window over each block's own indices, as some published code does."""
    rows, keys = layout.length(rank), layout.length(origin)
    if mask.window is None or not mask.causal:
        return plan.tiles(layout, rank, origin, mask, largest)
    return tuple(band(rows, keys, 1 - mask.window, 0 if rank == origin else keys))


def one_triangle(layout: Layout, rank: int, origin: int, mask: Mask, largest: int | None) -> tuple[Tile, ...]:
    """A mutant that does not cut triangles to the size that the backend accepts."""
    return plan.tiles(layout, rank, origin, mask, None)


def one_hop_less(layout: Layout, mask: Mask) -> tuple[int, ...]:
    return offsets(layout, mask)[:-1] or (0,)


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
        (law_tiles_hold_no_blind_row, plan.tiles, one_triangle, CUT),
        (law_blocks_go_where_they_are_seen, offsets, one_hop_less, PROBLEMS),
    ],
)
def test_the_law_notices(
    law: Callable[..., None], real: Any, mutant: Any, examples: list[tuple[Any, ...]]
) -> None:
    refute(law, real, mutant, examples)


SEEDS = st.integers(0, 2**64 - 1)
WORDS = st.integers(0, 2**32 - 1)
# Known answers from the authors' Random123 library.
PI = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
ONES = ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2)
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (*ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (*PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: Any, key: Any, answer: Any) -> None:
    assert twin.words(counter, key) == answer
    found = philox(*(torch.tensor([word]) for word in counter), key[0] | key[1] << 32)
    assert tuple(int(word) for word in found) == answer
    assert tuple(twin.words_of_all(np.array(counter), key[0] | key[1] << 32).tolist()) == answer


@given(counter=st.tuples(WORDS, WORDS, WORDS, WORDS), seed=SEEDS)
def test_both_are_one_function(counter: tuple[int, int, int, int], seed: int) -> None:
    words = twin.words(counter, (seed % 2**32, seed >> 32))
    assert tuple(int(word) for word in philox(*(torch.tensor([c]) for c in counter), seed)) == words
    assert tuple(twin.words_of_all(np.array(counter), seed).tolist()) == words


@given(
    rate=st.sampled_from([0.1, 0.5, 0.9]),
    seed=SEEDS,
    rows=st.lists(st.integers(0, 19), max_size=6),
    keys=st.lists(st.integers(0, 19), max_size=6),
    heads=st.tuples(st.integers(0, 9), st.integers(1, 9)),
)
def test_a_tile_draws_its_part_of_the_whole(
    rate: float, seed: int, rows: list[int], keys: list[int], heads: tuple[int, int]
) -> None:
    """A tile draws its part of the whole's numbers, for any rows, keys and heads, and for parts of tiles."""
    first, count = heads
    scores = ScoreRules(dropout=rate, seed=seed, first_head=first)
    tile = scores.of_tile(np.array(rows, np.int64), np.array(keys, np.int64))
    whole = twin.factors(2, first + count, 20, rate, seed)[:, first:]
    found = tile.dropout_factors(2, count, torch.zeros(1, dtype=torch.float64))
    assert found is not None
    assert np.array_equal(found.numpy(), whole[:, :, rows][..., keys])
    part = tile.part(slice(1, 4), slice(0, 3)).dropout_factors(2, count, torch.zeros(1, dtype=torch.float64))
    assert part is not None and torch.equal(part, found[:, :, 1:4, 0:3])


def test_so_many_are_dropped_and_each_draw_is_its_own() -> None:
    """The dropped share is 0.1 within four standard deviations, and other heads or seeds draw differently."""
    drawn = twin.factors(2, 5, 144, 0.1, 7) == 0
    assert abs(drawn.mean() - 0.1) < 4 * np.sqrt(0.09 / drawn.size)
    for axis in range(4):
        one, other = np.take(drawn, 0, axis), np.take(drawn, 1, axis)
        assert abs((one & other).mean() - 0.01) < 4 * np.sqrt(0.01 / one.size)
    assert (drawn != (twin.factors(2, 5, 144, 0.1, 8) == 0)).mean() > 0.1
    assert (drawn != drawn.swapaxes(2, 3)).mean() > 0.1


@given(cap=st.floats(0.1, 100), score=st.floats(-1e4, 1e4))
def test_a_cap_and_its_slope(cap: float, score: float) -> None:
    tile = ScoreRules(softcap=cap).of_tile(np.zeros(1, np.int64), np.zeros(1, np.int64))
    x = torch.tensor([[score]], dtype=torch.float64, requires_grad=True)
    capped = tile.capped(x)
    [slope] = torch.autograd.grad(capped.sum(), x)
    assert abs(capped.item()) <= cap
    assert torch.allclose(torch.as_tensor(tile.cap_slope(capped.detach())), slope, rtol=1e-12, atol=1e-15)


def test_none_are_none() -> None:
    tile = ScoreRules().of_tile(np.zeros(1, np.int64), np.zeros(1, np.int64))
    x = torch.ones(1, 1)
    assert tile.capped(x) is x and tile.cap_slope(x) is None and tile.dropout_factors(1, 1, x) is None
    assert ScoreRules().requirements == frozenset()
    assert ScoreRules(softcap=1.0, dropout=0.5).requirements == {"softcap", "dropout"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"softcap": 0.0}, {"softcap": -1.0}, {"softcap": float("inf")}, {"softcap": float("nan")},
        {"softcap": "30"}, {"dropout": 1.0}, {"dropout": -0.1}, {"dropout": float("nan")}, {"dropout": "0.1"},
        {"seed": -1}, {"seed": 2**64}, {"seed": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(MaskError) as caught:
        dataclasses.replace(ScoreRules(), **wrong)
    assert next(iter(wrong)) in caught.value.needed
