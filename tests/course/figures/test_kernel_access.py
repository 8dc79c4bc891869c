from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

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
from tests.viz.test_style import illegible

pytestmark = pytest.mark.thorough

S, D, BLOCK = 8, 2, 4
SHAPES = {"q_ptr": (S, D), "k_ptr": (S, D), "out_ptr": (S, D)}


@dataclass(frozen=True)
class Access:
    """A record of one memory access, with the same fields as `ringlab_course.checking.accesses.Access`."""

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
    """Return the accesses of a causal kernel with two programs. Only the second one reads both tiles of K."""
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


@pytest.mark.parametrize("figure", [all_programs(causal(), SHAPES), one_program(causal(), SHAPES, (0, 0, 0))])
def test_its_pictures_can_be_read(figure: Figure) -> None:
    assert illegible(figure) == []
