"""Work by layout equals the count of a mask over global positions; FLOPs are counted product by product."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.cost.flops import (
    attention_flops,
    imbalance,
    layout_work,
)
from ringlab.cost.sizes import Attention
from ringlab.errors import CostError
from ringlab.layout import Layout, contiguous, dealt, striped, zigzag
from ringlab.plan import work as planned_work

layouts = st.one_of(
    st.builds(contiguous, st.integers(0, 60), st.integers(1, 7)),
    st.builds(striped, st.integers(0, 60), st.integers(1, 7)),
    st.builds(zigzag, st.integers(0, 60), st.integers(1, 7)),
    st.builds(dealt, st.integers(0, 60), st.integers(1, 7), chunk=st.integers(1, 9), folded=st.booleans()),
)
tiles = st.none() | st.tuples(st.integers(1, 9), st.integers(1, 9))


def brute(
    layout: Layout, tile: tuple[int, int] | None, causal: bool = True, ascending: bool = False
) -> np.ndarray:
    """Return the work of each rank and step, counted over all pairs of positions, tile by tile."""
    rows, keys = tile or (1, 1)
    work = np.zeros((layout.P, layout.P), dtype=np.int64)
    for rank in range(layout.P):
        for step in range(layout.P):
            q, k = layout.positions(rank), layout.positions((rank - step) % layout.P)
            q, k = (np.sort(q), np.sort(k)) if ascending else (q, k)
            mask = (q[:, None] >= k[None, :]) | (not causal)
            for i in range(0, len(q), rows):
                for j in range(0, len(k), keys):
                    part = mask[i : i + rows, j : j + keys]
                    work[rank, step] += part.size * part.any()
    return work


@given(layout=layouts, tile=tiles, causal=st.booleans(), ascending=st.booleans())
def test_work_is_what_the_position_mask_says(
    layout: Layout, tile: tuple[int, int] | None, causal: bool, ascending: bool
) -> None:
    got = layout_work(layout, causal, tile, ascending=ascending)
    assert got.dtype == np.int64 and got.shape == (layout.P, layout.P)
    assert (got == brute(layout, tile, causal, ascending)).all()


@given(layout=layouts)
def test_without_tiles_it_is_the_plans_work_and_every_visible_pair_once(layout: Layout) -> None:
    work = layout_work(layout)
    assert work.sum() == layout.S * (layout.S + 1) // 2
    for rank in range(layout.P):
        for step in range(layout.P):
            assert work[rank, step] == planned_work(layout, rank, (rank - step) % layout.P)


FOLD = {"chunk": 1, "folded": True}


@pytest.mark.parametrize(
    ("layout", "ascending", "published"),
    [
        (contiguous(32768, 8), False, 1.88),
        (striped(32768, 8), False, 1.031),
        (dealt(32768, 8, **FOLD), True, 1.031),
        (dealt(32768, 8, chunk=128), False, 1.031),
        (zigzag(32768, 8), False, 1.004),
        (dealt(32768, 8, chunk=128, folded=True), False, 1.004),
    ],
    ids=repr,
)
def test_imbalance_at_tile_128(layout: Layout, ascending: bool, published: float) -> None:
    digits = 2 if published > 1.5 else 3
    work = layout_work(layout, tile=(128, 128), ascending=ascending)
    assert round(imbalance(work, layout), digits) == published


def test_a_million_tokens_on_64_ranks() -> None:
    """The work of a million tokens is computed without a loop over all 2^40 elements."""
    for layout in (contiguous(1 << 20, 64), striped(1 << 20, 64), zigzag(1 << 20, 64)):
        assert layout_work(layout).sum() == (1 << 20) * ((1 << 20) + 1) // 2
        assert layout_work(layout, tile=(128, 128)).sum() >= layout_work(layout).sum()


@settings(max_examples=20)
@given(
    H=st.sampled_from([1, 2, 4]),
    D=st.integers(1, 5),
    Dv=st.integers(1, 5),
    rows=st.integers(1, 5),
    keys=st.integers(1, 5),
)
def test_attention_flops_are_those_of_its_products(H: int, D: int, Dv: int, rows: int, keys: int) -> None:
    """Attention takes 2·m·n·k FLOPs for each product of a block: two products forward, five backward."""
    sizes = Attention(B=3, H=H, K=1, D=D, Dv=Dv)
    forward = [(rows, D, keys), (rows, keys, Dv)]
    backward = [(rows, D, keys), (rows, Dv, keys), (keys, rows, Dv), (rows, keys, D), (keys, rows, D)]
    for products, flag in ((forward, False), (backward, True)):
        expected = sum(2 * m * k * n for m, k, n in products) * 3 * H
        assert attention_flops(sizes, rows * keys, backward=flag) == expected
    plain = Attention(B=3, H=H, K=1, D=D)
    assert attention_flops(plain, 8, True) == 2.5 * attention_flops(plain, 8)


@pytest.mark.parametrize("tile", [(0, 1), (1, -1), (1.5, 2)])
def test_tiles_below_one_are_refused(tile: tuple[int, int]) -> None:
    with pytest.raises(CostError, match="tile"):
        layout_work(zigzag(16, 2), tile=tile)
