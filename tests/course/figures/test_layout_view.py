"""The picture of layouts says whose each token is, and what the position mask makes of each tile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex

from ringlab.errors import LayoutError
from ringlab.layout import Layout, contiguous, striped, zigzag
from ringlab.plan import work
from ringlab.viz.frontend import FRAMES
from ringlab.viz.style import rank_colour
from ringlab_course.figures import layout_view
from ringlab_course.figures.layout_tiles import FULL, LAYOUTS, PARTIAL, SKIP, owners, tiles_of
from tests.viz.test_style import illegible

SIZES = st.tuples(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 40), st.integers(1, 5), st.integers(1, 9))


def local_mask(layout: Layout) -> np.ndarray:
    """Return the causal mask by positions, rank after rank in local order."""
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
    """S = 2048, P = 8, tiles of 128: all of the work there is: striped 0.75, zig-zag 0.53. Facts, section 2."""
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


def boxes(ax, word: str) -> set[tuple[float, ...]]:
    (collection,) = [c for c in ax.collections if c.get_gid() == word]
    return {tuple(path.get_extents().extents) for path in collection.get_paths()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_boxes_drawn_are_the_tiles(name) -> None:
    layout = LAYOUTS[name](26, 3)
    picture, ax = tiles_of(layout, 4), layout_view.figure([layout], 4).axes[1]
    for kind, word in layout_view.WORDS.items():
        b = picture.bounds
        expected = {(b[j], b[i], b[j + 1], b[i + 1]) for i, j in np.argwhere(picture.kinds == kind)}
        assert boxes(ax, word) == expected
    assert ax.get_ylim() == (26, 0) and ax.get_xlim() == (0, 26)


def test_no_rank_has_the_colour_of_a_kind_of_tile() -> None:
    """A colour means one thing in one picture; and the kinds differ in lightness, for print."""
    faces = [to_hex(look["facecolor"]).upper() for look in layout_view.LOOKS.values()]
    assert not {rank_colour(rank).upper() for rank in range(8)} & set(faces)
    light = sorted(sum(int(face[i : i + 2], 16) for i in (1, 3, 5)) / 3 for face in faces)
    assert light[1] - light[0] > 60 and light[2] - light[1] > 60


def test_a_layout_with_two_ranks_changed_over_is_another_picture() -> None:
    layout = contiguous(24, 3)
    wrong = Layout(24, 3, "contiguous", (layout.ranks[1], layout.ranks[0], layout.ranks[2]))
    right, other = (layout_view.figure([one], 4).axes for one in (layout, wrong))
    full = layout_view.WORDS[FULL]
    assert boxes(right[1], full) != boxes(other[1], full)
    assert [t.get_text() for t in right[0].texts] == ["0", "1", "2"]
    assert [t.get_text() for t in other[0].texts] == ["1", "0", "2"]


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


def test_pieces_too_thin_to_see_are_named() -> None:
    figure = layout_view.figure([striped(2048, 4), zigzag(2048, 4)], 128)
    assert [t.get_text() for t in figure.axes[0].texts] == [
        "dealt in turn to ranks 0, 1, 2, 3, 0, 1, 2, 3, 0, …"
    ]


@pytest.mark.parametrize(
    ("S", "P", "tile", "names", "documents"),
    [
        (64, 4, 4, ("contiguous", "striped", "zig-zag"), None),
        (2048, 8, 128, tuple(LAYOUTS)[:4], None),
        (64, 4, 4, tuple(LAYOUTS)[:4], [10, 30, 4, 20]),
        (30, 1, 8, ("striped",), None),
    ],
)
def test_every_word_can_be_read(S, P, tile, names, documents) -> None:
    figure = layout_view.figure([LAYOUTS[n](S, P) for n in names], tile, documents=documents)
    assert illegible(figure) == []


def test_the_words_carry_the_numbers() -> None:
    words = layout_view.describe([contiguous(64, 4), striped(64, 4)], 4)
    for part in ("64 tokens on 4 ranks", "tiles of 4 × 4", "first 0, 4, 8, 12", "64 partly masked",
                 "the busiest rank computes 928, the idlest 160"):  # fmt: skip
        assert part in words
    assert "2 documents of 10, 54" in layout_view.describe([striped(64, 4)], 4, documents=[10, 54])


@pytest.mark.parametrize(
    ("layout", "tile", "documents", "needed"),
    [
        (contiguous(8, 2), 0, None, "tile >= 1"),
        (contiguous(10_000, 2), 128, None, "1 to 8,192 tokens"),
        (contiguous(1024, 2), 1, None, "at most 256 tiles"),
        (contiguous(8, 2), 1, [3, 4], "add up to S=8"),
        (contiguous(8, 2), 1, [], "add up to S=8"),
    ],
)
def test_what_cannot_be_drawn_is_refused(layout, tile, documents, needed) -> None:
    with pytest.raises(LayoutError, match=needed):
        layout_view.figure([layout], tile, documents=documents)


def test_sliders_move_the_picture_and_its_words() -> None:
    pytest.importorskip("ipywidgets")
    box = layout_view.player(S=32, P=2)
    (tile, ranks), picture = box.children[0].children, box.children[1]
    seen = {picture.value}
    tile.value = 8
    seen.add(picture.value)
    ranks.value = 4
    assert len({*seen, picture.value}) == 3 and "32 tokens on 4 ranks, tiles of 8 × 8" in picture.value


def test_without_a_person_the_picture_of_the_middle_tile_is_shown_and_all_are_recorded(
    recorded: list[dict[str, Any]],
) -> None:
    layout_view.play(S=16, P=2, tiles=(2, 4, 8))
    (output,) = recorded
    assert "tiles of 4 × 4" in output["text/plain"]
    assert output["image/png"] in output[FRAMES]["pictures"][1]
    for tile, picture in zip(output[FRAMES]["names"], output[FRAMES]["pictures"], strict=True):
        assert f"tiles of {tile} × {tile}" in picture
