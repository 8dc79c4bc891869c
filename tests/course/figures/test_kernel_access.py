from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ringlab.viz.frontend import FRAMES
from ringlab_course.figures import kernel_access
from ringlab_course.figures.kernel_access import (
    all_programs,
    boxes,
    counts,
    describe,
    one_program,
    pictures,
    programs,
)

S, D, BLOCK = 8, 2, 4
SHAPES = {"q_ptr": (S, D), "k_ptr": (S, D), "out_ptr": (S, D)}


@dataclass(frozen=True)
class Access:
    """As the interpreter records it."""

    program: tuple[int, int, int]
    kind: str
    argument: str
    offsets: np.ndarray
    shape: tuple[int, ...]
    masked: int = 0


def tile(program: int, kind: str, argument: str, first: int, rows: int = BLOCK) -> Access:
    offsets = np.arange(first * D, (first + rows) * D)
    return Access((program, 0, 0), kind, argument, offsets, (BLOCK, D), (BLOCK - rows) * D)


def causal() -> list[Access]:
    """Two programs of a causal kernel: the second one reads both tiles of K."""
    return [
        tile(0, "load", "q_ptr", 0),
        tile(0, "load", "k_ptr", 0),
        tile(0, "store", "out_ptr", 0),
        tile(1, "load", "q_ptr", 4),
        tile(1, "load", "k_ptr", 0),
        tile(1, "load", "k_ptr", 4),
        tile(1, "store", "out_ptr", 4),
    ]


def test_counts_are_those_of_all_programs() -> None:
    times = counts(causal(), "k_ptr", "load", (S, D))
    assert times[:4].tolist() == [[2, 2]] * 4 and times[4:].tolist() == [[1, 1]] * 4
    assert counts(causal(), "out_ptr", "load", (S, D)).sum() == 0
    assert counts(causal(), "out_ptr", "store", (S, D)).tolist() == [[1, 1]] * S


def test_an_element_touched_twice_by_one_access_counts_twice() -> None:
    twice = Access((0, 0, 0), "load", "k_ptr", np.array([3, 3]), (2,))
    assert counts([twice], "k_ptr", "load", (S, D))[1].tolist() == [0, 2]


def test_boxes_are_rows_and_columns_with_their_turn() -> None:
    found = [(b.argument, b.kind, b.turn, b.rows, b.columns) for b in boxes(causal(), SHAPES, (1, 0, 0))]
    assert found == [
        ("q_ptr", "load", 1, (4, 7), (0, 1)),
        ("k_ptr", "load", 1, (0, 3), (0, 1)),
        ("k_ptr", "load", 2, (4, 7), (0, 1)),
        ("out_ptr", "store", 1, (4, 7), (0, 1)),
    ]


def test_masked_lanes_and_other_arguments_have_no_box() -> None:
    short = tile(0, "load", "k_ptr", 6, rows=2)
    (box,) = boxes([short], SHAPES, (0, 0, 0))
    assert (box.rows, box.masked) == ((6, 7), 4)
    nothing = Access((0, 0, 0), "load", "k_ptr", np.zeros(0, np.int64), (4,), 4)
    assert boxes([nothing, tile(0, "load", "table_ptr", 0)], SHAPES, (0, 0, 0)) == []


def test_the_words_say_what_is_touched() -> None:
    assert describe(causal(), SHAPES, (1, 0, 0)) == (
        "Program 1 reads Q rows 4 to 7, K rows 0 to 7 in 2 turns; writes OUT rows 4 to 7."
    )
    assert describe(causal(), SHAPES).endswith("Q: read 1×. K: read 1 to 2×. OUT: written 1×.")
    flat = {"x_ptr": (1, 8)}
    one = Access((0, 1, 0), "load", "x_ptr", np.arange(3), (4,), 1)
    assert describe([one], flat, (0, 1, 0)) == "Program (0, 1) reads X elements 0 to 2."


