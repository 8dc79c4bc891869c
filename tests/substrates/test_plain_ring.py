"""The plain ring equals the oracle, forward and backward, under every layout and on every substrate."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

import pytest
import torch

from ringlab import VirtualCluster, launch, plain_ring
from ringlab.comm.clocked.cluster import ClockedCluster
from ringlab.comm.ring import Ring
from ringlab.comm.subgroup import SubGroup
from ringlab.comm.wrappers.strict import Strict
from ringlab.conformance.cases import ALL_LAYOUTS, Case, inputs, join
from ringlab.conformance.tolerance import NAMES, Results
from tests.substrates.test_case_table import beyond

SIZES = (  # P, S, query heads per key/value head, D, dtype
    (1, 17, 1, 16, "float64"),
    (2, 17, 2, 40, "float32"),
    (3, 2, 1, 16, "float32"),  # a rank without tokens
    (3, 64, 8, 16, "bfloat16"),
    (4, 61, 2, 16, "float64"),
    (8, 5, 2, 16, "float32"),
)
CASES = [
    Case(layout, *size, ("causal", "full")[(row + column) % 2])
    for (row, size), (column, layout) in itertools.product(enumerate(SIZES), enumerate(ALL_LAYOUTS))
]


def attend(ring: Ring, case: Case, ring_attention: Any = plain_ring.attend) -> tuple[torch.Tensor, ...]:
    """Return this rank's shards of out, lse, dq, dk and dv."""
    layout = case.make_layout()
    *qkv, dout = (layout.shard(x, ring.rank) for x in inputs(case))
    q, k, v = (x.requires_grad_() for x in qkv)
    positions = [torch.from_numpy(layout.positions(rank)) for rank in range(case.P)]
    out, lse = ring_attention(ring, q, k, v, causal=case.mask == "causal", positions=positions)
    return out.detach(), lse, *torch.autograd.grad(out, (q, k, v), dout)


def attend_all(ring: Ring, cases: list[Case]) -> list[tuple[torch.Tensor, ...]]:
    return [attend(ring, case) for case in cases]


@lru_cache(maxsize=len(CASES))
def on_virtual_ranks(case: Case) -> Results:
    return join(case, VirtualCluster(case.P, memory=False).run(attend, case).results)


def assert_same_bits(results: Results, expected: Results, case: Case) -> None:
    for name, one, other in zip(NAMES, results, expected, strict=True):
        assert torch.equal(one, other), f"{name} differs: {case}"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_virtual_ranks(case: Case) -> None:
    results = on_virtual_ranks(case)
    assert beyond(case, results) == {}
    assert results.out.dtype == results.dq.dtype == getattr(torch, case.dtype)
    assert results.lse.dtype == (torch.float64 if case.dtype == "float64" else torch.float32)


def strictly(ring: Ring, case: Case) -> tuple[torch.Tensor, ...]:
    return attend(Ring(Strict(ring.comm)), case)


def in_two_rings(ring: Ring, case: Case) -> tuple[torch.Tensor, ...]:
    """Run attention in two rings, each of which has the ranks of one parity in descending order."""
    mine = [rank for rank in reversed(range(ring.world_size)) if rank % 2 == ring.rank % 2]
    return attend(Ring(SubGroup(ring.comm, mine)), case)


ZIGZAG = Case("zigzag", 4, 61, 2, 16, "float64", "causal")


def test_nothing_is_read_or_written_on_its_way() -> None:
    case = ZIGZAG
    results = join(case, VirtualCluster(case.P, memory=False).run(strictly, case).results)
    assert_same_bits(results, on_virtual_ranks(case), case)


def test_rings_among_some_of_the_ranks() -> None:
    case = ZIGZAG
    shards = VirtualCluster(8, memory=False).run(in_two_rings, case).results
    for parity in (0, 1):
        assert_same_bits(join(case, shards[parity::2][::-1]), on_virtual_ranks(case), case)


def test_processes() -> None:
    cases = [case for case in CASES if case.P == 2]
    outcome = launch(attend_all, 2, cases, threads=1, memory=False)
    for case, shards in zip(cases, zip(*outcome.results, strict=True), strict=True):
        results = join(case, list(shards))
        assert beyond(case, results) == {}
        assert_same_bits(results, on_virtual_ranks(case), case)


def test_keys_and_values_make_one_hop_less_than_their_gradients() -> None:
    case = ZIGZAG
    """K and V make one hop less than dK and dV, on the virtual cluster, and on the clocked one without data."""
    trace = VirtualCluster(case.P, memory=False).run(attend, case).trace
    recorded = ClockedCluster(case.P, memory=False).run(attend, case)
    owned = [case.make_layout().length(rank) for rank in range(case.P)]
    for rank, log in enumerate(recorded.logs):
        sent = [
            (form.tag, to, form.shapes)
            for form, to in zip(map(recorded.forms.__getitem__, log.sent), log.to, strict=True)
        ]
        exchanges = sorted(trace.exchanges(rank), key=lambda each: each.index)
        assert [(tag, to) for tag, to, _ in sent] == [(each.tag, each.to) for each in exchanges]
        lengths = {tag: [shapes[0][2] for each, _, shapes in sent if each == tag] for tag in ("kv", "dkv")}
        blocks = [owned[(rank - step) % case.P] for step in range(case.P)]
        assert lengths == {"kv": 2 * blocks[:-1], "dkv": blocks}
        assert {to for _, to, _ in sent} == {(rank + 1) % case.P}
