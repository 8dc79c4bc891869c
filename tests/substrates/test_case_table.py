"""All cases of one table equal the oracle for every block backend, schedule, score rule, loss and transport.

Under every layout, mask, schedule and number of ranks, dropout drops the pairs that the independent code in
tests/philox.py drops. New memory is NaN, so numbers that nobody wrote are noticed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ringlab import VirtualCluster
from ringlab.blocks import available as blocks
from ringlab.comm.ring import Ring
from ringlab.conformance.cases import (
    AXES,
    EVERY_THIRD,
    MASKS,
    Case,
    attend,
    cases_of,
    covering,
    inputs,
    join,
    problem,
    refusal,
    scoring_of,
)
from ringlab.conformance.tolerance import NAMES, Results, bounds, errors, truth
from ringlab.errors import RinglabError
from ringlab.schedules import available as schedules
from tests.philox import factors
from tests.substrates.writes import Writes

SEED = 2**40 + 17
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {},  # a loss that depends on lse, too, on rank 0 alone
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout": 0.3, "seed": SEED},
    "both": {"softcap": 0.7, "dropout": 0.5, "seed": SEED},
}
RULED = tuple(kind for kind, rules in KINDS.items() if rules)

Job = tuple[Case, Any, str, str]
"""A case, a block, a schedule, and a kind of score rules or of the loss."""


def program(
    ring: Ring, case: Case, block: Any, schedule: str, kind: str, device: str = "cpu"
) -> tuple[Tensor, ...]:
    dlse = None
    if kind == "lse" and ring.rank == 0:
        dlse = case.make_layout().shard(gradient_of_lse(case), 0, dim=-1)
    return attend(ring, case, block, schedule, device, dlse, **KINDS[kind])


def gradient_of_lse(case: Case) -> Tensor:
    """Return the gradient of lse of the whole sequence, which is 0 in the rows of all ranks but rank 0."""
    (H, _), own = case.heads, case.make_layout().positions(0)
    whole = torch.zeros(1, H, case.S)
    whole[..., torch.from_numpy(own)] = torch.linspace(-1, 1, H * len(own)).reshape(1, H, len(own))
    return whole


@lru_cache(maxsize=32)
def on_virtual_ranks(case: Case, block: Any, schedule: str, kind: str = "plain") -> Results:
    writes, job = Writes(), (case, block, schedule, kind)
    watched = getattr(block, "name", block) != "triton"  # its interpreter copies results back into tensors
    outcome = VirtualCluster(case.P, memory=False).run(
        lambda ring: writes.watch(program, ring, *job) if watched else program(ring, *job)
    )
    assert not writes.foreign, f"{case}: writes into memory of others: {sorted(set(writes.foreign))}"
    return join(case, outcome.results)


@lru_cache(maxsize=32)
def expected(case: Case, kind: str) -> tuple[Results, dict[str, float]]:
    """Return the true results, and the allowed errors."""
    if kind == "plain":
        return problem(case).true, problem(case).bounds
    said, tensors = KINDS[kind], inputs(case)
    drawn = None
    if "dropout" in said:
        drawn = factors(1, case.heads[0], case.S, said["dropout"], said["seed"])
    how = {**scoring_of(case), "softcap": said.get("softcap"), "factors": drawn}
    how |= {"dlse": gradient_of_lse(case).double().numpy()} if kind == "lse" else {}
    true = truth(*tensors, **how)
    return true, bounds(*tensors, true=true, **how)


def beyond(case: Case, results: Results, kind: str = "plain") -> dict[str, tuple[float, float]]:
    """Return (error, allowed) of each result whose error against the oracle is too large."""
    true, allowed = expected(case, kind)
    found = errors(results, true)
    return {name: (found[name], allowed[name]) for name in NAMES if not found[name] <= allowed[name]}


def test_the_table_covers_every_pair() -> None:
    cases = covering()
    for a, b in itertools.combinations(AXES, 2):
        met = {(getattr(case, a), getattr(case, b)) for case in cases}
        assert met == set(itertools.product(AXES[a], AXES[b]))
    assert len(cases) == len(set(cases))
    assert any(case.S < case.P for case in cases)


def refused(ring: Ring, *job: Any) -> RinglabError | None:
    try:
        program(ring, *job)
    except RinglabError as error:
        return error
    return None


@pytest.fixture(autouse=True)
def new_memory_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


SOME = [case for case in covering() if case.D <= 64]
# A block does not see the schedule: every block computes all cases in the ring, and some of them under each other schedule.
TABLE: list[Any] = [
    (case, block, schedule, "plain")
    for (place, block), schedule in itertools.product(enumerate(blocks()), schedules())
    for case in (covering() if schedule == "ring" else cases_of(schedule, block)[place :: len(blocks())])
]
TABLE += [
    (case, block, schedule, kind)
    for (index, case), (place, schedule) in itertools.product(enumerate(SOME), enumerate(schedules()))
    for number in [index + place]
    if refusal(case, schedule) is None and number % (10 if schedule in EVERY_THIRD else 2) == 1
    for block, kind in [(("naive", "blockwise", "native")[number % 3], (*RULED, "lse")[number // 2 % 4])]
]
# There are more tokens than fit in a tile, so positions are split among ranks and then among tiles.
TABLE.append((Case("zigzag", 1, 300, 2, 16, "float32", "window"), "blockwise", "ring", "both"))
TABLE = sorted(TABLE, key=str) + [
    pytest.param(case, "triton", "ring", "plain", marks=[pytest.mark.thorough, pytest.mark.needs_triton])
    for case in covering()
    if case.dtype != "float64"
]


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("case", "block", "schedule", "kind"), TABLE, ids=str)
def test_virtual_ranks(case: Case, block: str, schedule: str, kind: str) -> None:
    if error_of := refusal(case, schedule):
        for error in VirtualCluster(case.P, memory=False).run(refused, case, block, schedule, kind).results:
            assert type(error) is error_of and f"schedule '{schedule}" in str(error), error
        return
    results = on_virtual_ranks(case, block, schedule, kind)
    assert results.out.dtype == results.dq.dtype == getattr(torch, case.dtype)
    assert results.lse.dtype == (torch.float64 if case.dtype == "float64" else torch.float32)
    assert beyond(case, results, kind) == {}


@pytest.mark.parametrize("mask", sorted(set(MASKS) - {"causal", "full"}))
def test_a_mask_that_is_dropped_or_another_is_noticed(mask: str) -> None:
    """A missing or different mask is noticed: its out and gradients are beyond the right mask's bounds."""
    case = Case("zigzag", 2, 64, 2, 16, "float32", mask)
    expected = problem(case)
    tensors = (expected.q, expected.k, expected.v, expected.dout)
    for other in sorted(set(MASKS) - {mask}):
        measured = errors(truth(*tensors, mask=MASKS[other](case.S)), expected.true)
        assert all(measured[name] > 10 * expected.bounds[name] for name in NAMES), other


