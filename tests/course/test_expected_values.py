"""What the checks of exercises expect equals masks, the oracle, the virtual clock and the package's costs.

A right answer passes its checks (test_submissions.py). These laws find a mistake that a check and its answers share.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from ringlab import VirtualCluster, oracle, ring_attention
from ringlab import layout as layouts
from ringlab.comm.virtual.cluster import Costs
from ringlab.cost.flops import imbalance as package_imbalance
from ringlab.cost.flops import layout_work
from ringlab.cost.models import model
from ringlab.cost.papers import striped_speedup
from ringlab.viz.lanes import Span, overlap
from ringlab_course.checking.answers import relative_error
from ringlab_course.checking.backward import problem, sum_over
from ringlab_course.checking.faults import Ended, Faults
from ringlab_course.checking.positions import same_sets
from ringlab_course.checking.virtual_ranks import run_virtual
from ringlab_course.exercises.e06_what_it_costs import makespan as e06_makespan
from ringlab_course.exercises.e06_what_it_costs import table as e06_table
from ringlab_course.exercises.e07_causal_imbalance import makespan as e07_makespan
from ringlab_course.exercises.e07_causal_imbalance import relation as e07_relation
from ringlab_course.exercises.e07_causal_imbalance import work as e07_work
from ringlab_course.exercises.e08_striped_and_zigzag.balance import imbalance
from ringlab_course.exercises.e08_striped_and_zigzag.deal import dealt
from ringlab_course.exercises.e08_striped_and_zigzag.packed import step_work
from ringlab_course.exercises.e08_striped_and_zigzag.tiles import counts
from ringlab_course.exercises.e09_backward_ring import traffic
from ringlab_course.exercises.e13_multi_gpu import lanes as e13_lanes
from ringlab_course.exercises.e14_training import loss as e14_loss
from ringlab_course.exercises.e15_choosing import decode as e15_decode
from ringlab_course.exercises.e17_ring_in_jax import couriers as e17_couriers
from ringlab_course.exercises.e17_ring_in_jax.cases import case, furthest, shuffled, walk
from ringlab_course.exercises.e21_capstone import parts

pytestmark = pytest.mark.thorough

SEEDS = st.integers(0, 2**32 - 1)
SECONDS = st.integers(0, 32).map(lambda n: n / 8)
RANKS = st.sampled_from((1, 2, 3, 8))
SIDES = st.integers(1, 9)


class Given(Costs):
    """Costs that read the virtual seconds of a run from two arrays."""

    def __init__(self, compute_s: np.ndarray, hop_s: np.ndarray) -> None:
        self.compute_s, self.hop_s = compute_s, hop_s

    def compute(self, rank, label, args):
        return self.compute_s[rank, int(label)]

    def message(self, source, to, nbytes):
        return self.hop_s[source]


def ring_of_steps(ring, overlapped: bool) -> float:
    """Run a ring whose ranks post their block before they compute, or after it, and return a rank's end."""
    x = torch.zeros(1)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = ring.post(x) if overlapped and not last else None
        ring.compute(f"{step}", torch.abs, x)
        if not last:
            (x,) = (work or ring.post(x)).wait()
    return ring.comm.now()


@given(st.data())
def test_06_and_07_makespans_are_what_the_virtual_clock_says(data) -> None:
    P = data.draw(st.integers(1, 5))
    compute_s = np.array(data.draw(st.lists(SECONDS, min_size=P * P, max_size=P * P))).reshape(P, P)
    hop_s = np.array(data.draw(st.lists(SECONDS, min_size=P, max_size=P)))
    for overlapped in (False, True):
        costs = Given(compute_s, hop_s)
        ends = VirtualCluster(P, memory=False, costs=costs).run(ring_of_steps, overlapped).results
        assert e06_makespan.makespan(compute_s, hop_s, overlapped) == max(ends)
    costs = Given(compute_s, np.full(P, hop_s[0]))
    run = VirtualCluster(P, memory=False, costs=costs).run(ring_of_steps, True)
    end = max(event.end for rank in range(P) for event in run.trace.computes(rank))
    makespan, idle = e07_makespan.truth(compute_s, hop_s[0])
    assert makespan == end and idle == pytest.approx(end - compute_s.sum(axis=1), abs=1e-9)


@pytest.mark.parametrize("name", e06_table.PUBLISHED)
def test_06_table_is_the_cost_rooms_and_the_papers(name) -> None:
    for tokens, published in zip(e06_table.TOKENS, e06_table.PUBLISHED[name], strict=True):
        ours = e06_table.max_speedup(e06_table.MODELS[name], 4, tokens, 2.0)
        assert abs(ours - published) <= 0.005
        # On the diagonal the package counts single pairs, and the exercise counts half a block.
        assert ours == pytest.approx(
            striped_speedup(model(f"striped-{name.lower()}"), 4, tokens, 2.0), rel=1e-3
        )


