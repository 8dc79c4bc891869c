"""The formulas in the checks of exercise 08 agree with masks of all pairs, and with the package."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.cost.flops import imbalance as package_imbalance
from ringlab.cost.flops import layout_work
from ringlab.layout import dealt as package_dealt
from ringlab_course.checking.failures import Crashed, Failure
from ringlab_course.checking.loading import load_exercise
from ringlab_course.checking.positions import (
    Question,
    expect_shares,
    first_difference,
    judge,
    same_sets,
)
from ringlab_course.checking.reports import run_in_process
from ringlab_course.checking.subject import Measured
from ringlab_course.exercises.e08_striped_and_zigzag import runs as e08_runs
from ringlab_course.exercises.e08_striped_and_zigzag.balance import imbalance
from ringlab_course.exercises.e08_striped_and_zigzag.deal import dealt
from ringlab_course.exercises.e08_striped_and_zigzag.packed import (
    begins,
    step_work,
    stretches,
)
from ringlab_course.exercises.e08_striped_and_zigzag.runs import LARGE, chains
from ringlab_course.exercises.e08_striped_and_zigzag.tiles import counts

pytestmark = pytest.mark.thorough

RANKS = st.sampled_from((1, 2, 3, 8))
SIDES = st.integers(1, 9)


@given(st.integers(0, 200), RANKS, st.integers(1, 40), st.booleans())
def test_the_judges_deal_is_the_packages(S, P, chunk, folded):
    layout = package_dealt(S, P, chunk=chunk, folded=folded)
    assert same_sets(dealt(S, P, chunk, folded), [layout.positions(rank) for rank in range(P)])


@given(st.sets(st.integers(0, 120)), st.integers(1, 12))
def test_chains_are_the_fewest_runs_that_hold_the_positions(positions, step):
    found = chains(np.array(sorted(positions), dtype=np.int64), step)
    held = [start + step * i for start, _, n in found for i in range(n)]
    assert sorted(held) == sorted(positions) and found == sorted(found)
    assert len(found) == sum(p - step not in positions for p in positions)


@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)), SIDES, SIDES, st.randoms())
def test_tile_counts_equal_those_of_the_whole_mask(queries, keys, rows, columns, shuffle):
    q, k = (np.array(shuffle.sample(sorted(x), len(x)), dtype=np.int64) for x in (queries, keys))
    mask, kinds = q[:, None] >= k, [0, 0, 0]
    for i in range(0, len(q), rows):
        for j in range(0, len(k), columns):
            part = mask[i : i + rows, j : j + columns]
            kinds[0 if part.all() else 1 if part.any() else 2] += 1
    assert counts(q, k, (rows, columns)) == tuple(kinds)


@given(RANKS, st.integers(1, 4), st.integers(1, 6), st.booleans(), SIDES)
def test_imbalance_is_the_packages_where_tiles_fit(P, pieces, chunk, folded, tile):
    layout = package_dealt(2 * P * pieces * chunk * tile, P, chunk=chunk, folded=folded)
    expected = package_imbalance(layout_work(layout, tile=(tile, tile)), layout)
    assert imbalance([layout.positions(rank) for rank in range(P)], (tile, tile)) == pytest.approx(expected)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), RANKS, st.randoms())
def test_the_work_of_packed_documents_equals_that_of_the_mask(lengths, P, shuffle):
    document = np.repeat(np.arange(len(lengths)), lengths)
    owner = np.array([shuffle.randrange(P) for _ in document])
    shares = [np.flatnonzero(owner == rank) for rank in range(P)]
    work = step_work(shares, lengths)
    for rank in range(P):
        for step in range(P):
            q, k = shares[rank][:, None], shares[(rank - step) % P]
            assert work[rank, step] == ((q >= k) & (document[q] == document[k])).sum()


def test_stretches_are_counted_document_by_document():
    assert begins([3, 4]) == [0, 3]
    assert stretches(np.array([2, 3]), [3, 4]) == 1  # neighbouring positions, but in two documents
    assert stretches(np.array([6, 0, 3]), [3, 4]) == 2 and stretches(np.zeros(0, np.int64), [3]) == 0


def test_an_empty_array_of_floats_is_refused_and_the_remedy_told():
    with pytest.raises(Failure, match=r"dtype=np\.int64"):
        expect_shares([np.array([0, 1]), np.array([])], 2)
    assert [len(x) for x in expect_shares([np.array([0, 1]), np.zeros(0, np.int64)], 2)] == [2, 0]


def test_a_crash_does_not_hide_a_wrong_answer_before_it():
    def ask(n):
        if n == 2:
            raise Crashed("It raised.")
        return Question((n,), n + 1, n, f"n={n}")

    for cases, message in (([(1,), (2,)], "Wrong."), ([(2,), (1,)], "It raised.")):
        with pytest.raises(Failure, match=message):
            judge(cases, ask, int.__eq__, lambda wrong: Failure("Wrong.", wrong.example), int)


@pytest.mark.parametrize(
    "answer",
    [np.full((100_000, 3), 10**6), [(0, 1, 10**9)] * 3, [(0, 1, 10**9), (0, 1, 3 - 10**9)]],
    ids=["many runs", "long runs", "lengths that cancel"],
)
def test_runs_that_nobody_could_own_cost_the_judge_no_memory(answer):
    tracemalloc.start()
    try:
        report = run_in_process(
            load_exercise("08").stage("08.runs"), {"runs": lambda *args: answer}, tier="all"
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.earned == 0 and not any(check.broken for check in report.checks)
    assert peak < 16 << 20, f"{peak / 2**20:.0f} MiB"


class Slow:
    """A subject that finds the runs of short shards, and has no time for long ones."""

    def call(self, positions, step):
        if len(positions) > max(LARGE):
            raise Crashed("`runs` did not end within 30 s.")
        return chains(positions, step)

    def measure(self, positions, step):
        return Measured(chains(positions, step), 100 * len(positions))


def test_a_search_that_runs_out_of_time_is_called_a_comparison_of_all_pairs():
    with pytest.raises(Failure) as failure:
        e08_runs._check_memory(Slow(), np.random.default_rng(0))
    assert failure.value.misconception == "compares_all_pairs"
    assert "131,072" in str(failure.value.counterexample)


def test_a_difference_after_the_positions_that_are_shown_is_shown():
    text = first_difference([np.arange(40)], [np.arange(1, 42)], "S=42")
    assert "owns {0, 1," in text
    assert first_difference([np.arange(40)], [np.arange(42)], "S=42") == "S=42: rank 0 lacks {40, 41}"
