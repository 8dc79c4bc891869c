"""One case table × every transport × every block backend × every schedule, against the oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from ringlab import VirtualCluster, launch
from ringlab.blocks import available as blocks
from ringlab.comm.ring import Ring
from ringlab.conformance.cases import AXES, MASKS, Case, attend, cases_of, covering, join, problem, refusal
from ringlab.conformance.tolerance import NAMES, Results, errors, truth
from ringlab.errors import RinglabError
from ringlab.schedules import available as schedules
from tests.substrates.writes import Writes


@lru_cache(maxsize=32)
def on_virtual_ranks(case: Case, block: str, schedule: str) -> Results:
    writes = Writes()
    outcome = VirtualCluster(case.P, memory=False).run(
        lambda ring: writes.watch(attend, ring, case, block, schedule)
    )
    assert not writes.foreign, f"{case}: writes into memory of others: {sorted(set(writes.foreign))}"
    return join(case, outcome.results)


def assert_within_bounds(case: Case, results: Results) -> None:
    expected = problem(case)
    measured = errors(results, expected.true)
    wrong = {
        name: (measured[name], expected.bounds[name])
        for name in NAMES
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


def refused(ring: Ring, case: Case, block: str, schedule: str) -> RinglabError | None:
    try:
        attend(ring, case, block, schedule)
    except RinglabError as error:
        return error
    return None


TABLE = [(case, block, s) for block in blocks() for s in schedules() for case in cases_of(s, block)]


@pytest.mark.parametrize(("case", "block", "schedule"), sorted(TABLE, key=str), ids=str)
def test_virtual_ranks(case: Case, block: str, schedule: str) -> None:
    if kind := refusal(case, schedule):
        for error in VirtualCluster(case.P, memory=False).run(refused, case, block, schedule).results:
            assert type(error) is kind and f"schedule '{schedule}" in str(error), error
        return
    results = on_virtual_ranks(case, block, schedule)
    assert results.out.dtype == results.dq.dtype == getattr(torch, case.dtype)
    assert results.lse.dtype == (torch.float64 if case.dtype == "float64" else torch.float32)
    assert_within_bounds(case, results)


@pytest.mark.parametrize("mask", sorted(set(MASKS) - {"causal", "full"}))
def test_a_mask_that_is_dropped_or_another_is_noticed(mask: str) -> None:
    """The right attention under any other mask of the table is beyond this one's bounds, in out and gradients."""
    case = Case("zigzag", 2, 64, 2, 16, "float32", mask)
    expected = problem(case)
    tensors = (expected.q, expected.k, expected.v, expected.dout)
    for other in sorted(set(MASKS) - {mask}):
        measured = errors(truth(*tensors, mask=MASKS[other](case.S)), expected.true)
        assert all(measured[name] > 10 * expected.bounds[name] for name in NAMES), other


def test_sinks_that_are_dropped_are_noticed() -> None:
    case = Case("zigzag", 2, 64, 2, 16, "float32", "causal", sinks=True)
    measured = errors(problem(replace(case, sinks=False)).true, problem(case).true)
    assert all(measured[name] > 10 * problem(case).bounds[name] for name in NAMES)


@pytest.mark.parametrize("block", blocks())
def test_both_schedules_give_the_same_bits_forward(block: str) -> None:
    for case in covering()[::4]:
        ring, gathered = (on_virtual_ranks(case, block, schedule) for schedule in ("ring", "allgather"))
        assert torch.equal(ring.out, gathered.out) and torch.equal(ring.lse, gathered.lse), str(case)


Job = tuple[Case, str, str]


def attend_all(ring: Ring, jobs: list[Job]) -> list[tuple[torch.Tensor, ...]]:
    return [attend(ring, *job) for job in jobs]


def jobs_for(world_size: int) -> list[Job]:
    """Every case of this world size with the naive block, and some with the others."""
    cases = [case for case in covering() if world_size == case.P]
    assert len(cases) >= 5
    some = itertools.product(cases[::3], ("blockwise", "native"), schedules())
    jobs = [(case, "naive", schedule) for case in cases for schedule in schedules()] + list(some)
    return [job for job in jobs if refusal(job[0], job[2]) is None and job[0] in cases_of(job[2], job[1])]


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes(world_size: int) -> None:
    """On gloo the results are right, and with one thread each they are the virtual cluster's bit for bit."""
    jobs = jobs_for(world_size)
    outcome = launch(attend_all, world_size, jobs, threads=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for job, shards in zip(jobs, zip(*outcome.results, strict=True), strict=True):
            results = join(job[0], list(shards))
            assert_within_bounds(job[0], results)
            for name, one, other in zip(NAMES, results, on_virtual_ranks(*job), strict=True):
                assert torch.equal(one, other), f"{name} differs between gloo and virtual ranks: {job}"
    finally:
        torch.set_num_threads(threads)
