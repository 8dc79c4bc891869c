"""The picture of a ring step agrees with the position mask tile by tile, and counts bytes launch by launch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab_course.figures import step_report
from ringlab_course.figures.ring_step import LAYOUTS, StepPicture, describe, layouts_at, step_picture

pytestmark = pytest.mark.thorough

NAMES = tuple(LAYOUTS)
SIZES = st.tuples(st.integers(1, 90), st.integers(1, 5))


def seen(picture: StepPicture, layout) -> np.ndarray:
    """Return the mask of this step's rows and keys, computed from their positions."""
    rows, keys = layout.positions(picture.rank), layout.positions(picture.origin)
    return rows[:, None] >= keys[None, :]


@pytest.mark.parametrize("name", NAMES)
@given(SIZES, st.data())
def test_tiles_are_what_the_position_mask_makes_of_them(name, size, data) -> None:
    layout = LAYOUTS[name](*size)
    rank, step = (data.draw(st.integers(0, layout.P - 1)) for _ in range(2))
    picture = step_picture(layout, rank, step, 8, 8)
    mask, visited = seen(picture, layout), np.zeros((picture.rows, picture.keys), int)
    for program in picture.programs:
        for visit in program.visits:
            box = slice(program.row_start, program.row_stop), slice(visit.k_start, visit.k_stop)
            visited[box] += 1
            if visit.kind == "full":
                assert mask[box].all()
    assert visited.max(initial=0) <= 1
    assert not (mask & (visited == 0)).any(), "no program visits a visible pair"


@given(SIZES, st.sampled_from(NAMES))
def test_programs_own_each_row_once_at_both_ends(size, name) -> None:
    layout = LAYOUTS[name](*size)
    for step in {0, layout.P - 1}:
        picture = step_picture(layout, 0, step, 8, 8)
        owned = [row for p in picture.programs for row in range(p.row_start, p.row_stop)]
        assert sorted(owned) == list(range(picture.rows)) and picture.rows_without_program == 0


def test_counts_of_the_four_layouts() -> None:
    """For S = 1024, P = 4 and tiles of 64, the counts of rank 1's 16 tiles in step 1 equal counts by hand."""
    found = {p.layout: (p.count("full"), p.count("masked"), p.skipped) for p in layouts_at(1024, 4, 1, 1)}
    by_hand = {
        "contiguous": (16, 0, 0),
        "striped": (6, 4, 6),
        "zig-zag": (8, 0, 8),
        "token fold": (4, 8, 4),
    }
    assert {name: found[name] for name in by_hand} == by_hand


def test_a_single_row_without_a_program_is_no_row_of_tiles() -> None:
    """The picture of step 2 has 16 tiles, although the first row of striped and token fold sees no key."""
    for picture in layouts_at(1024, 4, 1, 2):
        assert picture.count("full") + picture.count("masked") + picture.skipped == 16, picture.layout


def test_rows_that_see_nothing_have_no_program_between_the_ends() -> None:
    """Rank 0 of a contiguous layout, which needs only its own block, runs no program in middle steps."""
    middle = step_picture(LAYOUTS["contiguous"](64, 4), 0, 1, 8, 8)
    assert middle.programs == () and middle.rows_without_program == 16 and middle.skipped == 4
    assert "No program runs, 4 tiles are skipped" in describe(middle)
    last = step_picture(LAYOUTS["contiguous"](64, 4), 0, 3, 8, 8)
    assert len(last.programs) == 2 and last.count("full") == last.count("masked") == 0


def test_without_a_mask_all_is_full() -> None:
    picture = step_picture(LAYOUTS["striped"](64, 2), 1, 1, 8, 8, causal=False)
    assert (picture.count("full"), picture.count("masked"), picture.skipped) == (16, 0, 0)


def test_bytes_of_rows_are_added_up_launch_by_launch() -> None:
    def access(program: int, kind: str, argument: str, count: int) -> SimpleNamespace:
        return SimpleNamespace(program=(program, 0, 0), kind=kind, argument=argument, offsets=range(count))

    one = [access(0, "load", "Q", 9), access(0, "load", "ACC", 3), access(0, "store", "ACC", 2)]
    one += [access(1, "load", "K", 9), access(1, "store", "M", 1)]
    two = [access(0, "load", "SEGMENTS", 9), access(0, "store", "OUT", 5), access(1, "load", "TOTAL", 1)]
    assert step_report.moved(one + two) == [(12, 12), (4, 10)]
    assert step_report.moved([]) == []


def test_rows_without_tiles_say_whether_they_have_a_program() -> None:
    """The early rows of zig-zag rank 1 have no program in step 2, and in step 3 a program without keys."""
    middle, last = (step_picture(LAYOUTS["zig-zag"](512, 4), 1, step) for step in (2, 3))
    assert middle.rows_without_tiles() == [(0, 64, "no program")]
    assert last.rows_without_tiles() == [(0, 64, "program without keys")]
    assert describe(middle).endswith(" 64 rows have no program.")
