"""The data of the tile scan picture are right: the tiles, their kinds and order, and the arrays in memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab_course.figures.tile_scan import cell_states, cuts, scan

pytestmark = pytest.mark.thorough

SIZES = st.tuples(st.integers(1, 60), st.integers(1, 20))
DIRECTIONS = ("forward", "backward")


@given(SIZES)
def test_cuts_cover_every_token_once(size: tuple[int, int]) -> None:
    S, tile = size
    spans = cuts(S, tile)
    assert [i for start, stop in spans for i in range(start, stop)] == list(range(S))
    assert all(0 < stop - start <= tile for start, stop in spans)


@given(SIZES, st.booleans())
def test_kinds_say_what_the_position_mask_says(size: tuple[int, int], causal: bool) -> None:
    S, tile = size
    picture = scan(S, tile, 4, causal=causal)
    for i, (q_start, q_stop) in enumerate(cuts(S, tile)):
        for j, (k_start, k_stop) in enumerate(cuts(S, tile)):
            seen = {
                not causal or key <= query
                for query in range(q_start, q_stop)
                for key in range(k_start, k_stop)
            }
            kind = picture.kinds[i][j]
            if kind == "diagonal":  # the only score of a 1 × 1 tile is on its diagonal
                assert causal and i == j and True in seen
            else:
                assert seen == {kind == "full"}


@given(SIZES, st.booleans(), st.sampled_from(DIRECTIONS))
def test_every_visible_tile_is_computed_exactly_once(
    size: tuple[int, int], causal: bool, direction: str
) -> None:
    picture = scan(*size, 4, causal=causal, direction=direction)
    done = [(step.q_tile, step.k_tile) for step in picture.steps]
    n = picture.n_tiles
    wanted = {(i, j) for i in range(n) for j in range(n) if picture.kinds[i][j] != "skip"}
    assert len(done) == len(set(done))
    assert set(done) == wanted


def test_the_live_set_in_bytes() -> None:
    """For t = 128, D = 64 and float32, Q, K, V and out have t·D elements each, the scores t·t, and lse t."""
    forward = scan(1024, 128, 64).steps[0]
    assert forward.live_bytes == 4 * (4 * 128 * 64 + 128 * 128 + 128)
    backward = scan(1024, 128, 64, direction="backward").steps[0]
    assert backward.live_bytes == 4 * (7 * 128 * 64 + 2 * 128 * 128 + 2 * 128)
    assert scan(1024, 128, 64).whole_bytes == 4 * 1024 * 1024


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_live_set_does_not_grow_with_the_sequence(direction: str) -> None:
    peaks = {scan(S, 64, 32, direction=direction).peak_bytes for S in (64, 256, 1024)}
    assert len(peaks) == 1


def test_a_short_last_tile_takes_less() -> None:
    steps = scan(5, 2, 4, causal=False).steps
    assert steps[-1].live["scores → P"] == 4
    assert steps[-1].live["Q tile"] == 4 * 4


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_states_of_the_grid(direction: str) -> None:
    picture = scan(8, 2, 4, direction=direction)
    for index in range(len(picture.steps)):
        states = [state for row in cell_states(picture, index) for state in row]
        assert states.count("now") == 1
        assert states.count("done") == index
        assert states.count("skip") == picture.count("skip")