@given(st.integers(0, 200), RANKS, st.integers(1, 40), st.booleans())
def test_07_work_and_08_deal_are_those_of_the_package(S, P, chunk, folded) -> None:
    layout = layouts.dealt(S, P, chunk=chunk, folded=folded)
    places = [layout.positions(rank) for rank in range(P)]
    assert same_sets(dealt(S, P, chunk, folded), places)
    table = [[(places[r][:, None] >= places[(r - t) % P]).sum() for t in range(P)] for r in range(P)]
    assert np.array_equal(e07_work.truth(layout), table)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 5), SIDES, SIDES)
def test_07_tiles_that_are_enough_cover_the_mask(a, b, step, n, m) -> None:
    pair = e07_relation.Pair((a, step, n), (b, step, m))
    assert np.array_equal(e07_relation.drawn(e07_relation.canonical(*pair), n, m), e07_relation.mask(*pair))


@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)), SIDES, SIDES, st.randoms())
def test_08_tile_counts_equal_those_of_the_whole_mask(queries, keys, rows, columns, shuffle) -> None:
    q, k = (np.array(shuffle.sample(sorted(x), len(x)), dtype=np.int64) for x in (queries, keys))
    mask, kinds = q[:, None] >= k, [0, 0, 0]
    for i, j in itertools.product(range(0, len(q), rows), range(0, len(k), columns)):
        part = mask[i : i + rows, j : j + columns]
        kinds[0 if part.all() else 1 if part.any() else 2] += 1
    assert counts(q, k, (rows, columns)) == tuple(kinds)


@given(RANKS, st.integers(1, 4), st.integers(1, 6), st.booleans(), SIDES)
def test_08_imbalance_is_the_packages_where_tiles_fit(P, pieces, chunk, folded, tile) -> None:
    layout = layouts.dealt(2 * P * pieces * chunk * tile, P, chunk=chunk, folded=folded)
    expected = package_imbalance(layout_work(layout, tile=(tile, tile)), layout)
    assert imbalance([layout.positions(rank) for rank in range(P)], (tile, tile)) == pytest.approx(expected)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), RANKS, st.randoms())
def test_08_work_of_packed_documents_equals_that_of_the_mask(lengths, P, shuffle) -> None:
    document = np.repeat(np.arange(len(lengths)), lengths)
    owner = np.array([shuffle.randrange(P) for _ in document])
    shares = [np.flatnonzero(owner == rank) for rank in range(P)]
    work = step_work(shares, lengths)
    for rank, step in itertools.product(range(P), range(P)):
        q, k = shares[rank][:, None], shares[(rank - step) % P]
        assert work[rank, step] == ((q >= k) & (document[q] == document[k])).sum()


@settings(max_examples=30, deadline=None)
@given(
    SEEDS,
    st.integers(1, 5),
    st.integers(1, 20),
    st.integers(1, 3),
    st.booleans(),
    st.none() | st.integers(1, 20),
)
def test_09_parts_of_all_ranks_add_up_to_the_gradients_of_the_oracle(seed, P, S, group, folded, window):
    layout = layouts.dealt(S, P, chunk=2, folded=folded)
    case = problem(np.random.default_rng(seed), layout, 2 * group, 2, 3, window=window)
    for rank in range(P):
        dq, dk, dv = case.truth[rank]
        own, given_away = case.parts[rank], [case.parts[r][rank] for r in range(P)]
        found = sum_over(own, 0, dq), sum_over(given_away, 1, dk), sum_over(given_away, 2, dv)
        for part, right in zip(found, (dq, dk, dv), strict=True):
            assert np.allclose(part, right, rtol=0, atol=1e-5)  # lse and out were rounded to float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_09_bytes_are_those_of_the_package(dtype) -> None:
    layout = layouts.zigzag(19, 4)
    q, k, v = (torch.randn(2, heads, 19, 4, dtype=dtype) for heads in (4, 2, 2))

    def program(ring):
        own = [x.requires_grad_() for x in layout.shard((q, k, v), ring.rank)]
        ring_attention(*own, ring=ring, layout=layout, block="naive").sum().backward()

    trace = VirtualCluster(4).run(program).trace
    for rank in range(4):
        sent = [event.bytes_sent for event in trace.exchanges(rank)]
        measured = [sum(sent[:3]), sum(sent[3:])]
        assert traffic.truth(layout.lengths, rank, 2, 2, 4, q.element_size()).tolist() == measured


