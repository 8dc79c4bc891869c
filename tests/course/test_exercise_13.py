"""Exercise 13: its truths against plain counting and against the faults that were put in, and what only a judge gets to see."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.cost.flops import attention_flops
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import ring_traffic
from ringlab.viz.lanes import Span, overlap
from ringlab_course.checking.loading import load_exercise
from ringlab_course.checking.reports import run_in_process
from ringlab_course.checking.wrong_answers import found_by
from ringlab_course.exercises.e13_multi_gpu import lanes as e13_lanes
from ringlab_course.exercises.e13_multi_gpu import launch as e13_launch
from ringlab_course.exercises.e13_multi_gpu import report as e13_report
from ringlab_course.exercises.e13_multi_gpu import seconds as e13_seconds
from ringlab_course.exercises.e13_multi_gpu import straggler as e13_straggler
from ringlab_course.exercises.e13_multi_gpu.straggler import EVERY, Fault, trace
from ringlab_course.judge import grade
from tests.course.submissions_of import submission

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


def test_a_launch_of_ranks_that_share_a_device_and_are_lost_has_both_problems():
    found, crossings = e13_launch.truth(e13_launch.changed(e13_launch.started(2, 2), RANK=1, LOCAL_RANK=0))
    assert (found, crossings) == (["device", "rank"], 0)


@given(SEEDS, st.integers(1, 4), st.integers(0, 3), st.integers(1, 9))
def test_honest_seconds_are_some_ranks_and_no_less_than_any_median(seed, P, warmup, counted):
    times_s = e13_seconds.rounds_of(np.random.default_rng(seed), warmup + counted, P, warmup)
    found = e13_seconds.seconds(times_s, warmup)
    assert found >= np.median(times_s[warmup:], axis=0).max()
    assert times_s[warmup:].min() <= found <= times_s[warmup:].max()


@pytest.mark.parametrize(
    "run", [e13_report.STRONG, e13_report.WEAK, e13_report.DEEP], ids=["strong", "weak", "deep"]
)
def test_the_report_counts_as_the_cost_model_does(run):
    S, P = run.tokens[1], run.ranks
    shape = Attention(1, run.heads, run.kv_heads, run.head_dim, "bfloat16", run.causal)
    pairs = S * (S + 1) // 2 if run.causal else S * S
    backward = (
        8 / 10 * attention_flops(shape, pairs, backward=True)
    )  # the scores again are no work of the model
    flops = attention_flops(shape, pairs) + run.backward * backward
    _, mfu, link = e13_report.truth(run)
    assert mfu == pytest.approx(flops / run.seconds[1] / (P * run.peak_tflops * 1e12))
    hop = ring_traffic(shape, S, P).total_bytes / (P - 1)
    assert link == pytest.approx(hop / run.hop_s / (run.link_gb_per_s * 1e9))


def test_a_perfect_split_has_efficiency_one():
    run = e13_report.Record(tokens=(1000, 4000), seconds=(1.0, 4.0), ranks=4)
    assert e13_report.truth(run)[0] == pytest.approx(1.0)


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
    assert e13_straggler.truth(trace(fault, P, "zigzag", 0.4, seed, clocks)) == fault.answer
    assert e13_straggler.truth(trace(Fault(), P, "contiguous", 0.4, seed, clocks)) == e13_straggler.SOUND


def test_messages_arrive_no_later_than_the_wait_for_them_ends():
    for fault in (Fault(), Fault("link", 1, EVERY, 5.0), Fault("compute", 2, 1, 3.0)):
        given_ = trace(fault, 4, "zigzag", 0.5, 3)
        assert (given_["arrived"] <= given_["done"] + 1e-12).all()
        assert (given_["end"][:, :-1] <= given_["done"] + 1e-12).all()
        waits = given_["done"] > given_["end"][:, :-1] + 1e-12
        own, after = given_["arrived"], np.roll(given_["arrived"], -1, axis=0)
        assert np.allclose(given_["done"][waits], np.maximum(own, after)[waits])


@pytest.mark.parametrize("stage", load_exercise("13").stages, ids=lambda stage: stage.id)
def test_every_imitation_is_told_from_the_truth_by_the_check_that_names_it(stage):
    named = [m.name for m in stage.misconceptions if m.imitate]
    assert set(named) <= set().union(*found_by(stage.id).values())


NONSENSE = {
    "nothing": None,
    "text": "x",
    "a number": 3,
    "a pair": ("rank", 2),
    "names nobody knows": (["else"], 1),
    "a half hop": ([], 0.5),
    "a triple of nothing": (None, None, None),
    "another word": ("rank", 0, 0),
    "a rank that is a text": ("compute", "0", 0),
    "not numbers": tuple(np.array(float("nan")) for _ in range(4)),
    "three arrays": tuple(np.zeros(2) for _ in range(3)),
}


@pytest.mark.parametrize("stage", load_exercise("13").stages, ids=lambda stage: stage.id)
def test_whatever_comes_back_a_check_can_read_it(stage):
    for name, value in NONSENSE.items():
        report = run_in_process(
            stage, {stage.function: lambda *args, value=value, **kwargs: value}, tier="all"
        )
        assert report.earned == 0 and not any(check.broken for check in report.checks), (name, report)


def written(folder, code, stage):
    cell = {"cell_type": "code", "id": "x", "metadata": {"grade": stage}, "source": code, "outputs": []}
    path = folder / "13_multi_gpu.ipynb"
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]}))
    return path


@pytest.mark.needs_bwrap
@pytest.mark.parametrize("name", ["launch_localhost_is_everywhere", "straggler_ignores_clocks"])
def test_the_judge_finds_in_the_sandbox_what_the_notebook_finds(tmp_path, name):
    wrong = submission(f"13/wrong_{name}")
    expected = wrong.expected
    report = grade(written(tmp_path, wrong.source, expected.stage), "13", seed=1)
    stage = next(stage for stage in report.stages if stage.stage == expected.stage)
    check = next(check for check in stage.checks if check.id == expected.check)
    assert not check.ok and check.misconception == expected.misconception, check


@pytest.mark.needs_bwrap
def test_the_judge_gives_a_right_answer_all_points(tmp_path):
    report = grade(written(tmp_path, submission("13/right_by_hand").source, "13.launch"), "13", seed=2)
    assert report.ok and report.earned == report.points == 25, [
        c for s in report.stages for c in s.checks if not c.ok
    ]
