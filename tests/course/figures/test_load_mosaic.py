"""The mosaic's cells are the work that the cost room counts, and its margins their sums and maxima."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb

from ringlab.cost.flops import layout_work
from ringlab.errors import CostError, LayoutError
from ringlab.layout import Layout, contiguous, striped, zigzag
from ringlab.plan import work
from ringlab.viz.frontend import FRAMES
from ringlab.viz.style import png
from ringlab_course.figures import load_mosaic
from ringlab_course.figures.layout_tiles import LAYOUTS, tiles_of
from ringlab_course.figures.load_mosaic import mosaic
from tests.viz.test_style import illegible

THREE = [contiguous(32, 4), striped(32, 4), zigzag(32, 4)]


def numbers(ax) -> dict[tuple[int, int], str]:
    """Return the texts inside the axes by (row, column) of the cell they stand in."""
    return {(int(t.get_position()[1]), int(t.get_position()[0])): t.get_text() for t in ax.texts}


def cells(ax) -> dict[tuple[int, int], tuple[float, ...]]:
    """Return the colour of every cell by (rank, column)."""
    boxes = [p for p in ax.patches if str(p.get_gid()).startswith("cell")]
    return {(int(p.get_y()), int(p.get_x())): p.get_facecolor()[:3] for p in boxes}


def outlined(ax) -> set[tuple[int, int]]:
    boxes = [p for p in ax.patches if str(p.get_gid()).startswith("slowest")]
    return {(int(p.get_y()), int(p.get_x())) for p in boxes}


@pytest.mark.parametrize("tile", [None, 4, (2, 8)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_cells_are_the_work_of_each_rank_in_each_step(name, tile) -> None:
    layout = LAYOUTS[name](30, 4)
    expected = layout_work(layout, True, (tile, tile) if isinstance(tile, int) else tile)
    shown = numbers(load_mosaic.figure(layout, tile).axes[0])
    for rank in range(4):
        for step in range(4):
            assert shown[rank, step] == str(expected[rank, step])
        assert shown[rank, 4] == str(expected[rank].sum())
        assert shown[4, rank] == str(expected[:, rank].max())
    assert shown[4, 4] == str(expected.max(axis=0).sum())


@given(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 60), st.integers(1, 6))
def test_the_exact_work_is_the_plans(name, S, P) -> None:
    layout = LAYOUTS[name](S, P)
    one = mosaic(layout)
    plan = [[work(layout, rank, (rank - step) % P) for step in range(P)] for rank in range(P)]
    assert one.work.tolist() == plan and one.even == S * (S + 1) / 2 / P
    assert one.ratio >= 1 and one.by_origin().sum() == one.work.sum()


@given(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 60), st.integers(1, 6), st.integers(1, 9))
def test_the_mosaic_and_the_picture_of_tiles_agree(name, S, P, tile) -> None:
    layout = LAYOUTS[name](S, P)
    assert mosaic(layout, tile).totals.tolist() == tiles_of(layout, tile).computed.tolist()


def test_by_origin_has_a_column_for_each_owner() -> None:
    layout = contiguous(32, 4)
    ax = load_mosaic.figure(layout, by="origin").axes[0]
    shown = numbers(ax)
    assert ax.get_title(loc="left") == "contiguous", "the ratio is that of steps"
    for rank in range(4):
        for origin in range(4):
            assert shown[rank, origin] == str(work(layout, rank, origin))


def test_ranks_in_the_wrong_order_are_another_picture() -> None:
    layout = contiguous(32, 4)
    wrong = Layout(32, 4, "contiguous", layout.ranks[::-1])
    right, other = (load_mosaic.figure(one).axes[0] for one in (layout, wrong))
    assert numbers(right) != numbers(other) and cells(right) != cells(other)


def test_darker_is_more_and_one_scale_holds_for_all_panels() -> None:
    figure = load_mosaic.figure(THREE)
    shade = {}
    for ax, layout in zip(figure.axes, THREE, strict=True):
        for (rank, step), colour in cells(ax).items():
            shade.setdefault(int(layout_work(layout)[rank, step]), set()).add(colour)
    assert all(len(colours) == 1 for colours in shade.values())
    order = [sum(to_rgb(next(iter(shade[value])))) for value in sorted(shade)]
    assert order == sorted(order, reverse=True) and len(set(order)) == len(order)


def test_the_slowest_are_outlined_where_others_wait() -> None:
    axes = load_mosaic.figure(THREE).axes
    assert outlined(axes[0]) == {(rank, step) for rank in range(4) for step in range(1, rank + 1)}
    assert outlined(axes[1]) == outlined(axes[0])  # striped: 36 against 28
    assert outlined(axes[2]) == set()


def test_a_step_shows_what_has_been_computed_so_far() -> None:
    ax = load_mosaic.figure(contiguous(32, 4), step=1).axes[0]
    shown = numbers(ax)
    assert (0, 2) not in shown and shown[3, 4] == "100" and shown[4, 4] == "100"
    assert [p.get_x() for p in ax.patches if p.get_gid() == "step"] == [1]


def test_titles_give_the_published_ratios() -> None:
    """S = 32k, P = 8, tile 128: 1.88, 1.031, 1.004: facts, section 2."""
    layouts = [LAYOUTS[name](32_768, 8) for name in ("contiguous", "striped", "zig-zag")]
    titles = [ax.get_title(loc="left") for ax in load_mosaic.figure(layouts, 128).axes[:3]]
    assert [title.split("\n")[1].split(" ×")[0] for title in titles] == ["1.88", "1.03", "1.00"]
    assert [round(mosaic(layout, 128).ratio, 3) for layout in layouts][1:3] == [1.031, 1.004]


@pytest.mark.parametrize("P", [1, 2, 5, 8, 12, 40])
def test_every_word_can_be_read(P) -> None:
    for S, tile in ((16 * P, None), (4096 * P, 128)):
        figure = load_mosaic.figure([make(S, P) for make in LAYOUTS.values()][:3], tile)
        assert png(figure).startswith(b"\x89PNG") and illegible(figure) == []


def test_large_numbers_are_in_the_unit_of_the_legend() -> None:
    figure = load_mosaic.figure(contiguous(32_768, 8), 128)
    assert numbers(figure.axes[0])[1, 1] == "16.8"  # 4096² score elements
    assert "million score elements: darker is more" in [t.get_text() for t in figure.legends[0].get_texts()]
    assert (
        figure.get_suptitle()
        == "Score elements that each rank computes in each step: 32,768 tokens on 8 ranks"
    )


def test_many_ranks_have_a_scale_in_place_of_numbers() -> None:
    figure = load_mosaic.figure(contiguous(4096, 32), 32)
    assert [t.get_text() for t in figure.axes[0].texts] == ["step"]
    assert figure.axes[-1].get_ylabel() == "thousand score elements"


def test_the_words_carry_the_numbers() -> None:
    words = load_mosaic.describe(THREE)
    for part in ("rank 3 computes most, 228, rank 0 least, 36", "36, 64, 64, 64: 228 in all", "1.73 times",
                 "striped, 32 tokens on 4 ranks", "144 in all"):  # fmt: skip
        assert part in words
    assert "tiles of 4 × 4" in load_mosaic.describe(contiguous(32, 4), 4)
    step = load_mosaic.describe_step(THREE, 3)
    assert "Step 3: contiguous, rank 3 computes 64, and all ranks together 25% of what" in step
    assert "; zigzag, all ranks compute 32." in step


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ({"layouts": []}, "at least one layout"),
        ({"layouts": contiguous(256, 128)}, "at most 64 ranks"),
        ({"layouts": contiguous(8, 2), "by": "rank"}, "by="),
        ({"layouts": contiguous(8, 2), "by": "origin", "step": 1}, "by="),
        ({"layouts": contiguous(8, 2), "step": 2}, "a step from 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments, needed) -> None:
    with pytest.raises(LayoutError, match=needed):
        load_mosaic.figure(**arguments)
    with pytest.raises(CostError, match="tile"):
        load_mosaic.figure(contiguous(8, 2), 0)


def test_the_slider_walks_over_the_steps() -> None:
    pictures = load_mosaic.pictures(THREE)
    assert all(f'alt="Step {step}:' in picture for step, picture in enumerate(pictures))
    assert len(set(pictures)) == 4


def test_without_a_person_the_whole_mosaics_are_shown_and_the_steps_recorded(
    recorded: list[dict[str, Any]],
) -> None:
    load_mosaic.play(contiguous(32, 4))
    load_mosaic.play(THREE)
    assert "228 in all" in recorded[0]["text/plain"] and "zigzag" in recorded[1]["text/plain"]
    assert [len(output[FRAMES]["pictures"]) for output in recorded] == [4, 4]
    assert all(output["image/png"] for output in recorded)


def test_nothing_to_compute_is_drawn_as_nothing() -> None:
    empty = contiguous(2, 4)
    shown = numbers(load_mosaic.figure(empty).axes[0])
    assert shown[3, 0] == "0" and np.array(layout_work(empty)).sum() == 3
