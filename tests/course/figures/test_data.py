"""The data of figures equal ringlab's own counts, masks and costs, and a wrong ring makes a wrong picture.

test_pictures.py tests that pictures can be read and that their words carry their numbers.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringlab import VirtualCluster, contiguous, ring_attention, striped
from ringlab.comm.trace import Trace
from ringlab.cost.sizes import Attention, element_bytes
from ringlab.cost.traffic import block_s, hop_s, least_tokens_hidden
from ringlab.layout import Layout
from ringlab.merge import Partial, merge
from ringlab.plan import work
from ringlab.viz.style import png
from ringlab_course.figures import (
    courier_view,
    decision_map,
    error_curves,
    load_mosaic,
    ring_counts,
    ring_step,
    ring_view,
    side_by_side,
)
from ringlab_course.figures.decision_rules import (
    ALLGATHER,
    HIDDEN,
    HYBRID,
    NOTHING,
    RING,
    ULYSSES,
    Question,
    question,
)
from ringlab_course.figures.layout_tiles import FULL, LAYOUTS, PARTIAL, SKIP, tiles_of
from ringlab_course.figures.memory_ledger import GB, Layer
from ringlab_course.figures.online_softmax import stream
from ringlab_course.figures.overlap_view import MHA, overlap
from ringlab_course.figures.tile_scan import cuts, scan
from tests.viz.test_style import illegible

pytestmark = pytest.mark.thorough

SIZES = st.tuples(st.sampled_from(sorted(LAYOUTS)), st.integers(1, 40), st.integers(1, 5), st.integers(1, 9))


def attend(q, k, v):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    lse = torch.logsumexp(scores, dim=-1)
    return Partial(torch.exp(scores - lse[..., None]) @ v, lse)


def plain_ring(ring, q, k, v, *, forwards=True):
    """Run a ring. With `forwards=False` its ranks send their own block again and again."""
    own, state = (k, v), Partial.identity(q)
    for step in range(ring.world_size):
        state = merge(state, ring.compute(f"attend {step}", attend, q, k, v))
        if step < ring.world_size - 1:
            k, v = ring.shift(*((k, v) if forwards else own))
    return state.out, state.lse


def run(P: int) -> Trace:
    layout = contiguous(3 * P, P)
    qkv = tuple(torch.ones(1, 1, layout.S, 2) for _ in range(3))
    return VirtualCluster(P).run(lambda ring: plain_ring(ring, *layout.shard(qkv, ring.rank))).trace


@pytest.mark.parametrize("P", [1, 2, 8])
def test_a_ring_meets_every_pair_once_in_step_rank_minus_origin(P: int) -> None:
    trace = run(P)
    assert np.array_equal(ring_view.coverage(trace), np.ones((P, P)))
    rank, origin = np.indices((P, P))
    assert np.array_equal(ring_view.when(trace), (rank - origin) % P)
    assert len(ring_view.frames(trace)) == P


def test_pictures_of_rings_can_be_read() -> None:
    frames = courier_view.follow(backward, contiguous(6, 3))
    for picture in (ring_view.still(run(8), 7), ring_view.strip(run(5)), courier_view.figure(frames)):
        assert illegible(picture) == []


def test_what_a_run_lacks_is_lacking_in_its_picture() -> None:
    trace = run(4)
    lost, message = trace.computes(2)[1], trace.exchanges(2)[0]
    without = Trace(4, [event for event in trace.events if event is not lost])
    assert ring_view.coverage(without)[2, 1] == 0 and ring_view.coverage(without).sum() == 15
    from_3 = Trace(4, [replace(e, source=3) if e is message else e for e in trace.events])
    assert ring_view.frames(trace)[1].held == (3, 0, 1, 2)
    assert ring_view.frames(from_3)[1].held == (3, 0, None, 2)  # rank 3 never sent to rank 2
    fatter = Trace(4, [replace(e, bytes_sent=999) if e is message else e for e in trace.events])
    assert png(ring_view.strip(fatter)) != png(ring_view.strip(trace))


def test_counts_find_a_stale_block_that_the_trace_cannot_show() -> None:
    stale = ring_counts.counts(lambda *args: plain_ring(*args, forwards=False), contiguous(8, 4))
    expected = np.kron(np.eye(4) + 3 * np.eye(4, k=-1) + 3 * np.eye(4, k=3), np.ones((2, 2)))
    assert np.allclose(stale, expected)
    layout = striped(11, 4)

    def causal(ring, q, k, v):
        return ring_attention(q, k, v, ring=ring, layout=layout, causal=True, return_lse=True)

    assert np.allclose(ring_counts.counts(causal, layout), np.tril(np.ones((11, 11))))


def backward(ring, dout, q, k, v, out, lse, *, reverse=False):
    """Run a backward ring. With `reverse=True` its couriers go the wrong way."""
    P, courier = ring.world_size, None
    for step in range(P):
        blocks = ring.post(k, v, tag=f"kv {step}") if step < P - 1 else None
        weights = torch.exp(q @ k.mT * q.shape[-1] ** -0.5 - lse[..., None])
        dscores = weights * (dout @ v.mT - (dout * out).sum(-1)[..., None])
        dk, dv = dscores.mT @ q, weights.mT @ dout
        if courier is not None:
            dk, dv = (before + own for before, own in zip(courier.wait(), (dk, dv), strict=True))
        to, source = (ring.previous, ring.next) if reverse else (ring.next, ring.previous)
        into = torch.empty_like(dk), torch.empty_like(dv)
        courier = ring.comm.exchange(send=(dk, dv), to=to, receive=into, source=source, tag=f"dkv {step}")
        if blocks is not None:
            k, v = blocks.wait()
    return dscores @ k, *courier.wait()


@pytest.mark.parametrize("P", [2, 4])
def test_couriers_bring_every_contribution_home_or_are_seen_to_go_astray(P: int) -> None:
    frames = courier_view.follow(backward, contiguous(2 * P, P))
    assert len(frames) == P + 1 and frames[-1].home
    for rank, sums in enumerate(frames[-1].sums):
        assert np.array_equal(sums, np.ones((P, 1), int) * (np.arange(P) == rank))
    assert not any(courier_view.astray(frame, rank) for frame in frames for rank in range(P))
    back, around = side_by_side.ways_home(P).values()
    for frame, (rank, terms) in zip(frames, around, strict=True):
        assert tuple(np.flatnonzero(frame.sums[rank][:, 0])) == terms
    assert back[-1] == around[-1] == (0, tuple(range(P)))
    wrong = courier_view.follow(lambda *args: backward(*args, reverse=True), contiguous(2 * P, P))
    assert any(courier_view.astray(frame, 0) for frame in wrong) == (P > 2)


@given(SIZES)
def test_tiles_of_a_layout_are_what_the_mask_makes_of_them(drawn) -> None:
    name, S, P, tile = drawn
    layout = LAYOUTS[name](S, P)
    order = np.concatenate([layout.positions(rank) for rank in range(P)])
    picture, mask = tiles_of(layout, tile), np.greater_equal.outer(order, order)
    for i, (top, bottom) in enumerate(zip(picture.bounds, picture.bounds[1:], strict=False)):
        for j, (left, right) in enumerate(zip(picture.bounds, picture.bounds[1:], strict=False)):
            part = mask[top:bottom, left:right]
            kind = SKIP if not part.any() else FULL if part.all() else PARTIAL
            assert picture.kinds[i, j] == kind and picture.visible[i, j] == part.sum()
    assert load_mosaic.mosaic(layout, tile).totals.tolist() == picture.computed.tolist()
    plan = [[work(layout, rank, (rank - step) % P) for step in range(P)] for rank in range(P)]
    assert load_mosaic.mosaic(layout).work.tolist() == plan


@pytest.mark.parametrize("name", ring_step.LAYOUTS)
@given(st.tuples(st.integers(1, 90), st.integers(1, 5)), st.data())
def test_tiles_of_a_ring_step_are_what_the_position_mask_makes_of_them(name, size, data) -> None:
    layout: Layout = ring_step.LAYOUTS[name](*size)
    rank, step = (data.draw(st.integers(0, layout.P - 1)) for _ in range(2))
    picture = ring_step.step_picture(layout, rank, step, 8, 8)
    mask = layout.positions(picture.rank)[:, None] >= layout.positions(picture.origin)[None, :]
    visited = np.zeros((picture.rows, picture.keys), int)
    for program in picture.programs:
        for visit in program.visits:
            box = slice(program.row_start, program.row_stop), slice(visit.k_start, visit.k_stop)
            visited[box] += 1
            assert visit.kind != "full" or mask[box].all()
    assert visited.max(initial=0) <= 1
    assert not (mask & (visited == 0)).any(), "no program visits a visible pair"


@given(
    st.tuples(st.integers(1, 60), st.integers(1, 20)),
    st.booleans(),
    st.sampled_from(("forward", "backward")),
)
def test_a_tile_scan_computes_each_visible_tile_once(size, causal: bool, direction: str) -> None:
    S, tile = size
    picture, spans = scan(S, tile, 4, causal=causal, direction=direction), cuts(S, tile)
    assert [i for start, stop in spans for i in range(start, stop)] == list(range(S))
    mask = np.tri(S, dtype=bool) if causal else np.ones((S, S), dtype=bool)
    wanted = {
        (i, j) for i, q in enumerate(spans) for j, k in enumerate(spans) if mask[slice(*q), slice(*k)].any()
    }
    done = [(step.q_tile, step.k_tile) for step in picture.steps]
    assert len(done) == len(set(done)) and set(done) == wanted


@given(st.lists(st.floats(-50, 50) | st.just(-math.inf), min_size=1, max_size=20), st.integers(1, 7))
def test_after_every_block_the_state_is_the_softmax_of_what_was_seen(numbers, block: int) -> None:
    scores, values = np.array(numbers), np.arange(len(numbers), dtype=float)
    for step in stream(scores, values, block):
        seen = slice(0, (step.block + 1) * block)
        lse = float(np.logaddexp.reduce(scores[seen]))
        out = float(np.exp(scores[seen] - lse) @ values[seen]) if np.isfinite(lse) else 0.0
        assert (step.lse, step.out) == (pytest.approx(lse, abs=1e-9), pytest.approx(out, abs=1e-9))


@pytest.mark.parametrize("layer", [Layer(), Layer(heads=6, kv_heads=3, head_dim=5, itemsize=4, batch=2)])
def test_the_ledger_counts_the_bytes_of_real_arrays(layer: Layer) -> None:
    S, dtype = 7, np.dtype(f"f{layer.itemsize}")
    q = np.zeros((layer.batch, layer.heads, S, layer.head_dim), dtype)
    k = np.zeros((layer.batch, layer.kv_heads, S, layer.head_dim), dtype)
    scores = q @ np.repeat(k, layer.heads // layer.kv_heads, 1).swapaxes(-1, -2)
    assert layer.ledger(S) == {
        "q": q.nbytes, "k and v": 2 * k.nbytes, "scores": scores.nbytes, "weights": scores.nbytes, "out": q.nbytes,
    }  # fmt: skip
    longest = layer.largest_sequence(80 * GB)
    assert sum(layer.ledger(longest).values()) <= 80 * GB < sum(layer.ledger(longest + 1).values())


@given(
    st.tuples(st.sampled_from([64, 1024, 20_000]), st.floats(1e12, 1e15), st.floats(1e9, 1e12)),
    st.integers(2, 6),
    st.sampled_from([MHA, replace(MHA, K=4), replace(MHA, causal=True), replace(MHA, dtype="float32", H=64)]),
)
def test_a_simulated_ring_is_blocks_and_the_hops_that_stand_out(rates, P, sizes) -> None:
    """The makespan is P blocks and P − 1 exposed parts. If causal, it is up to 2 % off: the first block is longer."""
    c, F, B = rates
    seen = overlap(c, F, B, P, sizes)
    block, hop = block_s(sizes, c, F), hop_s(sizes, c, B)
    expected = max(0.0, hop - block) * (P - 1) + P * block
    assert seen.makespan_s == pytest.approx(expected, rel=0.02 if sizes.causal else 1e-9)
    assert seen.threshold == least_tokens_hidden(F, B, sizes) and seen.hidden == (hop <= block * (1 + 1e-12))


QUESTIONS = st.builds(
    Question,
    st.builds(
        Attention,
        H=st.just(32),
        K=st.sampled_from([1, 4, 32]),
        D=st.sampled_from([64, 128]),
        dtype=st.sampled_from(["bfloat16", "float32"]),
        causal=st.booleans(),
    ),
    st.sampled_from([2, 8, 64]),
    st.sampled_from([1e12, 1e15]),
    st.sampled_from([0.0, 1e-5]),
    st.just(80e9),
    st.just(False),
)


def seconds(asked: Question, c: int, B: float) -> dict[int, float]:
    """Return the seconds that each schedule exposes, by formulas written for this test."""
    a, P, e = asked.sizes, asked.P, element_bytes(asked.sizes.dtype)
    block = 4 * a.H * a.D * c * c / asked.F / (2 if a.causal else 1)
    kv = 2 * a.K * a.D * e * c / B
    found = {
        RING: (P - 1) * max(0.0, asked.latency_s + kv - block),
        ALLGATHER: 2 * asked.latency_s + (P - 1) * kv,
    }
    if a.H % P == 0:
        q, k = a.H // P, max(1, a.K // P)
        found[ULYSSES] = (P - 1) * c * a.D * e * (2 * q + 2 * k) / B + 2 * asked.latency_s
    return found


@given(QUESTIONS, st.tuples(st.integers(32, 2**20), st.floats(1e8, 2e12)))
def test_the_decision_map_shows_the_least_exposed_schedule_of_those_that_fit(asked, point) -> None:
    best, expected = asked.best(*point), seconds(asked, *point)
    assert set(asked.choices) == set(expected)
    for kind, value in expected.items():
        assert asked.exposed(kind, *point) == pytest.approx(value, rel=1e-9, abs=1e-12)
    fitting = {
        kind: s for kind, s in expected.items() if asked.needs_bytes(kind, point[0]) <= asked.memory_bytes
    }
    if best == NOTHING:
        assert not fitting
    elif best == HIDDEN:
        assert expected[RING] < 1e-12 and RING in fitting
    else:
        assert expected[best] <= min(fitting.values()) * (1 + 1e-9) and best in fitting


def test_rows_win_where_a_ring_of_them_hides() -> None:
    """A ring of rows has more work to hide a hop than a plain ring: it is best at 0.6 of the plain ring's threshold."""
    grouped = Attention(H=64, K=8)
    asked = question(grouped, "h100", 16, hybrids=True)
    at = asked.threshold(50e9)
    assert asked.best(int(0.6 * at), 50e9) == HYBRID and asked.best(int(1.01 * at) + 1, 50e9) == HIDDEN
    assert HYBRID not in question(grouped, "h100", 16).choices
    assert set(decision_map.WORDS) == set(decision_map.COLOURS)


def test_every_fault_leaves_its_own_mark() -> None:
    found = {name: error_curves.curves(name, (1, 2, 8, 32), rows=16) for name in error_curves.FAULTS}
    sound = found.pop("sound")
    for name, curve in found.items():
        unlike = [
            not math.isfinite(bad) or bad > 1.25 * good
            for probe in error_curves.PROBES
            for bad, good in zip(curve[probe], sound[probe], strict=True)
        ]
        assert any(unlike) != (name == "arrival order"), name
        assert (max(curve["repeat"]) > 0) == (name == "arrival order"), name
