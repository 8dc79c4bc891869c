"""Rings work over a program's own process groups and meshes, also inside DDP and FSDP2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringlab import VirtualCluster, launch, zigzag
from ringlab.comm.ring import Ring
from ringlab.errors import BackendError
from tests.schedules.problems import Problem, program
from tests.trainer.model import Gradients, alone
from tests.trainer.programs import BATCHES, DTYPES, RANKS, TRAINERS, four, step_under_autocast

pytestmark = pytest.mark.thorough

PROBLEM = Problem(zigzag(12, 2), H=4, K=2)
ROUNDINGS = 100
"""Units of last place through two layers; the smallest mistake, a factor of 2, is 10⁴ times larger in float32."""


@pytest.fixture(scope="module")
def processes() -> list[dict[str, Any]]:
    return launch(four, RANKS, PROBLEM, memory=False).results


def virtual(problem: Problem) -> list[tuple[Tensor, ...]]:
    """Return the results of virtual ranks, which other tests compare with the oracle."""
    return VirtualCluster(problem.layout.P, memory=False).run(program, problem, "ring").results


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("number", range(len(DTYPES)), ids=lambda number: str(DTYPES[number]))
def test_a_ring_over_a_dimension_of_a_mesh(number: int, processes: list[dict[str, Any]]) -> None:
    expected = virtual(replace(PROBLEM, dtype=DTYPES[number]))
    assert all(same(of["rows"][number], expected[rank % 2]) for rank, of in enumerate(processes))


def test_rings_over_columns_all_processes_and_groups_opened_later(processes: list[dict[str, Any]]) -> None:
    of_two, of_four = virtual(PROBLEM), virtual(replace(PROBLEM, layout=zigzag(12, RANKS)))
    for rank, of in enumerate(processes):
        assert same(of["columns"], of_two[rank // 2])
        assert same(of["closed"], of_two[rank % 2])
        assert same(of["all"], of_four[rank])
        assert of["kept"], "one group has one transport; a second would count calls anew"


def test_two_rings_at_once(processes: list[dict[str, Any]]) -> None:
    expected = [(out, *gradients) for out, _, *gradients in virtual(PROBLEM)]
    for rank, of in enumerate(processes):
        assert [same(of["both"][0], expected[rank // 2]), same(of["both"][1], expected[rank % 2])] == [
            True
        ] * 2


def test_a_step_under_autocast_is_that_of_virtual_ranks(processes: list[dict[str, Any]]) -> None:
    expected = VirtualCluster(2, memory=False).run(step_under_autocast).results
    for rank, of in enumerate(processes):
        assert of["autocast"].keys() == expected[rank % 2].keys()
        assert all(torch.equal(x, expected[rank % 2][name]) for name, x in of["autocast"].items())


def truth() -> Gradients:
    """Return the gradients of both batches' mean loss, on one process without a ring."""
    each = [alone(seed=seed)[1] for seed in BATCHES]
    return {name: sum(one[name] for one in each) / len(BATCHES) for name in each[0]}  # type: ignore[misc]


def differences(found: Gradients, true: Gradients) -> float:
    assert found.keys() == true.keys()
    return max(float((found[name] - true[name]).abs().max()) for name in true)


@pytest.mark.parametrize("name", TRAINERS)
def test_gradients_are_those_of_one_process(name: str, processes: list[dict[str, Any]]) -> None:
    """Gradients equal one process's; DDP averages over ranks, so its loss is multiplied by their number."""
    true = truth()
    largest = max(float(x.abs().max()) for x in true.values())
    for of in processes:
        found = of["trained"][name]
        if name == "DDP, not multiplied":
            # Three quarters of the gradient are missing.
            assert differences(found, true) > 0.7 * largest
            found = {key: RANKS * x for key, x in found.items()}
        eps = torch.finfo(next(iter(found.values())).dtype).eps
        assert differences(found, true) <= ROUNDINGS * eps * (1 + largest)


@pytest.mark.parametrize(
    "asked, says",
    [
        ("Ring(mesh)", "BackendError: needed: a transport of ringlab.comm\n   got: a DeviceMesh\nremedy: Ring.of_group"),
        ("two dimensions", "WorldSizeError: needed: a mesh of one dimension\n   got: 2 dimensions, dp, cp\nremedy: mesh['cp']"),
        ("a name", "BackendError: needed: a process group, a DeviceMesh of one dimension"),
    ],
)  # fmt: skip
def test_something_else_than_a_group_is_refused(
    asked: str, says: str, processes: list[dict[str, Any]]
) -> None:
    assert all(of["refused"][asked].startswith(says) for of in processes)


def test_a_group_of_others_is_refused(processes: list[dict[str, Any]]) -> None:
    member, *others = (of["refused"]["the group of rank 0"] for of in processes)
    assert member.startswith("Ring(rank=0, world_size=1")
    assert all("WorldSizeError" in of and "a group of other ranks" in of for of in others)


def test_without_a_process_group() -> None:
    with pytest.raises(BackendError, match="none is open"):
        Ring.of_group()