def drawn(figure, dashed: bool = False) -> dict[str, list[tuple[float, float, float, float]]]:
    """The boxes of every panel, as (left, bottom, width, height), by its title's first word."""
    return {
        ax.get_title(loc="left").split(":")[0]: [
            (p.get_x() + 0.5, round(p.get_y(), 2), p.get_width(), round(p.get_height(), 2))
            for p in ax.patches
            if (p.get_linestyle() != "solid") == dashed
        ]
        for ax in figure.axes
    }


def test_the_picture_of_all_programs_has_a_box_for_every_access() -> None:
    panels = drawn(all_programs(causal(), SHAPES))
    assert [(left, width) for left, _, width, _ in panels["K"]] == [(0, 4), (0, 4), (4, 4)]
    assert [round(bottom + 0.38) for _, bottom, _, _ in panels["K"]] == [0, 1, 1]
    assert [(left, width) for left, _, width, _ in panels["OUT"]] == [(0, 4), (4, 4)]


def test_tiles_that_a_program_leaves_to_others_are_dashed() -> None:
    panels = drawn(all_programs(causal(), SHAPES), dashed=True)
    assert [(left, round(bottom + 0.38), width) for left, bottom, width, _ in panels["K"]] == [(4, 0, 4)]
    assert panels["Q"] == panels["OUT"] == []


def test_masked_lanes_stick_out_behind_the_end() -> None:
    whole = Access((0, 0, 0), "load", "x_ptr", np.arange(4), (4,))
    short = Access((1, 0, 0), "load", "x_ptr", np.arange(4, 6), (4,), 2)
    figure = all_programs([whole, short], {"x_ptr": (1, 6)})
    assert [box[::2] for box in drawn(figure, dashed=True)["X"]] == [(6, 2)]
    assert 7.5 < figure.axes[0].get_xlim()[1] < 8
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["read", "written", "masked lanes"]


def test_boxes_have_numbers_where_a_program_touches_an_array_twice() -> None:
    figure = all_programs(causal(), SHAPES, "causal")
    assert 'Kernel "causal"' in figure.get_suptitle()
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts[-1] == "numbers: order of a program's accesses to this array"
    assert [text.get_text() for text in figure.axes[1].texts] == ["1", "1", "2"]


def test_a_long_axis_has_a_tick_at_its_end() -> None:
    long = Access((0, 0, 0), "load", "x_ptr", np.arange(256), (256,))
    assert all_programs([long], {"x_ptr": (1, 256)}).axes[0].get_xticks().tolist() == [0, 64, 128, 192, 256]


def test_the_map_of_one_program_shows_its_tiles_and_the_others_in_grey() -> None:
    figure = one_program(causal(), SHAPES, (0, 0, 0))
    k = figure.axes[1]
    (box,) = k.patches
    assert (box.get_y() + 0.5, box.get_height(), box.get_width()) == (0, 4, D)
    assert np.asarray(k.images[0].get_array()).all()
    q = figure.axes[0]
    assert np.asarray(q.images[0].get_array())[:4].all()


def test_the_player_has_a_picture_with_words_for_every_program() -> None:
    for program, picture in zip(programs(causal()), pictures(causal(), SHAPES), strict=True):
        assert describe(causal(), SHAPES, program) in picture


def test_without_a_person_the_programs_are_text_and_their_pictures_are_recorded(
    recorded: list[dict[str, Any]],
) -> None:
    kernel_access.play(causal(), SHAPES)
    assert len(recorded[0]["text/plain"].splitlines()) == len(recorded[0][FRAMES]["pictures"]) == 2


@pytest.mark.needs_interpreter
def test_fabricated_accesses_look_like_recorded_ones() -> None:
    import torch
    import triton

    from ringlab_course.checking.accesses import record_accesses
    from tests.blocks.access_kernels import copy_kernel

    x, out = torch.arange(6.0), torch.zeros(6)
    with record_accesses() as accesses:
        copy_kernel[(triton.cdiv(6, 4),)](x, out, 6, BLOCK=4)
    shapes = {"x_ptr": (1, 6), "out_ptr": (1, 6)}
    assert (
        describe(accesses, shapes, (1, 0, 0))
        == "Program 1 reads X elements 4 to 5; writes OUT elements 4 to 5."
    )
    assert all(a.masked == 2 for a in accesses if a.program == (1, 0, 0))
