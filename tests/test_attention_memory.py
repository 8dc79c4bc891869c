"""A rank holds its shard, a block in use, a block that arrives, and accumulators, never S/P × S elements."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ringlab import VirtualCluster, ring_attention
from ringlab.comm.memory import MemoryReport
from ringlab.comm.ring import Ring
from ringlab.comm.virtual.threads import RankThread
from ringlab.comm.virtual.turns import Turns
from ringlab.conformance.cases import LAYOUTS
from ringlab.layout import Layout

D = 64
FLOAT = 4
"""Bytes of a float32."""


def program(
    ring: Ring, shards: list[tuple[Tensor, ...]], layout: Layout, block: str, schedule: str, learn: bool
) -> None:
    """Run attention on the caller's shards, so that only the tensors that attention makes are counted."""
    *qkv, dout = shards[ring.rank]
    q, k, v = (x.requires_grad_(learn) for x in qkv)
    out = ring_attention(q, k, v, ring=ring, layout=layout, block=block, schedule=schedule)
    if learn:
        torch.autograd.grad(out, (q, k, v), dout)


def reports(
    name: str, P: int, length: int, block: str, schedule: str = "ring", learn: bool = True, heads: int = 1
) -> list[MemoryReport]:
    layout = LAYOUTS[name](P * length, P)
    whole = tuple(torch.ones(1, each, layout.S, D) for each in (heads, 1, 1, heads))
    shards = [layout.shard(whole, rank) for rank in range(P)]
    return VirtualCluster(P).run(program, shards, layout, block, schedule, learn).memory


def peak(*args: object, **options: object) -> float:
    """Return the peak of the rank that needs most, in shards, which are tensors of S/P tokens."""
    length = args[2]
    assert isinstance(length, int)
    return max(report.peak_bytes for report in reports(*args, **options)) / (length * D * FLOAT)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["ring", "allgather"])
@pytest.mark.parametrize("block", ["naive", "blockwise", "native"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_nothing_as_large_as_a_row_of_blocks(layout: str, block: str, schedule: str) -> None:
    """No single allocation reaches (S/P)·S elements, forward and backward."""
    P, length = 4, 256
    for report in reports(layout, P, length, block, schedule):
        assert 0 < report.largest_bytes < length * (P * length) * FLOAT


@pytest.mark.parametrize("learn", [False, True])
def test_the_ring_holds_no_more_on_more_ranks(learn: bool) -> None:
    """With equal S/P, a rank needs at most 2 % more memory for twice the ranks and twice the sequence."""
    four, eight = (peak("zigzag", P, 512, "native", "ring", learn=learn) for P in (4, 8))
    assert eight <= 1.02 * four


def test_the_ring_holds_less_than_an_all_gather() -> None:
    ring, gathered = (
        peak("zigzag", 8, 512, "native", schedule, learn=False) for schedule in ("ring", "allgather")
    )
    assert gathered - ring >= 8


@pytest.mark.parametrize(
    ("learn", "shards"),
    [
        # two blocks of K/V (4), out (1), a tile's result (1); lse and messages of agreement below 0.5
        (False, 6.5),
        # out; two blocks of K/V and two of their gradients (8); dq (1); a tile's dq, dk, dv (3), dout·out (1); lse, delta and messages
        (True, 14.6),
    ],
)
def test_a_rank_holds_its_blocks_and_accumulators(learn: bool, shards: float) -> None:
    assert peak("zigzag", 8, 512, "native", "ring", learn=learn) <= shards


def test_blockwise_is_linear_in_the_sequence() -> None:
    """Twice the sequence on one rank takes twice the memory; with the naive block it takes four times as much."""
    for block, least, most in (("blockwise", 1.5, 2.2), ("naive", 3.0, 4.1)):
        one, two = (
            reports("contiguous", 1, length, block, learn=True)[0].peak_bytes for length in (1024, 2048)
        )
        assert least <= two / one <= most, block


@pytest.mark.parametrize("P", [2, 4])
@pytest.mark.parametrize(
    "schedule",
    [
        "ring",
        "allgather",
        "double-ring(node=2)",
        "query-ring",
        "burst",
        "bidirectional",
        "multi-ring",
        "ulysses",
    ],
)
def test_a_peak_does_not_depend_on_the_pace_of_the_ranks(
    schedule: str, P: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the program decides the peak, even if a rank's messages complete while it is still computing."""
    compute, late = Turns.compute, [-1]

    def slowed(turn: Turns, thread: RankThread, function: Callable[[], object], thread_safe: bool) -> object:
        def job() -> object:
            time.sleep(0.02 * (thread.rank == late[0]))
            return function()

        return compute(turn, thread, job, thread_safe)

    monkeypatch.setattr(Turns, "compute", slowed)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # one for each of two ranks at the same time
    seen = []
    for late[0] in (-1, 0, 1):
        seen.append(reports("zigzag", P, 32, "native", schedule, heads=4))
    assert seen[0] == seen[1] == seen[2]
