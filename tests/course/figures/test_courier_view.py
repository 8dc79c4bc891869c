"""The couriers' picture shows what was sent: a wrong backward ring makes a wrong picture.

The picture of one ring step says what the position mask says, tile by tile; bytes are counted launch by launch.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringlab import contiguous, striped, zigzag
from ringlab.errors import CommError
from ringlab.viz.style import png
from ringlab_course.figures import courier_view, ring_step, side_by_side, step_report
from ringlab_course.figures.ring_step import LAYOUTS, StepPicture, describe, layouts_at, step_picture


def add(dout, q, k, v, lse, delta):
    weights = torch.exp(q @ k.mT * q.shape[-1] ** -0.5 - lse[..., None])
    dscores = weights * (dout @ v.mT - delta[..., None])
    return dscores @ k, dscores.mT @ q, weights.mT @ dout


def backward(ring, dout, q, k, v, out, lse, *, reverse=False, hops=None, adds=True, skips_own=False):
    """A backward ring with the mistakes one may ask for."""
    P, courier = ring.world_size, None
    hops = P if hops is None else hops
    for step in range(P):
        blocks = ring.post(k, v, tag=f"kv {step}") if step < P - 1 else None
        dq, dk, dv = add(dout, q, k, v, lse, (dout * out).sum(-1))
        if step == 0 and skips_own:
            dk, dv = 0 * dk, 0 * dv
        if courier is not None:
            before = courier.wait()
            dk, dv = (b + adds * own for b, own in zip(before, (dk, dv), strict=True))
        if step < hops:
            to, source = (ring.previous, ring.next) if reverse else (ring.next, ring.previous)
            into = torch.empty_like(dk), torch.empty_like(dv)
            courier = ring.comm.exchange(send=(dk, dv), to=to, receive=into, source=source, tag=f"dkv {step}")
        if blocks is not None:
            k, v = blocks.wait()
    return dq, *(courier.wait() if hops == P else (dk, dv))


def follow(P, layout=contiguous, **mistakes):
    return courier_view.follow(lambda *args: backward(*args, **mistakes), layout(2 * P, P))


@pytest.mark.parametrize("P", [2, 3, 4, 6])
@pytest.mark.parametrize("layout", [contiguous, striped])
def test_a_right_ring_collects_one_more_contribution_a_step_and_all_come_home(P, layout):
    frames = follow(P, layout)
    assert len(frames) == P + 1 and frames[-1].home
    for step, frame in enumerate(frames[:-1]):
        for rank in range(P):
            owner = (rank - step) % P
            expected = np.zeros((P, P), dtype=int)
            expected[[(owner + t) % P for t in range(step + 1)], owner] = 1
            assert frame.held[rank] == owner and frame.to[rank] == (rank + 1) % P
            assert np.array_equal(frame.sums[rank], expected)
    for rank, sums in enumerate(frames[-1].sums):
        assert np.array_equal(sums, np.ones((P, 1), int) * (np.arange(P) == rank))
    assert not any(courier_view.astray(frame, rank) for frame in frames for rank in range(P))


def test_couriers_that_go_the_other_way_collect_gradients_of_other_blocks_unless_there_are_two_ranks():
    frames = follow(4, reverse=True)
    assert frames[0].to == (3, 0, 1, 2)
    assert all(courier_view.astray(frame, rank) for frame in frames[1:] for rank in range(4))
    assert "returns dK/dV 0 from 0, 2 and dK/dV 2 from 1, 3" in frames[-1].describe()
    pair = follow(2, reverse=True)
    assert not any(courier_view.astray(frame, rank) for frame in pair for rank in range(2))


def test_a_last_hop_left_out_leaves_every_sum_with_the_neighbour():
    frames = follow(4, hops=3)
    last = frames[-1]
    assert [int(np.flatnonzero(sums.any(axis=0))[0]) for sums in last.sums] == [1, 2, 3, 0]
    assert all(courier_view.astray(last, rank) for rank in range(4))
    assert not any(courier_view.astray(frame, rank) for frame in frames[:-1] for rank in range(4))


def test_what_is_not_added_is_not_shown():
    assert follow(3, adds=False)[-1].sums[1].tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert follow(3, skips_own=True)[-1].sums[1].tolist() == [[0, 1, 0], [0, 0, 0], [0, 1, 0]]
    assert "Rank 0, with K/V 0, sends an empty sum to rank 1." in follow(3, skips_own=True)[0].describe()


def test_the_figure_has_a_number_for_every_contribution_and_follows_the_run():
    frames = follow(3)
    (ax,) = courier_view.figure(frames, "three ranks").axes
    shown = [text.get_text() for text in ax.texts]
    assert [shown.count(str(owner)) for owner in range(3)] == [1 + 2 + 3 + 3] * 3
    assert [shown.count(f"K/V {owner} here") for owner in range(3)] == [3, 3, 3]
    assert png(courier_view.figure(frames)) != png(courier_view.figure(follow(3, reverse=True)))
    assert png(courier_view.figure(frames, upto=1)) != png(courier_view.figure(frames))


def test_each_picture_of_the_player_tells_what_it_shows():
    frames = follow(3)
    pictures = courier_view.pictures(frames)
    assert len(pictures) == 4
    for step, picture in enumerate(pictures):
        assert ("At the end:" if step == 3 else f"Step {step}:") in picture


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(CommError, match="at most 6 ranks"):
        follow(7)
    with pytest.raises(CommError, match="each with a token"):
        courier_view.follow(backward, contiguous(2, 3))


NAMES = tuple(LAYOUTS)
SIZES = st.tuples(st.integers(1, 90), st.integers(1, 5))


def seen(picture: StepPicture, layout) -> np.ndarray:
    """Return the mask by positions of this step's rows and keys."""
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
    assert not (mask & (visited == 0)).any(), "a visible pair that no program visits"


