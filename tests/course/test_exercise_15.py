"""Exercise 15: its expected values agree with the real programs, and answers of a wrong form are refused."""

from __future__ import annotations

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
from tests.course.submissions_of import namespace, submission

pytestmark = pytest.mark.thorough

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
    """The meter counts the bytes of a right answer; where the answer is None, the program refuses the call."""
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


def drawn(seed: int, **changes):
    make = e15_choose._problem
    return e15_choose._drawn(
        np.random.default_rng(seed), lambda x: make((8, 4), 8, 128, ratio=2 * x, **changes)
    )


def test_what_hangs_on_rounding_is_not_asked():
    """Problems that rounding decides are not drawn: ties, a hop as long as its block, memory exact to the byte."""
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
    """The expected output of decode equals the package's on zig-zag shards, because keys may have any order."""
    case = e15_decode.problem(np.random.default_rng(5), [6, 6, 6], (4, 2))
    k, v = torch.cat(case.ks, dim=2), torch.cat(case.vs, dim=2)
    layout = zigzag(18, 3)

    def program(ring: Ring) -> torch.Tensor:
        cache = ShardedCache.of_shards(ring, layout, layout.shard(k, ring.rank), layout.shard(v, ring.rank))
        return decode(case.q, cache, validate=False)

    for out in VirtualCluster(3).run(program).results:
        assert relative_error(out, case.whole[0]) < case.bound


def test_values_that_are_wrong_where_heads_are_shared_alone_are_said_to_be_so() -> None:
    """The message says where the values are wrong, although no known mistake explains them."""
    wrong = submission("15/wrong_decode_heads_reversed")
    report = run_in_process(load_stage("15.decode"), namespace(wrong), tier="all", seed=1)
    (grouped,) = (check for check in report.checks if check.id == "grouped")
    assert "wrong where several share one" in grouped.message and grouped.misconception is None
