"""The ring's picture shows the events of the trace, so that a wrong run makes a wrong picture."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from ringlab import VirtualCluster, contiguous, ring_attention, striped
from ringlab.comm.trace import Exchange, Trace
from ringlab.errors import CommError
from ringlab.merge import Partial, merge
from ringlab.viz.style import png, rank_colour
from ringlab_course.figures import ring_counts, ring_view
from tests.viz.test_style import illegible

pytestmark = pytest.mark.thorough


def attend(q, k, v):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    lse = torch.logsumexp(scores, dim=-1)
    return Partial(torch.exp(scores - lse[..., None]) @ v, lse)


def plain_ring(ring, q, k, v, *, hops=None, posts=False, forwards=True):
    """Run a ring. The caller may ask for a wrong number of hops, or for ranks that do not pass blocks on."""
    hops = ring.world_size - 1 if hops is None else hops
    own, state = (k, v), Partial.identity(q)
    for step in range(hops + 1):
        work = ring.post(k, v) if posts and step < hops else None
        state = merge(state, ring.compute(f"attend {step}", attend, q, k, v))
        if work:
            k, v = work.wait()
        elif step < hops:
            k, v = ring.shift(*((k, v) if forwards else own))
    return state.out, state.lse


def run(P: int, tokens: int = 3, **keywords) -> Trace:
    layout = contiguous(tokens * P, P)
    qkv = tuple(torch.ones(1, 1, layout.S, 2) for _ in range(3))
    return (
        VirtualCluster(P).run(lambda ring: plain_ring(ring, *layout.shard(qkv, ring.rank), **keywords)).trace
    )


def without(trace: Trace, event) -> Trace:
    return Trace(trace.world_size, [e for e in trace.events if e is not event])


def replaced(trace: Trace, event, **changes) -> Trace:
    events = [dataclasses.replace(e, **changes) if e is event else e for e in trace.events]
    return Trace(trace.world_size, events)


@pytest.mark.parametrize("posts", [False, True])
@pytest.mark.parametrize("P", [1, 2, 3, 8])
def test_a_ring_meets_every_pair_once_in_step_rank_minus_origin(P: int, posts: bool) -> None:
    trace = run(P, posts=posts)
    assert np.array_equal(ring_view.coverage(trace), np.ones((P, P)))
    rank, origin = np.indices((P, P))
    assert np.array_equal(ring_view.when(trace), (rank - origin) % P)
    assert len(ring_view.frames(trace)) == P


def test_the_hops_of_a_frame_carry_the_bytes_of_the_trace() -> None:
    first, second, last = ring_view.frames(run(3, tokens=5))
    assert [(hop.source, hop.to, hop.origin, hop.nbytes) for hop in second.hops] == [
        (0, 1, 2, 80), (1, 2, 0, 80), (2, 0, 1, 80),
    ]  # fmt: skip
    assert first.held == (0, 1, 2) and last.held == (1, 2, 0) and last.hops == ()
    assert "Rank 1 attends to the K/V of rank 0 and sends it to rank 2 (80 bytes)." in second.describe()


def test_the_packages_own_ring_can_be_played_with_its_control_messages() -> None:
    layout = striped(12, 4)
    qkv = tuple(torch.randn(1, 1, 12, 4) for _ in range(3))
    trace = (
        VirtualCluster(4)
        .run(lambda ring: ring_attention(*layout.shard(qkv, ring.rank), ring=ring, layout=layout))
        .trace
    )
    assert trace.exchanges(control=True) != trace.exchanges()
    assert np.array_equal(ring_view.coverage(trace), np.ones((4, 4)))


def test_a_lost_computation_leaves_a_hole_in_the_picture() -> None:
    trace = run(4)
    lost = trace.computes(2)[1]
    coverage = ring_view.coverage(without(trace, lost))
    assert coverage[2, 1] == 0 and coverage.sum() == 15
    assert math.isnan(ring_view.when(without(trace, lost))[2, 1])


def test_a_message_from_another_source_changes_who_holds_what() -> None:
    trace = run(4)
    wrong = replaced(trace, trace.exchanges(2)[0], source=3)
    assert ring_view.frames(trace)[1].held == (3, 0, 1, 2)
    assert ring_view.frames(wrong)[1].held == (3, 0, None, 2)  # rank 3 never sent to rank 2
    assert ring_view.frames(wrong)[2].held[2] == 1  # the first message of rank 1 comes one step late
    assert ring_view.coverage(wrong)[2, 3] == 0
    assert "unknown" in ring_view.frames(wrong)[1].describe()


def test_bytes_in_the_picture_follow_the_trace() -> None:
    trace = run(2)
    fatter = replaced(trace, trace.exchanges(0)[0], bytes_sent=999)
    assert "999 bytes" in ring_view.describe(fatter) and "999 bytes" not in ring_view.describe(trace)
    assert png(ring_view.strip(fatter)) != png(ring_view.strip(trace))


def test_a_ring_that_goes_round_once_too_often_shows_pairs_met_twice() -> None:
    coverage = ring_view.coverage(run(3, hops=3))
    assert np.array_equal(coverage, np.ones((3, 3)) + np.eye(3))


def test_an_all_gather_is_no_ring() -> None:
    trace = VirtualCluster(3).run(lambda ring: ring.all_gather(torch.ones(2))).trace
    with pytest.raises(CommError, match="one neighbour"):
        ring_view.frames(trace)


def test_counts_find_a_stale_block_that_the_trace_cannot_show() -> None:
    layout = contiguous(8, 4)

    def stale(ring, q, k, v):
        return plain_ring(ring, q, k, v, forwards=False)

    counts = ring_counts.counts(stale, layout)
    expected = np.kron(np.eye(4) + 3 * np.eye(4, k=-1) + 3 * np.eye(4, k=3), np.ones((2, 2)))
    assert np.allclose(counts, expected)


def test_counts_of_the_causal_package_are_a_triangle() -> None:
    layout = striped(11, 4)

    def causal(ring, q, k, v):
        return ring_attention(q, k, v, ring=ring, layout=layout, causal=True, return_lse=True)

    assert np.allclose(ring_counts.counts(causal, layout), np.tril(np.ones((11, 11))))


def test_a_cells_number_is_its_step_and_its_colour_the_owners() -> None:
    figure = ring_view.still(run(3), 1)
    matrix = figure.axes[1]
    shown = {(round(t.get_position()[1]), round(t.get_position()[0])): t.get_text() for t in matrix.texts}
    assert shown == {(0, 0): "0", (1, 1): "0", (2, 2): "0", (0, 2): "1", (1, 0): "1", (2, 1): "1"}
    assert ring_view.owner_colour(2) == rank_colour(2) != ring_view.owner_colour(None)


def test_each_picture_of_the_player_tells_what_it_shows() -> None:
    trace = run(3)
    pictures = ring_view.pictures(trace)
    assert all(f'alt="Step {step}.' in picture for step, picture in enumerate(pictures))
    assert len(set(pictures)) == 3


def test_a_trace_without_exchanges_is_one_step() -> None:
    trace = run(1)
    assert not any(isinstance(event, Exchange) for event in trace.events)
    assert [frame.held for frame in ring_view.frames(trace)] == [(0,)]


@pytest.mark.parametrize("P", [1, 2, 5, 8])
def test_every_frame_and_the_strip_can_be_read(P: int) -> None:
    trace = run(P)
    for picture in (ring_view.still(trace, P - 1), ring_view.strip(trace)):
        assert illegible(picture) == []
