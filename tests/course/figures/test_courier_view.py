"""The couriers' picture shows the messages that were sent, so that a wrong backward ring makes a wrong picture."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ringlab import contiguous, striped
from ringlab.viz.style import png
from ringlab_course.figures import courier_view, side_by_side
from tests.viz.test_style import illegible

pytestmark = pytest.mark.thorough


def add(dout, q, k, v, lse, delta):
    weights = torch.exp(q @ k.mT * q.shape[-1] ** -0.5 - lse[..., None])
    dscores = weights * (dout @ v.mT - delta[..., None])
    return dscores @ k, dscores.mT @ q, weights.mT @ dout


def backward(ring, dout, q, k, v, out, lse, *, reverse=False, hops=None, adds=True, skips_own=False):
    """Run a backward ring with the mistakes that the caller chooses."""
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
    assert illegible(courier_view.figure(frames)) == []


@pytest.mark.parametrize("P", [2, 4])
def test_both_ways_bring_every_term_home_by_single_hops(P):
    """Autodiff over the reversed forward hops and the couriers of a backward ring both bring every term home."""
    back, around = side_by_side.ways_home(P).values()
    assert [rank for rank, _ in back] == list(reversed(range(P)))
    frames = courier_view.follow(backward, contiguous(2 * P, P))
    for frame, (rank, terms) in zip(frames, around, strict=True):
        assert tuple(np.flatnonzero(frame.sums[rank][:, 0])) == terms
    assert back[-1] == around[-1] == (0, tuple(range(P)))
    assert "once more around" in side_by_side.describe_two_ways(P)
