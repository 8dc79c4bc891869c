"""The launches and the work of plans equal numbers worked out by hand."""

from __future__ import annotations

import pytest

from ringlab.errors import LayoutError
from ringlab.layout import Layout, Run, contiguous, dealt, striped, zigzag
from ringlab.plan import Tile, tiles, work


def slowest_steps(layout: Layout) -> int:
    """Return the score elements on the critical path: the busiest rank's work in each ring step, summed."""
    steps = range(layout.P)
    return sum(
        max(work(layout, rank, (rank - step) % layout.P) for rank in range(layout.P)) for step in steps
    )


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (contiguous(32, 4), 228),
        (striped(32, 4), 144),
        (zigzag(32, 4), 132),
        (dealt(32, 4, chunk=1, folded=True), 132),
    ],
    ids=str,
)
def test_work_on_the_critical_path(layout: Layout, expected: int) -> None:
    assert slowest_steps(layout) == expected


def of_rank(layout: Layout, rank: int) -> int:
    return sum(work(layout, rank, origin) for origin in range(layout.P))


def test_the_last_rank_works_almost_2p_minus_1_times_the_first() -> None:
    layout = contiguous(64 * 8, 8)
    assert round(of_rank(layout, 7) / of_rank(layout, 0), 1) == 14.8


def test_folding_balances_only_an_even_number_of_folds() -> None:
    assert [of_rank(dealt(12, 4, chunk=1, folded=True), rank) for rank in range(4)] == [18, 19, 20, 21]
    assert len({of_rank(dealt(16, 4, chunk=1, folded=True), rank) for rank in range(4)}) == 1


def test_contiguous_needs_one_launch_or_none() -> None:
    layout = contiguous(32, 4)
    assert tiles(layout, 2, 2) == (Tile(0, 8, 0, 8, True),)
    assert tiles(layout, 2, 1) == (Tile(0, 8, 0, 8, False),)
    assert tiles(layout, 1, 2) == ()


def test_striped_shifts_the_diagonal_for_later_ranks() -> None:
    layout = striped(32, 4)
    assert tiles(layout, 2, 1) == (Tile(0, 8, 0, 8, True),)
    assert tiles(layout, 1, 2) == (Tile(1, 8, 0, 7, True),)


def test_zigzag_is_fused_into_one_launch() -> None:
    """One launch is enough: all rows see half of an earlier rank's block, or half the rows see a later rank's."""
    layout = zigzag(32, 4)
    assert tiles(layout, 1, 1) == (Tile(0, 8, 0, 8, True),)
    assert tiles(layout, 2, 1) == (Tile(0, 8, 0, 4, False),)
    assert tiles(layout, 1, 2) == (Tile(4, 8, 0, 8, False),)


def test_without_a_mask_one_launch_does() -> None:
    for layout in (contiguous(32, 4), striped(32, 4), zigzag(32, 4), dealt(32, 4, chunk=3)):
        for origin in range(4):
            whole = Tile(0, layout.length(1), 0, layout.length(origin), False)
            assert tiles(layout, 1, origin, causal=False) == (whole,)


def test_empty_ranks_have_no_tiles() -> None:
    layout = contiguous(2, 4)
    assert tiles(layout, 3, 0) == tiles(layout, 0, 3) == tiles(layout, 3, 3, causal=False) == ()


def test_runs_of_different_steps_are_refused() -> None:
    broken = Layout(7, 2, "broken", ((Run(0, 3, 3),), (Run(1, 1, 2), Run(4, 1, 2))))
    with pytest.raises(LayoutError, match="one step"):
        tiles(broken, 1, 0)
