"""A fit to timings recovers the numbers that the timings were made from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.cost.block_time import MeasuredTime
from ringlab.cost.fit import KERNEL_TILES, fit_kernel_tile, fit_link, fit_tiles
from ringlab.cost.hardware import MeasuredBlock
from ringlab.cost.sizes import Attention
from ringlab.errors import CostError
from ringlab.plan import Tile

EDGES = (256, 512, 1024, 2048)
SECONDS = st.floats(1e-9, 1e-3)


def tile_times(launch: float, score: float, row: float, heads: int) -> dict[tuple[int, int], float]:
    return {(rows, keys): launch + heads * rows * (keys * score + row) for rows in EDGES for keys in EDGES}


@given(SECONDS, st.floats(1e-11, 1e-7), st.floats(1e-10, 1e-5), st.integers(1, 64))
def test_tiles_give_back_the_coefficients_that_made_them(
    launch: float, score: float, row: float, heads: int
) -> None:
    times = tile_times(launch, score, row, heads)
    found = fit_tiles(times, heads)
    again = tile_times(*found, heads)
    np.testing.assert_allclose(list(again.values()), list(times.values()), rtol=1e-6)


def test_no_coefficient_is_negative_where_plain_least_squares_would_make_it_so() -> None:
    times = {
        (rows, keys): s * (1.3 if rows == keys == 2048 else 1.0)
        for (rows, keys), s in tile_times(0, 4e-9, 0, 8).items()
    }
    assert min(fit_tiles(times, 8)) >= 0


@pytest.mark.parametrize("coefficients", [(0.0, 4e-9, 0.0), (566e-6, 3.97e-9, 137e-9), (1e-3, 4e-9, 1e-6)])
@pytest.mark.parametrize("edge", [None, *KERNEL_TILES])
def test_the_kernels_own_tiles_are_known_by_the_times_of_causal_ones(
    edge: int | None, coefficients: tuple[float, float, float]
) -> None:
    block = MeasuredBlock("float32", "forward", *coefficients, 64, "made up", None, edge)
    sizes = Attention(H=8, K=8, D=64)
    times = {
        rows: MeasuredTime(block, None).seconds((Tile(0, rows, 0, rows, True),), sizes, rows, False)
        for rows in EDGES
    }
    assert fit_kernel_tile(times, coefficients, 8) == edge


@given(SECONDS, st.floats(1e6, 1e12))
def test_links_give_back_latency_and_bandwidth(latency: float, bytes_per_s: float) -> None:
    times = {n: latency + n / bytes_per_s for n in (1 << 12, 1 << 18, 1 << 24)}
    found_latency, found_rate = fit_link(times)
    again = [found_latency + n / found_rate for n in times]
    np.testing.assert_allclose(again, list(times.values()), rtol=1e-6)


@pytest.mark.parametrize("times", [{}, {1024: 1.0}, {1024: 1.0, 2048: -1.0}, {1024: 1.0, 2048: float("nan")}])
def test_too_few_or_impossible_times_are_refused(times: dict[int, float]) -> None:
    with pytest.raises(CostError):
        fit_link(times)