@given(SIZES, st.sampled_from(NAMES))
def test_programs_own_each_row_once_at_both_ends(size, name) -> None:
    layout = LAYOUTS[name](*size)
    for step in {0, layout.P - 1}:
        picture = step_picture(layout, 0, step, 8, 8)
        owned = [row for p in picture.programs for row in range(p.row_start, p.row_stop)]
        assert sorted(owned) == list(range(picture.rows)) and picture.rows_without_program == 0


def test_counts_of_the_four_layouts() -> None:
    """S = 1024, P = 4, tiles of 64, rank 1 in step 1: 16 tiles in all."""
    found = {p.layout: (p.count("full"), p.count("masked"), p.skipped) for p in layouts_at(1024, 4, 1, 1)}
    by_hand = {
        "contiguous": (16, 0, 0),
        "striped": (6, 4, 6),
        "zig-zag": (8, 0, 8),
        "token fold": (4, 8, 4),
    }
    assert {name: found[name] for name in by_hand} == by_hand


def test_a_single_row_without_a_program_is_no_row_of_tiles() -> None:
    """In step 2 the first row of striped and of token fold sees no key; the picture still has 16 tiles."""
    for picture in layouts_at(1024, 4, 1, 2):
        assert picture.count("full") + picture.count("masked") + picture.skipped == 16, picture.layout


def test_a_zigzag_masks_its_own_diagonal_and_nothing_else() -> None:
    for rank in range(4):
        masked = [step_picture(LAYOUTS["zig-zag"](1024, 4), rank, s).count("masked") for s in range(4)]
        assert masked == [4, 0, 0, 0]


def test_rows_that_see_nothing_have_no_program_between_the_ends() -> None:
    """Contiguous, rank 0: its only useful block is its own."""
    middle = step_picture(LAYOUTS["contiguous"](64, 4), 0, 1, 8, 8)
    assert middle.programs == () and middle.rows_without_program == 16 and middle.skipped == 4
    assert "No program runs, 4 tiles are skipped" in describe(middle)
    last = step_picture(LAYOUTS["contiguous"](64, 4), 0, 3, 8, 8)
    assert len(last.programs) == 2 and last.count("full") == last.count("masked") == 0


def test_the_words_count_the_rows_without_a_program() -> None:
    found = {p.layout: describe(p) for p in layouts_at(1024, 4, 1, 2)}
    assert found["zig-zag"].endswith(" 128 rows have no program.")
    assert found["striped"].endswith(" 1 row has no program.")


def test_without_a_mask_all_is_full() -> None:
    picture = step_picture(LAYOUTS["striped"](64, 2), 1, 1, 8, 8, causal=False)
    assert (picture.count("full"), picture.count("masked"), picture.skipped) == (16, 0, 0)


def test_the_words_carry_the_numbers_of_the_picture() -> None:
    words = describe(layouts_at(1024, 4, 1, 1)[1])
    for part in ("striped, rank 1, step 1", "256 keys of rank 0", "6 full tiles", "4 masked", "6 skipped"):
        assert part in words


