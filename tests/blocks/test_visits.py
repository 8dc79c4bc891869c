"""The programs' segments together cover each visible pair once and no other pair, and each row has one writer."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringlab.blocks.triton import visits
from ringlab.blocks.triton.visits import (
    ALL,
    Program,
    key_programs,
    key_visits,
    row_programs,
    row_visits,
)
from ringlab.layout import Layout, contiguous, dealt, striped, zigzag
from ringlab.mask import Mask
from ringlab.plan import Tile, tiles

Tiles = tuple[Tile, ...]
LAYOUTS = st.one_of(
    st.builds(
        lambda S, P, chunk, folded: dealt(S, P, chunk=chunk, folded=folded),
        st.integers(0, 60),
        st.integers(1, 5),
        st.integers(1, 20),
        st.booleans(),
    ),
    st.builds(
        lambda make, S, P: make(S, P),
        st.sampled_from([contiguous, striped, zigzag]),
        st.integers(0, 90),
        st.integers(1, 5),
    ),
)
MASKS = st.builds(Mask, causal=st.booleans(), window=st.one_of(st.none(), st.integers(1, 40)))
BLOCKS = st.sampled_from([1, 2, 3, 4, 8, 16, 64])


def plans(layout: Layout, mask: Mask) -> Iterable[tuple[Tiles, np.ndarray]]:
    """Yield the tiles of every pair of ranks, and the mask of the same pair by global positions."""
    for rank in range(layout.P):
        for origin in range(layout.P):
            visible = mask.visible(layout.positions(rank), layout.positions(origin))
            yield tiles(layout, rank, origin, mask), visible


def painted(programs: tuple[Program, ...], mask: np.ndarray, block: int, over_keys: bool) -> np.ndarray:
    """Return how often the programs visit each pair (row, key), if the tables are read as the kernels do."""
    counts = np.zeros(mask.shape, int)
    row, key = np.indices(mask.shape)
    own, other = (row, key) if over_keys else (key, row)
    for program in programs:
        owned = (program.start <= own) & (own < program.stop)
        for begin, split, end, high, low in program.segments:
            free, masked = ((begin, split), (split, end)) if over_keys else ((split, end), (begin, split))
            assert begin <= split <= end and (free[1] - free[0]) % block == 0
            counts += owned & (free[0] <= other) & (other < free[1])
            visible = (row + low <= key) & (key <= row + high)
            counts += owned & (masked[0] <= other) & (other < masked[1]) & visible
    return counts


@given(LAYOUTS, MASKS, BLOCKS, BLOCKS)
def test_rows_and_keys_meet_where_they_may(layout: Layout, mask: Mask, m: int, n: int) -> None:
    """Programs visit each visible pair once; they are at most a block long, and each row and key has one owner."""
    for plan, visible in plans(layout, mask):
        of_rows = row_programs(plan, visible.shape[0], m, n, every_row=True)
        of_keys = key_programs(plan, *visible.shape, m, n)
        assert np.array_equal(painted(of_rows, visible, n, True), visible)
        assert np.array_equal(painted(of_keys, visible, m, False), visible)
        for programs, length, block in ((of_rows, visible.shape[0], m), (of_keys, visible.shape[1], n)):
            assert sorted(i for p in programs for i in range(p.start, p.stop)) == list(range(length))
            assert all(0 < p.stop - p.start <= block for p in programs)


@given(LAYOUTS, MASKS, BLOCKS, BLOCKS)
def test_in_the_middle_of_a_ring_rows_that_see_nothing_have_no_program(
    layout: Layout, mask: Mask, m: int, n: int
) -> None:
    for plan, visible in plans(layout, mask):
        programs = row_programs(plan, visible.shape[0], m, n, every_row=False)
        owned = np.zeros(visible.shape[0], bool)
        for program in programs:
            assert program.segments
            owned[program.start : program.stop] = True
        seeing = visible.any(1)
        assert np.array_equal(seeing & owned, seeing)
        assert np.array_equal(painted(programs, visible, n, True), visible)


@pytest.mark.parametrize(
    ("layout", "rank", "origin", "programs", "segments"),
    [
        (striped(4096, 2), 1, 0, 16, 16),  # one staircase; no row is left over at the edge
        (striped(4096, 2), 0, 1, 16, 16),  # one staircase; the first row sees nothing
        (zigzag(4096, 2), 0, 1, 8, 8),  # the later half of the rows sees one half of the keys
        (dealt(4096, 2, chunk=1, folded=True), 1, 0, 16, 32),  # two runs of keys for each run of rows
    ],
    ids=str,
)
def test_few_programs_and_full_ones(
    layout: Layout, rank: int, origin: int, programs: int, segments: int
) -> None:
    """Bands that form a staircase become one band, so programs own whole blocks of 128 rows."""
    made = row_programs(tiles(layout, rank, origin), layout.length(rank), 128, 64, every_row=False)
    assert sum(len(p.segments) for p in made) == pytest.approx(segments, abs=1)
    assert len(made) == pytest.approx(programs, abs=1)


def test_tiles_that_all_rows_see_are_not_masked() -> None:
    """For rows 384 to 511 only the last two of eight tiles of 64 keys are masked; zig-zag's full tiles have no mask."""
    made = {p.start: p for p in row_programs((Tile(0, 512, 0, 512, True),), 512, 128, 64, every_row=True)}
    assert made[384].segments == ((0, 384, 512, 0, -ALL),)
    assert made[0].segments == ((0, 0, 128, 0, -ALL),)
    full = row_programs(tiles(zigzag(1024, 2), 1, 0), 512, 128, 64, every_row=False)
    assert all(split == end and high == ALL for p in full for _, split, end, high, _ in p.segments)


