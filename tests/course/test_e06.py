"""Exercise 06's truths are the package's own, its cases tell mistakes apart, and its order of events is the judge's too."""

from __future__ import annotations

import itertools
import math
import re
from functools import cache

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
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.overlap import order
from ringlab_course.checking.reports import run_stage
from ringlab_course.exercises.e06_what_it_costs import makespan as e06_makespan
from ringlab_course.exercises.e06_what_it_costs import table as e06_table
from ringlab_course.exercises.e06_what_it_costs import threshold as e06_threshold
from ringlab_course.exercises.e06_what_it_costs.contract import EXERCISE
from ringlab_course.judge.session import SandboxedSubject, Session
from tests.course.submissions_of import submissions

SECONDS = st.integers(0, 32).map(lambda n: n / 8)


class Given(Costs):
    """Virtual seconds out of two arrays."""

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


class Watched:
    """A learner that makes one mistake, or none, and remembers what it was asked."""

    def __init__(self, truth, mistake=None) -> None:
        self.answer, self.seen = (mistake.imitate if mistake else truth), []

    def call(self, *inputs, **keywords):
        self.seen.append((inputs, keywords))
        return self.answer(*inputs, **keywords)


HOLDS = "holds"
CHECKS = [
    *[(e06_makespan, f"_check_{name}", e06_makespan.makespan) for name in ("uniform", "unequal", "links", "random")],
    *[(e06_table, f"_check_{name}", e06_table.max_speedup) for name in ("counts", "weight", "published", "other_models")],
]  # fmt: skip


@cache
def told(check, truth, mistake) -> str | None:
    """What a check calls a mistake: its name, None for wrong values without one, HOLDS if it finds nothing."""
    try:
        check(Watched(truth, mistake), np.random.default_rng(3))
    except Failure as failure:
        return failure.misconception
    return HOLDS


@pytest.mark.parametrize(("module", "name", "truth"), CHECKS, ids=[name for _, name, _ in CHECKS])
def test_a_mistake_is_told_its_own_name_or_none(module, name, truth) -> None:
    """Never another one's: a check names a mistake only where no other gives the same numbers."""
    names = {mistake.name: told(getattr(module, name), truth, mistake) for mistake in module.MISTAKES}
    assert {each: name for each, name in names.items() if name not in (each, None, HOLDS)} == {}
    assert {*names.values()} - {None, HOLDS}


@pytest.mark.parametrize(
    ("module", "truth"), [(e06_makespan, e06_makespan.makespan), (e06_table, e06_table.max_speedup)]
)
def test_every_mistake_is_called_by_its_name_in_some_check(module, truth) -> None:
    for mistake in module.MISTAKES:
        names = {told(check.run, truth, mistake) for check in module.STAGE.checks}
        assert mistake.name in names, (mistake.name, names)


def test_a_weight_that_cancels_is_not_told_it_was_not_used() -> None:
    def cancels(model, ranks, tokens, attention_weight=1.0):
        return e06_table.max_speedup(model, ranks, tokens, 1.0)

    with pytest.raises(Failure) as caught:
        e06_table._check_weight(Watched(cancels), np.random.default_rng(0))
    assert caught.value.misconception == "ignores_the_weight" and "cancels" in caught.value.message


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
        # The package counts single pairs on the diagonal, the exercise half a block.
        assert ours == pytest.approx(
            striped_speedup(model(f"striped-{name.lower()}"), 4, tokens, 2.0), rel=1e-3
        )


WRONG = {each.expected.check: each for each in submissions("06/wrong_overlap_*")}
SUBMISSIONS = [*submissions("06/right_*"), *WRONG.values()]
"""All right answers, and a wrong one for each check; `python -m tests.course.sandboxed` grades all."""


@pytest.fixture(scope="module")
def session():
    """Workers that have loaded every submission's ring, each under a name of its own: starting torch is slow."""
    cells = []
    for each in SUBMISSIONS:
        text = re.sub(r"\b(overlapped_ring|attend|rounds)\b", rf"\1_{each.stem}", each.source)
        cells.append(text)
    names = [f"overlapped_ring_{each.stem}" for each in SUBMISSIONS]
    with Session(cells, names, torch=True, seconds=120, total_seconds=1200) as session:
        yield session


@pytest.mark.needs_bwrap
@pytest.mark.parametrize("given", SUBMISSIONS, ids=lambda given: given.stem)
def test_the_judge_names_what_the_notebook_names(session, given) -> None:
    stage = EXERCISE.stage("06.overlap")
    report = run_stage(stage, SandboxedSubject(session, f"overlapped_ring_{given.stem}"), "all", seed=1)
    session.losses, session.condemned = 0, ""
    failed = {check.id: check.misconception for check in report.checks if not check.ok}
    assert not any(check.broken for check in report.checks)
    if given.stem.startswith("right_"):
        assert not failed, [check.counterexample for check in report.checks if not check.ok]
    else:
        assert failed[given.expected.check] == given.expected.misconception


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