@pytest.mark.parametrize("P", [2, 5])
def test_11_news_of_a_death_travel_one_rank_per_step(P: int) -> None:
    def program(ring):
        x, held = torch.zeros(1), 1
        try:
            while held < P:
                x, held = ring.shift(x), held + 1
        except Exception:
            pass
        return held

    for dead, exchange in itertools.product(range(P), range(P - 1)):
        results = run_virtual(P, program, Faults(kill=(dead, exchange), final=True)).results
        away = [min((rank - dead) % P, (dead - rank) % P) for rank in range(P)]
        expected = [None if rank == dead else min(exchange + away[rank], P) for rank in range(P)]
        assert [None if isinstance(count, Ended) else count for count in results] == expected


@given(SEEDS, st.integers(1, 3), st.integers(1, 8))
def test_13_lanes_are_those_of_the_package_cut_to_the_steps(seed, ranks, count) -> None:
    events = e13_lanes.drawn(np.random.default_rng(seed), ranks, count)
    spans = []
    for rank, lane, start, length in events.tolist():
        steps = events[(events[:, 0] == rank) & (events[:, 1] == 2)][:, 2:]
        for begin, long in steps.tolist() if lane < 2 else ():
            cut = max(start, begin) / 1e6, min(start + length, begin + long) / 1e6
            if cut[0] < cut[1]:
                spans.append(Span(int(rank), "copy" if lane else "compute", "", *cut))
    for rank in range(ranks):
        own = overlap(spans, rank)
        wanted = own.compute_s, own.copy_s, own.exposed_s, own.fraction
        assert e13_lanes.truth(events, rank) == pytest.approx(wanted, abs=1e-9)


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.lists(st.integers(0, 5), min_size=1, max_size=4), st.booleans())
def test_14_shares_add_up_to_the_mean_that_pytorch_has(seed, valid, narrow) -> None:
    kept = [(max(n, 1), n) for n in valid] if sum(valid) else [(2, 1)]
    case = e14_loss.problem(np.random.default_rng(seed), kept, narrow=narrow)
    logits = torch.cat([x.double() for x in case.logits], dim=1).flatten(0, 1)
    mean = F.cross_entropy(logits, torch.cat(case.labels, dim=1).flatten(), ignore_index=-100)
    assert sum(case.totals) / sum(case.counts) == pytest.approx(mean.item(), rel=1e-12)
    slopes = torch.cat([x.flatten(0, 1) for x in torch.autograd.grad(mean, case.logits)])
    own = np.concatenate([case.slope(rank)[0] for rank in range(len(kept))])
    assert relative_error(own, slopes.double()) < (2.0**-7 if narrow else 1e-6)


@settings(max_examples=15, deadline=None)
@given(
    SEEDS,
    st.lists(st.integers(0, 5), min_size=1, max_size=5),
    st.sampled_from([(1, 1), (4, 2), (6, 1)]),
)
def test_15_decode_is_that_of_one_process_however_the_cache_lies(seed, lengths, heads) -> None:
    case = e15_decode.problem(np.random.default_rng(seed), lengths if sum(lengths) else [1], heads)
    assert relative_error(e15_decode.merged(e15_decode.parts(case)), case.whole[0]) < 1e-12


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(1, 5), st.integers(1, 4), st.none() | st.integers(1, 9))
def test_17_ring_without_a_mistake_is_the_oracle_in_any_layout(seed, P, L, window) -> None:
    rng = np.random.default_rng(seed)
    problem = case(rng, shuffled(rng, P, L), window=window)
    out, lse = oracle.attention(problem.q, problem.k, problem.v, mask=problem.visible)
    assert relative_error(walk(problem), (problem.dealt(out), problem.dealt(lse))) < 1e-12
    needed = furthest(problem.positions, window)
    assert relative_error(walk(problem, steps=lambda given: range(needed + 1)), walk(problem)) < 1e-12
    if needed:
        assert relative_error(walk(problem, steps=lambda given: range(needed)), walk(problem)) > 1e-9
    if window is None:
        home = e17_couriers._sent_home(lambda rank, step, P: (rank - step) % P)
        assert relative_error(home(problem), tuple(map(problem.dealt, problem.true))) < 1e-11


@pytest.mark.parametrize(("S", "P"), [(16, 4), (17, 3), (2, 5)])
def test_21_layouts_are_those_of_the_package(S: int, P: int) -> None:
    for layout in (layouts.contiguous, layouts.striped, layouts.zigzag):
        owned = parts.owned(layout.__name__, S, P)
        assert [own.tolist() for own in owned] == [layout(S, P).positions(r).tolist() for r in range(P)]