def test_a_window_has_masked_tiles_at_its_edges_alone() -> None:
    """A window of 512 keys at 128 rows has two masked tiles at each edge and six free tiles between."""
    plan = tiles(contiguous(1024, 1), 0, 0, Mask(window=512))
    made = {p.start: p for p in row_programs(plan, 1024, 128, 64, every_row=True)}
    assert len(made) == 8, "one band: its programs own whole blocks of rows"
    for width in (16, 100, 129, 1024):
        narrow = tiles(contiguous(1024, 1), 0, 0, Mask(window=width))
        assert len(row_programs(narrow, 1024, 128, 64, every_row=True)) == 8
        assert len(key_programs(narrow, 1024, 1024, 64, 128)) == 8
    assert made[640].segments == ((129, 129, 257, 0, -511), (257, 641, 768, 0, -511))
    assert made[128].segments == ((0, 128, 256, 0, -ALL),)
    found = row_visits(plan, 1024, 128, 64, True, torch.device("cpu"))
    assert found.lows is not None and found.arguments[2] is found.lows
    assert sorted(set(found.lows.tolist())) == [-ALL, -511]


def test_the_longest_walks_come_first() -> None:
    made = row_programs((Tile(0, 256, 0, 256, True),), 256, 32, 32, every_row=True)
    assert [p.start for p in made] == list(range(224, -1, -32))
    assert key_programs((Tile(0, 256, 0, 256, True),), 256, 256, 32, 32)[0].start == 0


def test_tables_on_a_device_are_made_once() -> None:
    plan = (Tile(0, 8, 0, 8, True),)
    cpu = torch.device("cpu")
    once, again = (row_visits(plan, 9, 4, 4, True, cpu) for _ in range(2))
    assert once is again
    assert once.programs.dtype == once.segments.dtype == torch.int32
    assert sorted(map(tuple, once.programs[:, :2].tolist())) == [(0, 4), (4, 8), (8, 9)]
    assert key_visits(plan, 9, 8, 4, 4, cpu).programs[:, 3].max() == len(
        key_visits(plan, 9, 8, 4, 4, cpu).segments
    )
    assert visits.row_visits((), 3, 4, 4, True, cpu).programs.tolist() == [[0, 3, 0, 0]]


def test_each_stream_has_tables_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream has its own tables, because a kernel of another stream would not wait until they are filled."""
    plan, on = (Tile(0, 8, 0, 8, True),), SimpleNamespace(cuda_stream=1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: on)
    monkeypatch.setattr(visits, "upload", lambda table, device: torch.from_numpy(table))
    one = row_visits(plan, 8, 4, 4, True, torch.device("cuda"))
    assert row_visits(plan, 8, 4, 4, True, torch.device("cuda")) is one
    on.cuda_stream = 2
    assert row_visits(plan, 8, 4, 4, True, torch.device("cuda")).programs is not one.programs
