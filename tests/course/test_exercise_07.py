"""Exercise 07's expected answers agree with masks and the virtual clock, and crashes get the right names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab import layout as layouts
from ringlab.comm.virtual.cluster import Costs, VirtualCluster
from ringlab_course.checking.failures import Crashed, Failure
from ringlab_course.checking.subject import Measured
from ringlab_course.exercises.e07_causal_imbalance import makespan as e07_makespan
from ringlab_course.exercises.e07_causal_imbalance import relation as e07_relation
from ringlab_course.exercises.e07_causal_imbalance import ring as e07_ring
from ringlab_course.exercises.e07_causal_imbalance import work as e07_work
from ringlab_course.exercises.e07_causal_imbalance.relation import canonical, drawn, mask
from ringlab_course.exercises.e07_causal_imbalance.runs import runs_of, token_fold
from tests.course.submissions_of import namespace, submission

pytestmark = pytest.mark.thorough

RIGHT = namespace(submission("07/right_plain"))


@given(st.integers(1, 5), st.integers(0, 30), st.integers(1, 6), st.booleans())
def test_the_work_that_is_asked_for_is_that_of_the_position_mask(P, S, chunk, folded):
    layout = layouts.dealt(S, P, chunk=chunk, folded=folded)
    places = [layout.positions(rank) for rank in range(P)]
    table = [[(places[r][:, None] >= places[(r - t) % P]).sum() for t in range(P)] for r in range(P)]
    assert np.array_equal(e07_work.truth(layout), table)


class BySeconds(Costs):
    """Costs that read the seconds of each rank's steps from a table. All messages take the same time."""

    def __init__(self, seconds, hop):
        self.seconds, self.hop = seconds, hop

    def compute(self, rank, label, args):
        return float(self.seconds[rank, int(label)])

    def message(self, source, to, nbytes):
        return self.hop


def posted_first(ring):
    """Run a ring whose ranks post their block, compute, and then wait, in every step."""
    x = torch.zeros(1, 1)
    for step in range(ring.world_size):
        work = ring.post(x) if step < ring.world_size - 1 else None
        ring.compute(str(step), lambda: None)
        if work is not None:
            (x,) = work.wait()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.floats(0.0, 3.0), st.integers(0, 2**32 - 1))
def test_the_makespan_that_is_asked_for_is_that_of_the_virtual_clock(P, hop, seed):
    seconds = np.random.default_rng(seed).integers(0, 5, (P, P)).astype(float)
    run = VirtualCluster(P, memory=False, costs=BySeconds(seconds, hop)).run(posted_first)
    ends = [max(event.end for event in run.trace.computes(rank)) for rank in range(P)]
    makespan, idle = e07_makespan.truth(seconds, hop)
    assert makespan == pytest.approx(max(ends), abs=1e-12)
    assert idle == pytest.approx([max(ends) - seconds[rank].sum() for rank in range(P)], abs=1e-9)
    if hop == 0.0:
        assert seconds.sum(axis=1).max() <= makespan <= seconds.max(axis=0).sum() + 1e-12


@pytest.mark.parametrize(
    "layout", [layouts.contiguous(6, 3), layouts.zigzag(12, 3), layouts.striped(8, 2), token_fold(16, 2)]
)
def test_keys_that_are_poisoned_are_in_no_tile_of_the_rows_and_most_hidden_keys_are(layout):
    poisoned = 0
    for rank in range(layout.P):
        for rows, unseen in e07_ring._hidden(runs_of(layout), rank):
            for origin, keys in enumerate(unseen):
                seen = layout.positions(rank)[rows, None] >= layout.positions(origin)[None, :]
                assert not seen[:, keys].any() and (origin != rank or not keys.any())
                assert (keys == ~seen.any(axis=0)).all() or origin == rank
                poisoned += keys.sum()
    assert poisoned


class Stands:
    """A subject that gives right answers to calls with short runs, and crashes in calls with long runs."""

    function = "work_per_step"

    def __init__(self, function, message):
        self.answer, self.message = RIGHT[function], message

    def call(self, *args):
        if max(np.ravel([run[-1] for run in (args if isinstance(args[0], tuple) else args[0][0])])) > 5000:
            raise Crashed(self.message)
        return self.answer(*args)

    def measure(self, *args):
        return Measured(self.answer(*args), 0)


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("`f` did not end within 20 s.", "too_slow"),
        ("`f` ended its process, or used more than the 4 GiB of memory it may use.", "builds_masks"),
        ("`f` raised MemoryError.", "builds_masks"),
        ("`f` raised KeyError.", None),
    ],
)
def test_a_count_that_runs_out_of_time_or_memory_is_told_why(message, name):
    with pytest.raises(Failure) as failure:
        e07_work._check_million(Stands("work_per_step", message), np.random.default_rng(0))
    assert failure.value.misconception == name
    with pytest.raises(Failure) as failure:
        e07_relation._check_long(Stands("tiles_between", message), np.random.default_rng(0))
    assert failure.value.misconception == (name and "builds_the_mask")


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9))
def test_the_tiles_that_are_enough_cover_the_mask(a, b, step, n, m):
    pair = e07_relation.Pair((a, step, n), (b, step, m))
    assert np.array_equal(drawn(canonical(*pair), n, m), mask(*pair))
