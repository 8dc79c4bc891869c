"""Soft caps and dropout over the case table: layouts, masks, schedules and ranks drop the same pairs as one process."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ringlab import VirtualCluster
from ringlab.comm.ring import Ring
from ringlab.conformance.cases import EVERY_THIRD, Case, attend, covering, inputs, join, refusal, scoring_of
from ringlab.conformance.tolerance import NAMES, Results, bounds, errors, truth
from ringlab.schedules import available as schedules
from ringlab.scores import ScoreRules, TileRules
from tests.philox import factors

SEED = 2**40 + 17
KINDS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout": 0.3, "seed": SEED},
    "both": {"softcap": 0.7, "dropout": 0.5, "seed": SEED},
}
SOME = [case for case in covering() if case.D <= 64]
JOBS = [
    (case, block, schedule, kind)
    for (index, case), (place, schedule) in itertools.product(enumerate(SOME), enumerate(schedules()))
    for number in [index + place]
    if refusal(case, schedule) is None and number % (10 if schedule in EVERY_THIRD else 2) == 1
    for block, kind in [(("naive", "blockwise")[number % 4 // 2], tuple(KINDS)[number % 3])]
]


def program(
    ring: Ring, case: Case, block: Any, schedule: str, kind: str, device: str = "cpu"
) -> tuple[Tensor, ...]:
    return attend(ring, case, block, schedule, device, **KINDS[kind])


@cache
def expected(case: Case, kind: str) -> tuple[Results, dict[str, float]]:
    """The truth, and what is allowed, with what the twin in tests/laws/draw.py draws."""
    said, tensors = KINDS[kind], inputs(case)
    drawn = None
    if "dropout" in said:
        drawn = factors(1, case.heads[0], case.S, said["dropout"], said["seed"])
    how = {**scoring_of(case), "softcap": said.get("softcap"), "factors": drawn}
    true = truth(*tensors, **how)
    return true, bounds(*tensors, true=true, **how)


def beyond(case: Case, kind: str, results: Results) -> dict[str, tuple[float, float]]:
    true, allowed = expected(case, kind)
    measured = errors(results, true)
    return {n: (measured[n], allowed[n]) for n in NAMES if not measured[n] <= allowed[n]}


def on_virtual_ranks(case: Case, *job: Any) -> Results:
    return join(case, VirtualCluster(case.P, memory=False).run(program, case, *job).results)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: "-".join(map(str, job)))
def test_virtual_ranks(job: tuple[Case, str, str, str]) -> None:
    case, block, schedule, kind = job
    assert not beyond(case, kind, on_virtual_ranks(case, block, schedule, kind))


@pytest.mark.parametrize("schedule", schedules())
@pytest.mark.parametrize("kind", KINDS)
def test_native_gives_the_bits_of_blockwise(schedule: str, kind: str) -> None:
    """Its tiles are computed there, mirrored ones too; none of torch's operators is called for them."""
    case = Case("zigzag", 2, 64, 2, 16, "bfloat16", "window-both")
    found, right = (on_virtual_ranks(case, block, schedule, kind) for block in ("native", "blockwise"))
    assert not beyond(case, kind, found)
    for name, one, other in zip(NAMES, found, right, strict=True):
        assert torch.equal(one, other), name


def test_a_large_tile_draws_by_parts() -> None:
    """More tokens than a tile of the block has, so that positions are cut twice."""
    case = Case("zigzag", 1, 300, 2, 16, "float32", "window")
    assert not beyond(case, "both", on_virtual_ranks(case, "blockwise", "ring", "both"))


# What is wrong in places where it can be, each noticed.


class Local(ScoreRules):
    """Positions in the rank's own shard."""

    def of_tile(self, rows: np.ndarray, keys: np.ndarray) -> TileRules:
        return super().of_tile(np.arange(len(rows)), np.arange(len(keys)))


class Flat(TileRules):
    def cap_slope(self, capped: Tensor) -> None:
        return None


class NoSlope(ScoreRules):
    def of_tile(self, rows: np.ndarray, keys: np.ndarray) -> TileRules:
        return Flat(self, torch.from_numpy(rows), torch.from_numpy(keys))


class AnewInBackward(ScoreRules):
    """Another draw each time a tile is computed."""

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
    assert not beyond(case, kind, on_virtual_ranks(case, "naive", schedule, kind))
    monkeypatch.setattr("ringlab.arguments.ScoreRules", wrong)
    assert set(beyond(case, kind, on_virtual_ranks(case, "naive", schedule, kind))) == hit
