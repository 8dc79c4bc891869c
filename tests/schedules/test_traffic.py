"""The schedules send the bytes that their formulas predict, in total and between nodes.

A double ring sends as much as a ring, and less between nodes, by the formula in this file. Consecutive ranks
form nodes of `node` ranks each. `backward` counts the backward pass alone.

The memory meter measures the memory of each schedule beyond a rank's own shard. The guide contains these figures.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ringlab import VirtualCluster, ring_attention
from ringlab.comm.ring import Ring
from ringlab.comm.trace import Trace
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import (
    Traffic,
    gradient_bytes_per_token,
    hybrid_traffic,
    ring_traffic,
    ulysses_traffic,
)
from ringlab.layout import Layout, contiguous, zigzag
from ringlab.mask import Mask
from tests.schedules.problems import Problem, program


@dataclass(frozen=True)
class NodeTraffic:
    """Bytes that leave a node: those of all its ranks, and those of its busiest rank."""

    node_bytes: int
    busiest_rank_bytes: int


def between_nodes(
    sizes: Attention, S: int, P: int, node: int, *, double: bool, backward: bool = False
) -> NodeTraffic:
    """Return the bytes that leave a node, whose ranks have ceil(S/P) tokens, in a double ring or in a ring.

    In a ring one rank of a node sends to the next node: P − 1 blocks of K and V, and in backward also P
    blocks of dK and dV. In a double ring each of the n ranks sends N − 1 blocks to the same place in the next
    of the N nodes. So P − n blocks leave the node, and in backward N blocks of dK and dV for each rank.
    """
    nodes, tokens = P // node, -(-S // P)
    blocks, gradients, senders = (nodes - 1, nodes, node) if double else (P - 1, P, 1)
    per_rank = blocks * sizes.block_bytes_per_token * tokens
    if backward:
        per_rank += gradients * gradient_bytes_per_token(sizes) * tokens
    return NodeTraffic(senders * per_rank, per_rank)


MHA = Attention(B=2, H=4, K=4, D=4, dtype="float32")
GQA = Attention(B=1, H=8, K=2, D=4, dtype="bfloat16")
MQA = Attention(B=1, H=4, K=1, D=4, dtype="float64", Dv=5)
MLA = Attention(B=1, H=4, K=4, D=6, dtype="bfloat16", Dv=4)
ALL = pytest.mark.parametrize(
    "sizes", [GQA, MQA, MLA], ids=["GQA bf16", "MQA fp64, Dv > D", "MLA bf16, Dv < D"]
)


def trace(sizes: Attention, layout: Layout, schedule: str, mask: Mask | None = None) -> Trace:
    dims: dict[str, Any] = {
        "D": sizes.D,
        "Dv": sizes.value_dim,
        "B": sizes.B,
        "dtype": getattr(torch, sizes.dtype),
    }
    problem = Problem(layout, sizes.H, sizes.K, mask or Mask(), **dims)
    run = VirtualCluster(layout.P, memory=False).run(program, problem, schedule, False)
    return run.trace


Formula = Callable[[Attention, bool], Traffic]
FORMULAS: dict[str, tuple[int, Formula]] = {
    "ulysses": (4, lambda sizes, back: ulysses_traffic(sizes, 24, 4, backward=back)),
    "hybrid(ring=2, ulysses=2)": (4, lambda sizes, back: hybrid_traffic(sizes, 24, 2, 2, backward=back)),
    "hybrid(ring=3)": (6, lambda sizes, back: hybrid_traffic(sizes, 24, 3, 2, backward=back)),
    "hybrid(ulysses=4)": (8, lambda sizes, back: hybrid_traffic(sizes, 24, 2, 4, backward=back)),
    "double-ring(node=2)": (4, lambda sizes, back: ring_traffic(sizes, 24, 4, backward=back)),
    "double-ring(node=3)": (6, lambda sizes, back: ring_traffic(sizes, 24, 6, backward=back)),
}


@ALL
@pytest.mark.parametrize("schedule", FORMULAS)
def test_bytes_and_messages_are_those_of_the_formula(schedule: str, sizes: Attention) -> None:
    """Every rank sends the formula's bytes and messages, forward and backward together."""
    P, formula = FORMULAS[schedule]
    there, back = formula(sizes, False), formula(sizes, True)
    run = trace(sizes, contiguous(24, P), schedule)
    for rank in range(P):
        sent = [e.bytes_sent for e in run.exchanges(rank)]
        assert sum(sent) == there.total_bytes + back.total_bytes, rank
        assert len(sent) == there.messages + back.messages, rank


