"""The planner's fast makespans of a ring equal those of the simulator, which runs the ring program itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ringlab.cost.flops import layout_work
from ringlab.cost.hardware import Link, MeasuredBlock
from ringlab.cost.planner import Request, ring_time, step_time
from ringlab.cost.planner.ring_time import (
    FORMULAS,
    by_formula,
    counted,
    ring_backward_s,
    ring_forward_s,
    window_work,
)
from ringlab.cost.planner.search import search
from ringlab.cost.simulate import simulate
from ringlab.layout import LAYOUTS, get_layout
from ringlab.mask import Mask
from tests.cost.planner_cases import forget, ideal, small_model


def seen_by_step(layout: str, S: int, P: int, causal: bool, tile: tuple[int, int], window: int) -> np.ndarray:
    """Return, by (rank, step), the elements of all tiles with a visible pair. Each pair of pieces has its own tiles."""
    visible = Mask(causal=causal, window=window).visible(np.arange(S), np.arange(S))
    dealt, found = get_layout(layout, S, P), np.zeros((P, P), dtype=np.int64)
    length = S // (2 * P) if layout == "zigzag" and P > 1 else S // P
    owner = {at: rank for rank in range(P) for at in dealt.positions(rank)[::length].tolist()}
    for row, rank in owner.items():
        for key, origin in owner.items():
            block = visible[row : row + length, key : key + length]
            found[rank, (rank - origin) % P] += tiles_seen(block, tile)
    return found


def tiles_seen(visible: np.ndarray, tile: tuple[int, int]) -> int:
    at = [np.arange(0, size, side) for size, side in zip(visible.shape, tile, strict=True)]
    seen = np.logical_or.reduceat(np.logical_or.reduceat(visible, at[0], axis=0), at[1], axis=1)
    heights, widths = (np.diff(np.append(edge, size)) for edge, size in zip(at, visible.shape, strict=True))
    return int((heights[:, None] * widths * seen).sum())


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("S", "P"), [(48, 1), (48, 2), (64, 4), (96, 3)])
@pytest.mark.parametrize("window", [1, 2, 7, 13, 30, 500])
def test_work_in_a_window_is_that_of_the_tiles_with_a_visible_pair(
    layout: str, S: int, P: int, window: int
) -> None:
    """Work in a window equals a count tile by tile, and the steps without any work are left out."""
    for causal in (True, False):
        for tile in ((1, 1), (4, 4), (2, 3), (5, 1)):
            expected = seen_by_step(layout, S, P, causal, tile, window)
            work, tokens = window_work(layout, S, P, causal, tile, window)
            assert tokens == S // P
            assert work.tolist() == expected[:, expected.any(axis=0)].tolist(), (causal, tile)


def test_work_in_a_window_where_tokens_are_dealt_one_by_one() -> None:
    """Under striped, the work in a window is that of every P-th token, to within one element a row."""
    S, P, window = 4096, 4, 256
    dealt, mask = get_layout("striped", S, P), Mask(window=window)
    exact = [mask.visible(dealt.positions(1), dealt.positions(origin)).sum() for origin in (1, 0, 3, 2)]
    work, tokens = window_work("striped", S, P, True, (1, 1), window)
    assert tokens == S // P and work.shape == (1, P)
    assert abs(work[0] - exact).max() <= tokens


NAMED = [name for name, make in LAYOUTS.items() if make in FORMULAS]


@pytest.mark.parametrize("layout", NAMED)
@pytest.mark.parametrize(("P", "node"), [(1, 1), (2, 2), (4, 2), (6, 3), (8, 8)])
@pytest.mark.parametrize("between", [50e9, 0.2e9])
def test_a_layer_of_a_plan_takes_as_long_as_its_simulation(
    layout: str, P: int, node: int, between: float
) -> None:
    """A plan's layer takes as long as its simulation, masked or not, with hidden and exposed hops.

    A plan lays kernel tiles over all rows of a rank, and the simulation lays them over each tile of the mask.
    For layouts without a formula the two may differ at the edges.
    """
    machine = replace(ideal(ranks_per_node=node), between=Link("slow", between, 10e-6, "made up"))
    for causal in (True, False):
        request = Request(
            small_model(H=8, K=2), 1024 * P, machine, P // node, layout=layout, causal=causal,
            dp=1, tp=1, ring=P, ulysses=1, recomputation="none", reserve=0.0,
        )  # fmt: skip
        forward, backward = (
            it.attention_s + it.ring_exposed_s
            for it in search(request)[0].time.passes  # type: ignore[union-attr]
        )
        dealt = get_layout(layout, 1024 * P, P)
        alone, both = (
            simulate(request.attention, dealt, machine, backward=each).makespan_s for each in (False, True)
        )
        assert (forward, forward + backward) == pytest.approx((alone, both), rel=1e-9)


@pytest.mark.parametrize("largest_causal", [None, 256])
@pytest.mark.parametrize("P", [2, 4])
def test_measured_blocks_take_as_long_as_in_the_simulation(
    largest_causal: int | None, P: int, monkeypatch
) -> None:
    """The planner's time of measured blocks equals the simulation's, by both ways of timing pairs of ranks."""
    blocks = tuple(
        MeasuredBlock("bfloat16", name, 1e-5, score, 1e-9, 128, "made up", largest_causal)
        for name, score in (("forward", 1e-12), ("backward", 3e-12))
    )
    machine = ideal(ranks_per_node=P, block_times=blocks)
    sizes = {"dp": 1, "tp": 1, "ring": P, "ulysses": 1, "recomputation": "none"}
    for layout in LAYOUTS:
        request = Request(small_model(H=8, K=2), 1024 * P, machine, layout=layout, **sizes)  # type: ignore[arg-type]
        dealt = get_layout(layout, 1024 * P, P)
        simulated = simulate(request.attention, dealt, machine, backward=True).makespan_s
        for pairs in (16, 1):
            monkeypatch.setattr(step_time, "ALL_PAIRS", pairs)
            forget()
            both = search(request)[0].time.passes  # type: ignore[union-attr]
            assert sum(it.attention_s + it.ring_exposed_s for it in both) == pytest.approx(
                simulated, rel=1e-9
            )


def test_the_short_cut_and_the_bound_for_large_rings(monkeypatch) -> None:
    """The short cut for equal ranks gives the times of following every rank, and the bound is never below them."""
    rng = np.random.default_rng(5)
    P = 12
    slow = np.where(np.arange(P) % 4 == 3, 0.9, 0.1)
    for _ in range(20):
        compute = np.tile(rng.uniform(0.2, 2.0, P), (P, 1))
        exact = ring_forward_s(compute, slow, 0.01 * slow), ring_backward_s(compute, slow, slow, 0.01 * slow)
        with monkeypatch.context() as patched:
            patched.setattr(ring_time, "_alike", lambda _: False)
            followed = (
                ring_forward_s(compute, slow, 0.01 * slow),
                ring_backward_s(compute, slow, slow, 0.01 * slow),
            )
            patched.setattr(ring_time, "LARGEST_FOLLOWED", 4)
            bound = (
                ring_forward_s(compute, slow, 0.01 * slow),
                ring_backward_s(compute, slow, slow, 0.01 * slow),
            )
        assert exact == pytest.approx(followed)
        assert all(b >= e * (1 - 1e-12) for b, e in zip(bound, exact, strict=True))


@pytest.mark.parametrize("layout", NAMED)
@pytest.mark.parametrize("tile", [(128, 128), (64, 128), (256, 64)])
@pytest.mark.parametrize("P", [1, 2, 3, 8])
def test_the_formulas_of_work_equal_the_count(layout: str, tile: tuple[int, int], P: int) -> None:
    for causal in (True, False):
        S = 2 * P * 256 * 3
        counts, tokens = counted(layout, S, P, causal, tile)
        formula, same = by_formula(layout, S, P, causal, tile)
        assert np.array_equal(np.broadcast_to(counts, (P, P)), np.broadcast_to(formula, (P, P)))
        assert tokens == same
        assert np.array_equal(
            np.broadcast_to(counts, (P, P)), layout_work(get_layout(layout, S, P), causal, tile)
        )
