"""One case table × transports × block backends × schedules × soft caps and dropout, against the oracle.

Under every layout, mask, schedule and number of ranks, dropout drops the pairs that the independent code in
tests/philox.py drops.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
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
from ringlab.scores import ScoreRules, TileRules
from tests.philox import factors
from tests.substrates.writes import Writes

SEED = 2**40 + 17
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout": 0.3, "seed": SEED},
    "both": {"softcap": 0.7, "dropout": 0.5, "seed": SEED},
}
RULED = tuple(kind for kind in KINDS if kind != "plain")

Job = tuple[Case, Any, str, str]
"""A case, a block, a schedule, and a kind of score rules."""


def program(
    ring: Ring, case: Case, block: Any, schedule: str, kind: str, device: str = "cpu"
) -> tuple[Tensor, ...]:
    return attend(ring, case, block, schedule, device, **KINDS[kind])


@lru_cache(maxsize=32)
def on_virtual_ranks(case: Case, block: Any, schedule: str, kind: str = "plain") -> Results:
    writes = Writes()
    outcome = VirtualCluster(case.P, memory=False).run(
        lambda ring: writes.watch(program, ring, case, block, schedule, kind)
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


SOME = [case for case in covering() if case.D <= 64]
# A block does not see the schedule: every block computes all cases in the ring, and a third of them under each other schedule.
TABLE: list[Job] = [
    (case, block, schedule, "plain")
    for (place, block), schedule in itertools.product(enumerate(blocks()), schedules())
    for case in (covering() if schedule == "ring" else covering()[place :: len(blocks())])
]
TABLE += [
    (case, block, schedule, kind)
    for (index, case), (place, schedule) in itertools.product(enumerate(SOME), enumerate(schedules()))
    for number in [index + place]
    if refusal(case, schedule) is None and number % (10 if schedule in EVERY_THIRD else 2) == 1
    for block, kind in [(("naive", "blockwise")[number % 4 // 2], RULED[number % 3])]
]
# There are more tokens than fit in a tile, so positions are split among ranks and then among tiles.
TABLE.append((Case("zigzag", 1, 300, 2, 16, "float32", "window"), "blockwise", "ring", "both"))


@pytest.mark.sweep(5)
@pytest.mark.parametrize(("case", "block", "schedule", "kind"), sorted(TABLE, key=str), ids=str)
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


def test_sinks_that_are_dropped_are_noticed() -> None:
    case = Case("zigzag", 2, 64, 2, 16, "float32", "causal", sinks=True)
    measured = errors(problem(replace(case, sinks=False)).true, problem(case).true)
    assert all(measured[name] > 10 * problem(case).bounds[name] for name in NAMES)


@pytest.mark.parametrize("schedule", schedules())
@pytest.mark.parametrize("kind", RULED)
def test_native_gives_the_bits_of_blockwise(schedule: str, kind: str) -> None:
    """With soft caps or dropout, blockwise computes all tiles of native, including mirrored ones."""
    case = Case("zigzag", 2, 64, 2, 16, "bfloat16", "window-both")
    found, right = (on_virtual_ranks(case, block, schedule, kind) for block in ("native", "blockwise"))
    assert beyond(case, found, kind) == {}
    for name, one, other in zip(NAMES, found, right, strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(
    "block",
    [pytest.param(block, marks=() if block == "native" else pytest.mark.thorough) for block in blocks()],
)
def test_both_schedules_give_the_same_bits_forward(block: str) -> None:
    for case in covering()[::4]:
        ring, gathered = (on_virtual_ranks(case, block, schedule) for schedule in ("ring", "allgather"))
        assert torch.equal(ring.out, gathered.out) and torch.equal(ring.lse, gathered.lse), str(case)


def attend_all(ring: Ring, jobs: list[Job]) -> list[tuple[Tensor, ...]]:
    return [program(ring, *job) for job in jobs]


def jobs_for(world_size: int) -> list[Job]:
    """Return every case of this world size with the naive block, and some cases with the other blocks."""
    cases = [case for case in covering() if world_size == case.P]
    assert len(cases) >= 5
    some = itertools.product(cases[::3], ("blockwise", "native"), schedules(), ["plain"])
    jobs: list[Job] = [*itertools.product(cases, ["naive"], schedules(), ["plain"]), *some]
    return [job for job in jobs if refusal(job[0], job[2]) is None and job[0] in cases_of(job[2], job[1])]


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [2, 3])
def test_processes(world_size: int) -> None:
    """On gloo the results are right, and with one thread each they have the virtual cluster's bits."""
    jobs = jobs_for(world_size)
    # Imported late, because tests/gpu imports this file on machines without cloudpickle.
    from ringlab import launch

    outcome = launch(attend_all, world_size, jobs, threads=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for job, shards in zip(jobs, zip(*outcome.results, strict=True), strict=True):
            results = join(job[0], list(shards))
            assert beyond(job[0], results) == {}
            for name, one, other in zip(NAMES, results, on_virtual_ranks(*job), strict=True):
                assert torch.equal(one, other), f"{name} differs between gloo and virtual ranks: {job}"
    finally:
        torch.set_num_threads(threads)


# Mutants with mistakes in different places.


class Local(ScoreRules):
    """A mutant that uses positions in the rank's own shard."""

    def of_tile(self, rows: np.ndarray, keys: np.ndarray) -> TileRules:
        return super().of_tile(np.arange(len(rows)), np.arange(len(keys)))


class Flat(TileRules):
    def cap_slope(self, capped: Tensor) -> None:
        return None


class NoSlope(ScoreRules):
    def of_tile(self, rows: np.ndarray, keys: np.ndarray) -> TileRules:
        return Flat(self, torch.from_numpy(rows), torch.from_numpy(keys))


class AnewInBackward(ScoreRules):
    """A mutant that draws anew each time a tile is computed."""

    def of_tile(self, rows: np.ndarray, keys: np.ndarray) -> TileRules:
        tile = super().of_tile(rows, keys)
        anew = ScoreRules(self.softcap, self.dropout, int(torch.randint(1 << 30, ())))
        return dataclasses.replace(tile, rules=anew)


@pytest.mark.parametrize(
    ("wrong", "schedule", "kind", "hit"),
    [
        (Local, "ring", "dropout", {"out", "dq", "dk", "dv"}),
        (AnewInBackward, "ring", "dropout", {"out", "dq", "dk", "dv"}),
        (NoSlope, "ring", "softcap", {"dq", "dk"}),
    ],
)
def test_what_is_wrong_is_noticed(
    wrong: type[ScoreRules], schedule: str, kind: str, hit: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("zigzag", 2, 64, 2, 16, "float32", "window")
    right = on_virtual_ranks.__wrapped__(case, "naive", schedule, kind)
    assert beyond(case, right, kind) == {}
    monkeypatch.setattr("ringlab.arguments.ScoreRules", wrong)
    assert set(beyond(case, on_virtual_ranks.__wrapped__(case, "naive", schedule, kind), kind)) == hit
