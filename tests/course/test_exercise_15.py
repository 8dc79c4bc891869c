"""Exercise 15: its truths against the real programs, its wrong answers told apart, and what only a judge gets to see."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab import Ring, ShardedCache, VirtualCluster, contiguous, decode, ring_attention, zigzag
from ringlab.errors import RinglabError
from ringlab_course.checking.answers import relative_error
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.loading import load_exercise, load_stage
from ringlab_course.checking.reports import run_in_process
from ringlab_course.exercises.e15_choosing import choose as e15_choose
from ringlab_course.exercises.e15_choosing import decode as e15_decode
from ringlab_course.exercises.e15_choosing import traffic as e15_traffic
from ringlab_course.judge import grade
from tests.course.submissions_of import namespace, submission

RIGHT = namespace(submission("15/right_plain"))
LAYERS = st.builds(
    lambda K, group, D, itemsize: {"B": 1, "H": K * group, "K": K, "D": D, "itemsize": itemsize},
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([2, 4]),
    st.sampled_from([2, 4, 8]),
)


@settings(max_examples=25, deadline=None)
@given(LAYERS, st.sampled_from([2, 3, 4, 6, 8]), st.integers(1, 3), st.data())
def test_the_meter_counts_what_a_right_answer_says(layer, P: int, tokens: int, data):
    """And where it says None, the program refuses."""
    U = data.draw(st.sampled_from([U for U in range(1, P + 1) if P % U == 0]))
    schedule = {1: "ring", P: "ulysses"}.get(U, f"hybrid(ulysses={U})")
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[layer["itemsize"]]

    def program(ring: Ring) -> None:
        q, k, v = (
            torch.ones(1, heads, tokens, layer["D"], dtype=dtype)
            for heads in (layer["H"], layer["K"], layer["K"])
        )
        made = contiguous(tokens * P, P)
        ring_attention(q, k, v, ring=ring, layout=made, schedule=schedule, block="naive", validate=False)

    said = RIGHT["bytes_sent"](layer, tokens * P, P, schedule.partition("(")[0], U)
    try:
        trace = VirtualCluster(P, memory=False).run(program).trace
    except RinglabError:
        assert said is None
    else:
        assert {trace.bytes_sent(rank) for rank in range(P)} == {said}


@given(LAYERS, st.integers(1, 40), st.integers(1, 5), st.integers(1, 40), st.booleans())
def test_the_rule_of_traffic_is_the_cost_models(layer, P: int, tokens: int, U: int, gathered: bool):
    asked = (layer, P * tokens, P, "allgather" if gathered else "hybrid", 1 if gathered else U)
    assert e15_traffic.Rule()(*asked) == e15_traffic.truth(*asked)


def drawn(seed: int, **changes):
    make = e15_choose._problem
    return e15_choose._drawn(
        np.random.default_rng(seed), lambda x: make((8, 4), 8, 128, ratio=2 * x, **changes)
    )


@pytest.mark.parametrize("mistake", [m for m in e15_choose.MISTAKES if m.imitate], ids=lambda m: m.name)
def test_every_imitation_of_a_report_differs_from_the_truth_and_from_every_other(mistake):
    """On a problem that has latency, two sequences, and too little memory for some."""
    given = drawn(1, latency=0.1)
    given = e15_choose.replace(given, layer=given.layer | {"B": 2})
    cases = [
        e15_choose._tight(given, *key)
        for key in (("allgather", 1, 0.98), ("hybrid", 2, 0.98), ("ring", 1, 0.98))
    ]
    answers = {m.name: [m.imitate(case) for case in cases] for m in e15_choose.MISTAKES if m.imitate}
    own = answers.pop(mistake.name)
    assert max(relative_error(a, e15_choose.RIGHT(c)) for a, c in zip(own, cases, strict=True)) > 1e-3
    for name, other in answers.items():
        assert max(relative_error(a, b) for a, b in zip(own, other, strict=True)) > 1e-3, name


def test_what_hangs_on_rounding_is_not_asked():
    """A tie of all-gather and Ulysses, a hop as long as its block, memory to the byte."""
    clear = drawn(2)
    assert e15_choose.is_clear(clear)
    tie = e15_choose._problem((8, 8), 2, 128, ratio=2.0)
    even = e15_choose._problem((8, 4), 8, 128, ratio=1.0)
    exact = e15_choose._tight(clear, "ring", 1, 1.0)
    assert not any(map(e15_choose.is_clear, (tie, even, exact)))
    with pytest.raises(RuntimeError, match="no clear problem"):
        e15_choose._drawn(np.random.default_rng(0), lambda _: tie)


def report_of(given):
    return RIGHT["choose"](given.layer, given.S, given.P, given.machine)


def test_a_report_out_of_order_or_with_strange_rows_is_told_so():
    given = e15_choose._tight(drawn(3), "ring", 1, 0.98 * 1.5)
    report = report_of(given)
    assert {row["reason"] for row in report} >= {"memory"}
    e15_choose.read(report, given)
    for wrong, told in (
        (report[::-1], "comes before one that can"),
        (report + report[:1], "twice"),
        ([*report[:-1], report[-1] | {"ulysses": 5}], "an option that does not exist"),
        ([report[0] | {"reason": "fast"}, *report[1:]], "A reason is one of"),
        ([report[0] | {"exposed_s": float("nan")}, *report[1:]], "finite"),
        ([report[0] | {"note": ""}, *report[1:]], "should have the keys"),
        (report[1:], "missing"),
    ):
        with pytest.raises(Failure, match=told):
            e15_choose.read(wrong, given)


def test_a_wrong_report_shows_which_option_is_wrong_and_what_it_should_be():
    def choose(layer, S, P, machine):
        report = RIGHT["choose"](layer, S, P, machine)
        return [
            row | ({"exposed_s": row["exposed_s"] + 1e-3} if row["schedule"] == "hybrid" else {})
            for row in report
        ]

    stage = next(stage for stage in load_exercise("15").stages if stage.id == "15.choose")
    report = run_in_process(stage, {"choose": choose, "bytes_sent": RIGHT["bytes_sent"]}, seed=3)
    check = next(check for check in report.checks if check.id == "seconds")
    assert check.message.startswith("The report is wrong in exposed_s")
    assert re.search(r"hybrid U=2: exposed_s [\d.]+ ms, should be [\d.]+ ms", check.counterexample)
    assert "array" not in check.counterexample and "ring:" not in check.counterexample


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 5), min_size=1, max_size=5),
    st.sampled_from([(1, 1), (4, 2), (6, 1)]),
)
def test_the_truth_of_decode_is_that_of_one_process_however_the_cache_lies(seed, lengths, heads):
    lengths = lengths if sum(lengths) else [1]
    case = e15_decode.problem(np.random.default_rng(seed), lengths, heads)
    assert relative_error(e15_decode.merged(e15_decode.parts(case)), case.whole[0]) < 1e-12


def test_the_truth_of_decode_is_what_the_package_decodes():
    """On shards of a zig-zag layout, to which no order of keys matters."""
    case = e15_decode.problem(np.random.default_rng(5), [6, 6, 6], (4, 2))
    k, v = torch.cat(case.ks, dim=2), torch.cat(case.vs, dim=2)
    layout = zigzag(18, 3)

    def program(ring: Ring) -> torch.Tensor:
        cache = ShardedCache.of_shards(ring, layout, layout.shard(k, ring.rank), layout.shard(v, ring.rank))
        return decode(case.q, cache, validate=False)

    for out in VirtualCluster(3).run(program).results:
        assert relative_error(out, case.whole[0]) < case.bound


@pytest.mark.parametrize("mistake", [m for m in e15_decode.MISTAKES if m.imitate], ids=lambda m: m.name)
def test_every_imitation_of_a_decode_step_differs_from_the_truth_and_from_every_other(mistake):
    case = e15_decode.problem(np.random.default_rng(3), (5, 0, 2), (4, 2), size=2.0)
    answers = {m.name: m.imitate(2, case) for m in e15_decode.MISTAKES if m.imitate}
    own = answers.pop(mistake.name)
    assert relative_error(own, case.whole[0]) > 1e-3
    for name, other in answers.items():
        assert relative_error(own, other) > 1e-3, name


NONSENSE = {
    "nothing": None,
    "text": "x",
    "a number": 3,
    "an array": torch.zeros(2),
    "a list": [1],
    "rows without keys": [{}],
    "rows of None": [dict.fromkeys(e15_choose.KEYS)] * 4,
    "rows of text": [dict.fromkeys(e15_choose.KEYS, "hidden")] * 4,
    "rows of lists": [{key: [] for key in e15_choose.KEYS}] * 4,
    "rows of arrays": [{key: np.zeros(2) for key in e15_choose.KEYS}] * 4,
    "not a number": float("nan"),
}


@pytest.mark.parametrize("stage", load_exercise("15").stages, ids=lambda stage: stage.id)
def test_whatever_comes_back_a_check_can_read_it(stage):
    for name, value in NONSENSE.items():
        report = run_in_process(
            stage, {stage.function: lambda *args, value=value, **kwargs: value}, tier="all"
        )
        assert not any(check.broken for check in report.checks), (name, report)
        assert report.earned == 0, (name, report)


def written(folder, code, stage):
    cell = {"cell_type": "code", "id": "x", "metadata": {"grade": stage}, "source": code, "outputs": []}
    path = folder / "15_choosing.ipynb"
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]}))
    return path


@pytest.mark.needs_bwrap
@pytest.mark.parametrize(
    "name", ["traffic_part_of_a_head", "choose_trades_in_place", "decode_empty_stays_away"]
)
def test_the_judge_finds_in_the_sandbox_what_the_notebook_finds(tmp_path, name):
    wrong = submission(f"15/wrong_{name}")
    expected = wrong.expected
    report = grade(written(tmp_path, wrong.source, expected.stage), "15", seed=1)
    stage = next(stage for stage in report.stages if stage.stage == expected.stage)
    check = next(check for check in stage.checks if check.id == expected.check)
    assert not check.ok and check.misconception == expected.misconception, check


@pytest.mark.needs_bwrap
def test_the_judge_gives_a_right_answer_all_points(tmp_path):
    report = grade(written(tmp_path, submission("15/right_by_hand").source, "15.traffic"), "15", seed=2)
    assert report.ok and report.earned == report.points == 26, [
        c for s in report.stages for c in s.checks if not c.ok
    ]


def test_values_that_are_wrong_where_heads_are_shared_alone_are_said_to_be_so() -> None:
    """No mistake is known to make them: the message says where they are right."""
    wrong = submission("15/wrong_decode_heads_reversed")
    report = run_in_process(load_stage("15.decode"), namespace(wrong), tier="all", seed=1)
    (grouped,) = (check for check in report.checks if check.id == "grouped")
    assert "wrong where several share one" in grouped.message and grouped.misconception is None