def test_every_layout_has_its_axes_and_every_visit_its_box() -> None:
    pictures = layouts_at(256, 2, 1, 0)
    figure = ring_step.grid(pictures)
    assert len(figure.axes) == len(pictures)
    for ax, picture in zip(figure.axes, pictures, strict=True):
        assert len(ax.patches) == 1 + picture.count("full") + picture.count("masked")


def test_rows_without_tiles_say_whether_they_have_a_program() -> None:
    """Zig-zag, rank 1 of 4: in step 2 the early rows have no program, in the last step one without keys."""
    middle, last = (step_picture(LAYOUTS["zig-zag"](512, 4), 1, step) for step in (2, 3))
    assert middle.rows_without_tiles() == [(0, 64, "no program")]
    assert last.rows_without_tiles() == [(0, 64, "program without keys")]
    shown = [[text.get_text() for text in ax.texts] for ax in ring_step.grid([middle, last]).axes]
    assert shown == [["no program"], ["program without keys"]]
    none = step_picture(LAYOUTS["contiguous"](64, 4), 0, 1, 8, 8)
    assert none.rows_without_tiles() == [(0, 16, "no program")]


def test_a_row_of_steps_names_each_step_and_its_title_none() -> None:
    pictures = [step_picture(zigzag(256, 2), 1, step, name="zig-zag") for step in (0, 1)]
    figure = ring_step.grid(pictures)
    assert [ax.get_title(loc="left").split("\n")[0] for ax in figure.axes] == [
        "zig-zag, step 0",
        "zig-zag, step 1",
    ]
    assert ring_step.describe_grid(pictures).startswith("Rank 1 of 2, 256 tokens, causal")


def test_bytes_of_rows_are_added_up_launch_by_launch() -> None:
    def access(program: int, kind: str, argument: str, count: int) -> SimpleNamespace:
        return SimpleNamespace(program=(program, 0, 0), kind=kind, argument=argument, offsets=range(count))

    one = [access(0, "load", "Q", 9), access(0, "load", "ACC", 3), access(0, "store", "ACC", 2)]
    one += [access(1, "load", "K", 9), access(1, "store", "M", 1)]
    two = [access(0, "load", "SEGMENTS", 9), access(0, "store", "OUT", 5), access(1, "load", "TOTAL", 1)]
    assert step_report.moved(one + two) == [(12, 12), (4, 10)]
    assert step_report.moved([]) == []


def test_sliders_move_the_picture_and_its_words() -> None:
    pytest.importorskip("ipywidgets")
    widget = ring_step.player(S=128, P=4, block_m=16, block_n=16)
    (step, rank), picture = widget.children[0].children, widget.children[1]
    before = picture.value
    step.value, rank.value = 3, 2
    assert picture.value != before and '<img alt="Rank 2 of 4 in step 3' in picture.value


@pytest.mark.parametrize("P", [2, 4])
def test_both_ways_bring_every_term_home_by_single_hops(P):
    """Autodiff over the reversed hops of the forward; couriers as a real backward ring sends them."""
    back, around = side_by_side.ways_home(P).values()
    assert [rank for rank, _ in back] == list(reversed(range(P)))
    frames = courier_view.follow(backward, contiguous(2 * P, P))
    for frame, (rank, terms) in zip(frames, around, strict=True):
        assert tuple(np.flatnonzero(frame.sums[rank][:, 0])) == terms
    assert back[-1] == around[-1] == (0, tuple(range(P)))
    assert "once more around" in side_by_side.describe_two_ways(P)


def test_the_timeline_of_a_rank_has_its_couriers_below_its_blocks():
    from ringlab import VirtualCluster
    from tests.viz.test_style import illegible

    def program(ring):
        dk = torch.ones(2)
        for step in range(2):
            ring.compute(f"attend backward {step}", torch.neg, dk)
            courier = ring.post(dk, tag=f"dkv {step}")
            blocks = ring.post(dk, tag=f"kv {step}")
            courier.wait(), blocks.wait()

    traces = {"a run": VirtualCluster(2).run(program).trace}
    figure = courier_view.lanes(traces)
    (ax,) = figure.axes
    rows = {text.get_text() + str(int(text.get_position()[1])) for text in ax.texts}
    assert {"00", "10", "01", "11", "02", "12"} == rows and illegible(figure) == []
    words = courier_view.describe_lanes(traces)
    assert "computes 2 in all" in words and "couriers in transit 1 to 1.5, 2.5 to 3" in words
