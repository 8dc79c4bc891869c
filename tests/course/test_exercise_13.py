"""Exercise 13's expected values agree with the package, and with the faults put into traces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.cost.flops import attention_flops
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import ring_traffic
from ringlab.viz.lanes import Span, overlap
from ringlab_course.checking.wrong_answers import namespace_of, right_answers
from ringlab_course.exercises.e13_multi_gpu import lanes as e13_lanes
from ringlab_course.exercises.e13_multi_gpu import launch as e13_launch
from ringlab_course.exercises.e13_multi_gpu import report as e13_report
from ringlab_course.exercises.e13_multi_gpu.straggler import EVERY, SOUND, Fault, trace

pytestmark = pytest.mark.thorough

SEEDS = st.integers(0, 2**32 - 1)


@given(SEEDS, st.integers(1, 3), st.integers(1, 8))
def test_the_lanes_are_those_of_the_package_cut_to_the_steps(seed, ranks, count):
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


@given(st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_hops_between_machines_follow_from_how_ranks_are_dealt_out(nodes, each, cyclic):
    processes = e13_launch.started(nodes, each, cyclic=cyclic)
    problems, crossings = e13_launch.truth(processes)
    assert problems == [] and crossings == (0 if nodes == 1 else nodes * (each if cyclic else 1))


@pytest.mark.parametrize(
    "run", [e13_report.STRONG, e13_report.WEAK, e13_report.DEEP], ids=["strong", "weak", "deep"]
)
def test_the_report_counts_as_the_cost_model_does(run):
    S, P = run.tokens[1], run.ranks
    shape = Attention(1, run.heads, run.kv_heads, run.head_dim, "bfloat16", run.causal)
    pairs = S * (S + 1) // 2 if run.causal else S * S
    backward = (
        8 / 10 * attention_flops(shape, pairs, backward=True)
    )  # scores that are computed twice count once
    flops = attention_flops(shape, pairs) + run.backward * backward
    _, mfu, link = e13_report.truth(run)
    assert mfu == pytest.approx(flops / run.seconds[1] / (P * run.peak_tflops * 1e12))
    hop = ring_traffic(shape, S, P).total_bytes / (P - 1)
    assert link == pytest.approx(hop / run.hop_s / (run.link_gb_per_s * 1e9))


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.sampled_from([3, 4, 6]), st.floats(1.6, 5.0), st.booleans(), st.data())
def test_a_fault_that_was_put_in_is_found_whatever_the_noise_and_the_clocks(seed, P, times, is_link, data):
    rank = data.draw(st.integers(0, P - 1))
    fault = (
        Fault("link", rank, EVERY, times)
        if is_link
        else Fault("compute", rank, data.draw(st.integers(-1, P - 1)), times)
    )
    clocks = np.random.default_rng(seed).uniform(-1.0, 1.0, P)
    straggler = namespace_of(right_answers("13")["plain"], "plain.py")["straggler"]
    assert straggler(trace(fault, P, "zigzag", 0.4, seed, clocks)) == fault.answer
    assert straggler(trace(Fault(), P, "contiguous", 0.4, seed, clocks)) == SOUND
