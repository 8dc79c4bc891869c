"""Exercise 06's expected values equal the package's, and its order of events equals the virtual clock's."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringlab.comm.virtual.cluster import Costs, VirtualCluster
from ringlab.cost.models import model
from ringlab.cost.papers import striped_speedup
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import least_tokens_hidden
from ringlab_course.checking.overlap import order
from ringlab_course.exercises.e06_what_it_costs import makespan as e06_makespan
from ringlab_course.exercises.e06_what_it_costs import table as e06_table
from ringlab_course.exercises.e06_what_it_costs import threshold as e06_threshold

pytestmark = pytest.mark.thorough

SECONDS = st.integers(0, 32).map(lambda n: n / 8)


class Given(Costs):
    """Costs that read the virtual seconds of a run from two arrays."""

    def __init__(self, compute_s: np.ndarray, hop_s: np.ndarray) -> None:
        self.compute_s, self.hop_s = compute_s, hop_s

    def compute(self, rank, label, args):
        return self.compute_s[rank, int(label)]

    def message(self, source, to, nbytes):
        return self.hop_s[source]


def program(ring, overlapped: bool) -> float:
    x = torch.zeros(1)
    for step in range(ring.world_size):
        last = step == ring.world_size - 1
        work = ring.post(x) if overlapped and not last else None
        ring.compute(f"{step}", torch.abs, x)
        if not last:
            (x,) = (work or ring.post(x)).wait()
    return ring.comm.now()


@given(st.data())
def test_a_makespan_is_what_the_virtual_clock_says(data) -> None:
    P = data.draw(st.integers(1, 5))
    compute_s = np.array(data.draw(st.lists(SECONDS, min_size=P * P, max_size=P * P))).reshape(P, P)
    hop_s = np.array(data.draw(st.lists(SECONDS, min_size=P, max_size=P)))
    for overlapped in (False, True):
        run = VirtualCluster(P, memory=False, costs=Given(compute_s, hop_s)).run(program, overlapped)
        assert e06_makespan.makespan(compute_s, hop_s, overlapped) == max(run.results)


def test_thresholds_are_those_of_the_cost_room() -> None:
    for bytes_, group, causal in itertools.product((1, 2, 4), (1, 8), (False, True)):
        dtype = {1: "float8", 2: "bfloat16", 4: "float32"}[bytes_]
        sizes = Attention(H=4 * group, K=4, D=16, dtype=dtype, causal=causal)
        for rate, unit, directions, per_second in (
            (300, "GB/s", 1, 3e11),
            (600, "GB/s", 2, 3e11),
            (200, "Gbit/s", 1, 2.5e10),
        ):
            ours = e06_threshold.least_tokens(
                312e12, rate, unit, directions, element_bytes=bytes_, group=group, causal=causal
            )
            assert math.isclose(ours, least_tokens_hidden(312e12, per_second, sizes), rel_tol=1e-12)


@pytest.mark.parametrize("name", e06_table.PUBLISHED)
def test_the_table_is_the_cost_rooms_and_the_papers(name) -> None:
    for tokens, published in zip(e06_table.TOKENS, e06_table.PUBLISHED[name], strict=True):
        ours = e06_table.max_speedup(e06_table.MODELS[name], 4, tokens, 2.0)
        assert abs(ours - published) <= 0.005
        # On the diagonal the package counts single pairs, and the exercise counts half a block.
        assert ours == pytest.approx(
            striped_speedup(model(f"striped-{name.lower()}"), 4, tokens, 2.0), rel=1e-3
        )


def test_the_order_of_a_rank_is_read_off_the_clock() -> None:
    def late(ring):
        x = torch.zeros(2)
        for step in range(2):
            ring.compute(f"{step}", torch.abs, x)
            x = ring.shift(x)
        ring.compute("2", torch.abs, x)

    def double(ring):
        x = torch.zeros(2)
        for step in range(2):
            works = ring.post(x), ring.post(x)
            ring.compute(f"{step}", torch.abs, x)
            x, _ = (work.wait()[0] for work in works)
        ring.compute("2", torch.abs, x)

    assert order(VirtualCluster(3).run(late).trace, 1) == [
        *["compute", "post", "wait"] * 2,
        "compute",
    ]
    assert order(VirtualCluster(3).run(double).trace, 2) == [
        *["post", "compute", "wait"] * 2,
        "compute",
    ]