def test_ragged_ranks_send_no_more_than_the_formula_says() -> None:
    run = trace(GQA, zigzag(23, 4), "ulysses")
    most = sum(ulysses_traffic(GQA, 23, 4, backward=back).total_bytes for back in (False, True))
    assert 0.8 * most < max(sum(e.bytes_sent for e in run.exchanges(rank)) for rank in range(4)) <= most


@pytest.mark.parametrize(("P", "node"), [(4, 2), (6, 3)])
def test_what_leaves_a_node_is_what_the_formula_says(P: int, node: int) -> None:
    for schedule, double in (("ring", False), (f"double-ring(node={node})", True)):
        run = trace(GQA, contiguous(24, P), schedule)
        there, back = (between_nodes(GQA, 24, P, node, double=double, backward=way) for way in (False, True))
        of_ranks = [sum(e.bytes_sent for e in run.exchanges(rank) if e.to >= node) for rank in range(node)]
        assert sum(of_ranks) == there.node_bytes + back.node_bytes
        assert max(of_ranks) == there.busiest_rank_bytes + back.busiest_rank_bytes


SAVING = ["ring", "allgather", "double-ring(node=2)", "query-ring", "bidirectional", "multi-ring"]


@pytest.mark.parametrize("schedule", SAVING)
def test_a_window_saves_what_nobody_sees(schedule: str) -> None:
    """A window that reaches one rank back needs one hop of seven; the double ring skips whole nodes."""
    layout, mask = contiguous(64, 8), Mask(window=8)
    whole, near = (trace(MHA, layout, schedule, m) for m in (None, mask))
    share = sum(e.bytes_sent for e in near.exchanges()) / sum(e.bytes_sent for e in whole.exchanges())
    # K, V in forward, K, V in backward, and dK, dV home: without the window they make 7, 7 and 8 hops. With
    # it they make 1, 1 and 2 hops, or 3, 3 and 4 in a double ring.
    expected = {
        "ring": (1 + 1 + 2) / (7 + 7 + 8),
        "allgather": 3 / 21,
        "double-ring(node=2)": (3 + 3 + 4) / 22,
        "bidirectional": (1 + 1 + 2) / (7 + 7 + 8),
        "multi-ring": (1 + 1 + 2) / (7 + 7 + 8),
        # Per row in float32: forward sends q, then out and lse home; backward sends q, dout, lse and delta,
        # then dq home.
        "query-ring": (4 + 2 * 5 + 10 + 2 * 4) / (7 * 4 + 8 * 5 + 7 * 10 + 8 * 4),
    }
    assert share == pytest.approx(expected[schedule])


GUIDE = (Path(__file__).parents[2] / "docs/guide/schedules.md").read_text(encoding="utf-8")
METERED = {"P": 8, "S": 1024, "H": 8, "D": 64}
PEAKS = {
    "ring": (6.1, 12.5),
    "allgather": (16.1, 44.0),
    "ulysses": (6.0, 14.8),
    "hybrid(ulysses=2)": (9.1, 17.5),
    "double-ring(node=2)": (8.1, 16.5),
    "bidirectional": (10.1, 20.5),
    "multi-ring": (5.3, 11.0),
    "burst": (6.1, 17.1),
    "query-ring": (5.6, 17.1),
}
"""The peaks of forward alone, and with backward, in tensors as large as q's shard of S/P tokens."""


def once(ring: Ring, schedule: str, backward: bool) -> None:
    layout = zigzag(METERED["S"], ring.world_size)
    shape = 1, METERED["H"], layout.length(ring.rank), METERED["D"]
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=draw).requires_grad_(backward) for _ in range(3))
    out = ring_attention(q, k, v, ring=ring, layout=layout, schedule=schedule, block="native")
    if backward:
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


def peak(schedule: str, backward: bool) -> float:
    """Return the largest peak of a rank beyond q, k, v and dout, in multiples of q's shard."""
    P, S, H, D = METERED.values()
    reports = VirtualCluster(P).run(once, schedule, backward).memory
    return max(report.peak_bytes for report in reports) / (H * S // P * D * 4) - (4 if backward else 3)


@pytest.mark.parametrize("schedule", PEAKS)
def test_peaks_are_those_of_the_table(schedule: str) -> None:
    for backward, expected in zip((False, True), PEAKS[schedule], strict=True):
        assert peak(schedule, backward) == pytest.approx(expected, abs=0.06)


def test_the_guide_says_so() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|[^|]+\|[^|]+\| ([\d.]+) \| ([\d.]+) \|", GUIDE, re.MULTILINE)
    assert {name: (float(one), float(both)) for name, one, both in rows} == PEAKS
