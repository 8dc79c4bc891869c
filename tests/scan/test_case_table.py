"""Every scan gives the oracle's results for each case of one table, on virtual ranks and real processes."""

from __future__ import annotations

import itertools
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from ringlab import VirtualCluster, launch
from ringlab.comm.ring import Ring
from ringlab.conformance.kinds.scan_cases import AXES, Case, attend, covering, join, problem
from ringlab.conformance.kinds.scan_tolerance import Results, errors
from ringlab.merge import state_dtype
from ringlab.scan.graph import SCANS


@lru_cache(maxsize=128)
def on_virtual_ranks(case: Case, scan: str) -> list[tuple[Tensor | None, ...]]:
    return VirtualCluster(case.P, memory=False).run(attend, case, scan).results


def assert_within_bounds(case: Case, results: Results) -> None:
    expected = problem(case)
    measured = errors(results, expected.true)
    wrong = {
        name: (measured[name], expected.bounds[name])
        for name in measured
        if not measured[name] <= expected.bounds[name]
    }
    assert not wrong, f"{case}: (error, allowed) {wrong}"


def test_the_table_covers_every_pair() -> None:
    cases = covering()
    for a, b in itertools.combinations(AXES, 2):
        met = {(getattr(case, a), getattr(case, b)) for case in cases}
        assert met == set(itertools.product(AXES[a], AXES[b]))
    assert len(cases) == len(set(cases))
    assert any(case.S < case.P for case in cases)


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("case", covering(), ids=str)
def test_virtual_ranks(case: Case, scan: str) -> None:
    shards, dtype = on_virtual_ranks(case, scan), getattr(torch, case.dtype)
    results = join(case.make_layout(), shards)
    assert results.out.dtype == results.dq.dtype == results.dv.dtype == dtype
    assert results.state.dtype == state_dtype(dtype)
    assert all(torch.equal(shards[0][1], state) for _, state, *_ in shards), (
        "ranks have different last states"
    )
    assert_within_bounds(case, results)


Job = tuple[Case, str]


def attend_all(ring: Ring, jobs: list[Job]) -> list[tuple[Tensor | None, ...]]:
    return [attend(ring, *job) for job in jobs]


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_give_the_bits_of_virtual_ranks(world_size: int) -> None:
    jobs = [(case, scan) for case in covering() if world_size == case.P for scan in SCANS]
    assert len(jobs) >= 9
    outcome = launch(attend_all, world_size, jobs, threads=1)
    for job, shards in zip(jobs, zip(*outcome.results, strict=True), strict=True):
        for one, other in zip(shards, on_virtual_ranks(*job), strict=True):
            for x, y in zip(one, other, strict=True):
                assert (x is None and y is None) or torch.equal(x, y), job
