"""From how many tokens per rank a hop hides: published thresholds, and the definition itself.

What is fitted from timings is what made them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.cost.block_time import MeasuredTime
from ringlab.cost.fit import KERNEL_TILES, fit_kernel_tile, fit_link, fit_tiles
from ringlab.cost.hardware import MeasuredBlock
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import block_s, hop_s, least_tokens_hidden
from ringlab.errors import CostError
from ringlab.plan import Tile

FULL = Attention(H=32, K=32, D=128, causal=False)
A100 = 312e12
THRESHOLDS = [(600e9, 520), (300e9, 1040), (12.5e9, 24960)]
"""bytes/s, tokens: A100 with NVLink counted both ways, one way, and InfiniBand."""

sizes = st.builds(
    lambda K, group, **rest: Attention(K=K, H=K * group, **rest),
    K=st.integers(1, 8),
    group=st.integers(1, 8),
    B=st.integers(1, 4),
    D=st.integers(1, 256),
    dtype=st.sampled_from(["float8", "bfloat16", "float32"]),
    causal=st.booleans(),
)
rates = st.floats(1e9, 1e16)
latencies = st.sampled_from([0.0, 1e-6, 1e-3])


@pytest.mark.parametrize(("bandwidth", "tokens"), THRESHOLDS)
def test_published_thresholds(bandwidth: float, tokens: float) -> None:
    assert least_tokens_hidden(A100, bandwidth, FULL) == pytest.approx(tokens, rel=1e-12)


def test_what_changes_the_threshold() -> None:
    base = least_tokens_hidden(A100, 300e9, FULL)
    assert least_tokens_hidden(A100, 300e9, replace(FULL, K=8)) == pytest.approx(base / 4)
    assert least_tokens_hidden(A100, 300e9, replace(FULL, causal=True)) == pytest.approx(2 * base)
    assert least_tokens_hidden(A100, 300e9, replace(FULL, dtype="float32")) == pytest.approx(2 * base)
    assert least_tokens_hidden(A100, 300e9, replace(FULL, B=4, D=64)) == pytest.approx(base)
    # backward: 5 products for 2, and dK/dV in float32 beside K/V in bfloat16: (2 + 4)/2 bytes, 6/5 of the tokens
    assert least_tokens_hidden(A100, 300e9, FULL, backward=True) == pytest.approx(1.2 * base)


def test_published_step() -> None:
    """S=131072, P=8, 32 heads of 128, A100 at 600 GB/s: 14.1 ms against 0.447 ms, 31.5 times."""
    compute, transfer = block_s(FULL, 16384, A100), hop_s(FULL, 16384, 600e9)
    assert (round(compute * 1e3, 1), round(transfer * 1e3, 3)) == (14.1, 0.447)
    assert round(compute / transfer, 1) == 31.5


@given(sizes=sizes, flops=rates, bandwidth=rates, latency=latencies, backward=st.booleans())
def test_at_the_threshold_a_hop_takes_as_long_as_a_block(
    sizes: Attention, flops: float, bandwidth: float, latency: float, backward: bool
) -> None:
    tokens = least_tokens_hidden(flops, bandwidth, sizes, latency_s=latency, backward=backward)
    compute = block_s(sizes, tokens, flops, backward=backward)
    assert compute == pytest.approx(hop_s(sizes, tokens, bandwidth, latency, backward=backward), rel=1e-9)
    for factor, hidden in ((1.01, True), (1 / 1.01, False)):
        block = block_s(sizes, tokens * factor, flops, backward=backward)
        assert hidden == (hop_s(sizes, tokens * factor, bandwidth, latency, backward=backward) <= block)


MUTANTS: dict[str, Callable[[float, float, Attention], float]] = {
    "2 FLOPs a pair": lambda F, B, a: 2 * least_tokens_hidden(F, B, a),
    "both directions": lambda F, B, a: least_tokens_hidden(F, 2 * B, a),
    "K only": lambda F, B, a: least_tokens_hidden(F, B, a) / 2,
    "query heads travel": lambda F, B, a: least_tokens_hidden(F, B, replace(a, K=a.H)),
    "causal halves": lambda F, B, a: least_tokens_hidden(F, B, a) / (4 if a.causal else 1),
    "float32 on the wire": lambda F, B, a: least_tokens_hidden(F, B, replace(a, dtype="float32")),
    "bits for bytes": lambda F, B, a: least_tokens_hidden(F, B / 8, a),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_thresholds_catch(mutant: str) -> None:
    known = [(FULL, 1040.0), (replace(FULL, K=8), 260.0), (replace(FULL, causal=True), 2080.0)]
    assert any(MUTANTS[mutant](A100, 300e9, it) != pytest.approx(tokens) for it, tokens in known)
    assert all(least_tokens_hidden(A100, 300e9, it) == pytest.approx(tokens) for it, tokens in known)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_that_are_no_rates_are_refused(bad: float) -> None:
    for call in (
        lambda: least_tokens_hidden(bad, 1e9, FULL),
        lambda: least_tokens_hidden(1e12, bad, FULL),
        lambda: block_s(FULL, bad, 1e12),
        lambda: hop_s(FULL, 10, bad),
    ):
        with pytest.raises(CostError):
            call()


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


@pytest.mark.parametrize("truth", [(0.0, 4e-9, 0.0), (1e-4, 4e-9, 0.0), (0.0, 4e-9, 2e-8)])
def test_a_part_that_takes_no_time_is_fitted_as_none(truth: tuple[float, float, float]) -> None:
    found = fit_tiles(tile_times(*truth, 8), 8)
    np.testing.assert_allclose(found, truth, rtol=1e-6, atol=1e-13)


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


def test_small_tiles_weigh_as_much_as_large_ones() -> None:
    """Absolute errors would leave the launch out: it is a thousandth of the largest tile's time."""
    random = np.random.default_rng(0)
    times = {n: s * random.uniform(0.97, 1.03) for n, s in tile_times(1e-4, 4e-9, 0.0, 8).items()}
    assert fit_tiles(times, 8)[0] == pytest.approx(1e-4, rel=0.5)


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


def test_a_link_on_which_size_does_not_matter_is_refused() -> None:
    with pytest.raises(CostError, match="take longer"):
        fit_link({1024: 1.0, 1 << 20: 0.5})