@pytest.mark.parametrize("schedule", ["ring", "ulysses", "query-ring"])
def test_native_gives_the_bits_of_blockwise(schedule: str) -> None:
    """With soft caps or dropout, blockwise computes all tiles of native, including mirrored ones."""
    case = Case("zigzag", 2, 64, 2, 16, "bfloat16", "window-both")
    found, right = (on_virtual_ranks(case, block, schedule, "both") for block in ("native", "blockwise"))
    assert beyond(case, found, "both") == {}
    for name, one, other in zip(NAMES, found, right, strict=True):
        assert torch.equal(one, other), name


def test_both_schedules_give_the_same_bits_forward() -> None:
    for case in covering()[::12]:
        ring, gathered = (on_virtual_ranks(case, "native", schedule) for schedule in ("ring", "allgather"))
        assert torch.equal(ring.out, gathered.out) and torch.equal(ring.lse, gathered.lse), str(case)


def attend_all(ring: Ring, jobs: list[Job], device: str = "cpu") -> list[tuple[Tensor, ...]]:
    return [tuple(x.cpu() for x in program(ring, *job, device)) for job in jobs]


def joined(jobs: list[Job], of_ranks: list[list[tuple[Tensor, ...]]]) -> Iterator[tuple[Job, Results]]:
    """Yield each job and its results, given what `attend_all` returned on all ranks."""
    for job, shards in zip(jobs, zip(*of_ranks, strict=True), strict=True):
        yield job, join(job[0], list(shards))


def missed(jobs: list[Job], of_ranks: list[list[tuple[Tensor, ...]]]) -> dict[str, Any]:
    """Return (error, allowed) of the results that are too far from the oracle, by job."""
    found = {" ".join(map(str, job)): beyond(job[0], each, job[3]) for job, each in joined(jobs, of_ranks)}
    return {job: wrong for job, wrong in found.items() if wrong}


def assert_as_on_virtual_ranks(jobs: list[Job], of_ranks: list[list[tuple[Tensor, ...]]]) -> None:
    """Fail unless the results of all jobs are right, and have the bits of virtual ranks."""
    assert missed(jobs, of_ranks) == {}
    for job, results in joined(jobs, of_ranks):
        for name, one, other in zip(NAMES, results, on_virtual_ranks(*job), strict=True):
            assert torch.equal(one, other), f"{name} differs from virtual ranks: {job}"


def jobs_for(world_size: int) -> list[Job]:
    """Return every case of this world size with the naive block, and some cases with the other blocks."""
    cases = [case for case in covering() if world_size == case.P]
    assert len(cases) >= 5
    some = itertools.product(cases[::3], ("blockwise", "native"), schedules(), ["plain"])
    jobs: list[Job] = [*itertools.product(cases, ["naive"], schedules(), ["plain"]), *some]
    return [job for job in jobs if refusal(job[0], job[2]) is None and job[0] in cases_of(job[2], job[1])]


def jobs_on_gpus(world_size: int, block: str) -> list[Job]:
    """Return jobs of every schedule in dtypes and head dims of GPUs, half of them with a gradient of lse."""
    jobs, cases = list[Job](), itertools.cycle(covering())
    axes = itertools.product(schedules(), ("float32", "bfloat16"), (64, 128))
    for number, (schedule, dtype, D) in enumerate(axes):
        alike = (replace(case, P=world_size, D=D, Dv=0, dtype=dtype) for case in cases)
        case = next(case for case in alike if refusal(case, schedule) is None)
        jobs.append((case, block, schedule, "lse" if number % 4 in (1, 2) else "plain"))
    return jobs


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("world_size", "jobs"),
    [(2, jobs_for(2)), (4, jobs_on_gpus(4, "blockwise"))],
    ids=["2", "4, as on GPUs"],
)
def test_processes(world_size: int, jobs: list[Job]) -> None:
    """On gloo the results are right, and with one thread each they have the virtual cluster's bits."""
    # Imported late, because tests/gpu imports this file on machines without cloudpickle.
    from ringlab import launch

    outcome = launch(attend_all, world_size, jobs, threads=1, timeout=500.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert_as_on_virtual_ranks(jobs, outcome.results)
    finally:
        torch.set_num_threads(threads)
