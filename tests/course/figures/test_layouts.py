"""Pictures of layouts show each token's owner, each tile's kind, and the work of each rank in each step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex, to_rgb

from ringlab.cost.flops import layout_work
from ringlab.layout import Layout, contiguous, striped, zigzag
from ringlab.plan import work
from ringlab.viz.style import rank_colour
from ringlab_course.figures import layout_view, load_mosaic
from ringlab_course.figures.layout_tiles import FULL, LAYOUTS, PARTIAL, SKIP, owners, tiles_of
from ringlab_course.figures.load_mosaic import mosaic

pytestmark = pytest.mark.thorough

THREE = [contiguous(32, 4), striped(32, 4), zigzag(32, 4)]
SIZES = st.tuples(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 40), st.integers(1, 5), st.integers(1, 9))


def local_mask(layout: Layout) -> np.ndarray:
    """Return the causal mask with its rows and columns in the order of the ranks' local tokens."""
    order = np.concatenate([layout.positions(rank) for rank in range(layout.P)])
    return np.greater_equal.outer(order, order)


@given(SIZES)
def test_every_tile_is_what_the_mask_makes_of_it(drawn) -> None:
    name, S, P, tile = drawn
    layout = LAYOUTS[name](S, P)
    picture, mask = tiles_of(layout, tile), local_mask(layout)
    for i, (top, bottom) in enumerate(zip(picture.bounds, picture.bounds[1:], strict=False)):
        for j, (left, right) in enumerate(zip(picture.bounds, picture.bounds[1:], strict=False)):
            part = mask[top:bottom, left:right]
            kind = SKIP if not part.any() else FULL if part.all() else PARTIAL
            assert picture.kinds[i, j] == kind and picture.sizes[i, j] == part.size
            assert picture.visible[i, j] == part.sum()


@given(SIZES)
def test_tiles_never_cross_ranks_and_are_never_larger(drawn) -> None:
    name, S, P, tile = drawn
    layout = LAYOUTS[name](S, P)
    picture = tiles_of(layout, tile)
    assert np.diff(picture.bounds).max() <= tile
    assert set(np.cumsum([layout.length(r) for r in range(P)])) <= set(picture.bounds)
    for rank in range(P):
        assert np.diff(picture.bounds)[picture.owner == rank].sum() == layout.length(rank)


@given(SIZES)
def test_tiles_of_one_score_are_the_exact_plan(drawn) -> None:
    name, S, P, _ = drawn
    layout = LAYOUTS[name](S, P)
    exact = [sum(work(layout, rank, origin) for origin in range(P)) for rank in range(P)]
    picture = tiles_of(layout, 1)
    assert picture.computed.tolist() == exact and picture.count(PARTIAL) == 0 and picture.overhead == 1


def test_facts_about_coarse_tiles() -> None:
    """With S = 2048, P = 8, tiles of 128, striped computes 0.75 of an unmasked share, zig-zag 0.53 of it."""
    share = {n: tiles_of(LAYOUTS[n](2048, 8), 128).computed / (2048 * 2048 / 8) for n in LAYOUTS}
    assert share["striped"].max() == 0.75
    assert share["zig-zag"].max() == pytest.approx(0.53, abs=0.005)
    assert share["contiguous"].max() == pytest.approx(0.97, abs=0.005)


@pytest.mark.parametrize("name", LAYOUTS)
def test_documents_hide_each_other(name) -> None:
    layout, lengths = LAYOUTS[name](30, 3), [7, 1, 22]
    positions = np.concatenate([layout.positions(rank) for rank in range(3)])
    document = np.repeat([0, 1, 2], lengths)[positions]
    visible = local_mask(layout) & np.equal.outer(document, document)
    assert tiles_of(layout, 4, documents=lengths).visible.sum() == visible.sum()


def test_without_a_mask_all_is_full() -> None:
    assert tiles_of(striped(20, 3), 3, causal=False).count(FULL) == tiles_of(striped(20, 3), 3).kinds.size


def test_no_rank_has_the_colour_of_a_kind_of_tile() -> None:
    """No colour has two meanings in one picture, and the kinds of tiles differ in lightness, for print."""
    faces = [to_hex(look["facecolor"]).upper() for look in layout_view.LOOKS.values()]
    assert not {rank_colour(rank).upper() for rank in range(8)} & set(faces)
    light = sorted(sum(int(face[i : i + 2], 16) for i in (1, 3, 5)) / 3 for face in faces)
    assert light[1] - light[0] > 60 and light[2] - light[1] > 60


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_strip_gives_every_token_to_its_owner(name) -> None:
    layout = LAYOUTS[name](48, 4)
    strip = layout_view.figure([layout]).axes[0]
    owner = np.full(48, -1)
    for bar in strip.patches:
        colour = to_hex(bar.get_facecolor()).upper()
        ranks = [rank for rank in range(4) if rank_colour(rank).upper() == colour]
        owner[round(bar.get_x()) : round(bar.get_x() + bar.get_width())] = ranks[0]
    assert owner.tolist() == owners(layout).tolist()
    for rank in range(4):
        assert (owner[layout.positions(rank)] == rank).all()
    for text in strip.texts:
        assert owner[int(text.get_position()[0])] == int(text.get_text())


def cells(ax) -> dict[tuple[int, int], tuple[float, ...]]:
    """Return the colour of every cell, with (rank, column) as the key."""
    boxes = [p for p in ax.patches if str(p.get_gid()).startswith("cell")]
    return {(int(p.get_y()), int(p.get_x())): p.get_facecolor()[:3] for p in boxes}


def numbers(ax) -> dict[tuple[int, int], str]:
    """Return the texts inside the axes, with the (row, column) of their cell as the key."""
    return {(int(t.get_position()[1]), int(t.get_position()[0])): t.get_text() for t in ax.texts}


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
    assert ax.get_title(loc="left") == "contiguous", "only a picture by step has the ratio in its title"
    for rank in range(4):
        for origin in range(4):
            assert shown[rank, origin] == str(work(layout, rank, origin))


def test_darker_is_more_and_one_scale_holds_for_all_panels() -> None:
    figure = load_mosaic.figure(THREE)
    shade = {}
    for ax, layout in zip(figure.axes, THREE, strict=True):
        for (rank, step), colour in cells(ax).items():
            shade.setdefault(int(layout_work(layout)[rank, step]), set()).add(colour)
    assert all(len(colours) == 1 for colours in shade.values())
    order = [sum(to_rgb(next(iter(shade[value])))) for value in sorted(shade)]
    assert order == sorted(order, reverse=True) and len(set(order)) == len(order)


def test_titles_give_the_published_ratios() -> None:
    """For S = 32k, P = 8 and tiles of 128 the titles give the ratios 1.88, 1.031 and 1.004."""
    layouts = [LAYOUTS[name](32_768, 8) for name in ("contiguous", "striped", "zig-zag")]
    titles = [ax.get_title(loc="left") for ax in load_mosaic.figure(layouts, 128).axes[:3]]
    assert [title.split("\n")[1].split(" ×")[0] for title in titles] == ["1.88", "1.03", "1.00"]
    assert [round(mosaic(layout, 128).ratio, 3) for layout in layouts][1:3] == [1.031, 1.004]


def test_nothing_to_compute_is_drawn_as_nothing() -> None:
    empty = contiguous(2, 4)
    shown = numbers(load_mosaic.figure(empty).axes[0])
    assert shown[3, 0] == "0" and np.array(layout_work(empty)).sum() == 3
