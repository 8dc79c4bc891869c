"""Scans take the bytes, rounds, memory and FLOPs of their formulas, and documents save messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ringlab import VirtualCluster
from ringlab.comm.ring import Ring
from ringlab.conformance.kinds.scan_cases import attend_to
from ringlab.cost.scan_traffic import (
    LinearAttention,
    attend_flops,
    halo_bytes,
    passage_flops,
    passing_bytes,
    rounds,
    scan_traffic,
)
from ringlab.errors import CostError
from ringlab.layout import Layout, contiguous, zigzag
from ringlab.scan import chunk, local_scan
from ringlab.scan.chunk import Tokens
from ringlab.scan.executor import Passage, pass_states
from ringlab.scan.graph import SCANS, elements_of, plan_scan
from ringlab.scan.halo import short_convolution
from ringlab.scan.program import like_passages
from tests.scan.problems import Problem


def test_the_zigzag_passes_each_rank_twice_and_the_middle_once() -> None:
    elements = elements_of(zigzag(16, 4), ())
    assert [element.rank for element in elements] == [0, 1, 2, 3, 2, 1, 0]
    assert [element.stretches for element in elements if element.rank == 0] == [
        (slice(0, 2),),
        (slice(2, 4),),
    ]


def test_documents_save_messages() -> None:
    """No state passes a rank that begins with a document, and no transition passes a document's beginning."""
    plan = plan_scan("doubling", elements_of(contiguous(16, 4), (6, 2, 8)))
    assert [[(hop.source, hop.target, hop.whole) for hop in hops] for hops in plan.rounds] == [
        [(0, 1, True), (2, 3, True)]
    ]


DELTA = LinearAttention(B=1, H=2, D=4, Dv=2, dtype="float32")
MATRIX = LinearAttention(B=1, H=2, D=3, Dv=3, dtype="float64")
DECAY = LinearAttention(B=1, H=2, D=4, Dv=6, dtype="bfloat16", delta=False)


@pytest.mark.parametrize("sizes", [DELTA, MATRIX, DECAY], ids=["delta fp32", "delta fp64", "decay bf16"])
@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("P", [2, 5])
def test_bytes_and_messages(sizes: LinearAttention, P: int, scan: str) -> None:
    """Every rank sends the formula's bytes and messages, forward and backward."""
    kind, layout = "gated-delta" if sizes.delta else "decay", contiguous(2 * P, P)
    problem = Problem(layout, kind, D=sizes.D, Dv=sizes.Dv, dtype=getattr(torch, sizes.dtype))
    run = VirtualCluster(P, memory=False).run(attend_to, problem.inputs(), layout, scan, 4).trace
    for rank in range(P):
        there, back = (
            scan_traffic(sizes, P, scan, rank=rank, backward=backward, return_state=True)
            for backward in (False, True)
        )
        sent = [e.bytes_sent for e in run.exchanges(rank) if e.bytes_sent]
        assert sorted(sent) == sorted((*there.by_step_bytes, *back.by_step_bytes)), rank


@pytest.mark.parametrize("scan", SCANS)
def test_rounds_are_those_of_the_plan(scan: str) -> None:
    for P in range(1, 9):
        assert len(plan_scan(scan, elements_of(contiguous(P, P), ())).rounds) == rounds(P, scan)


def only_pass(ring: Ring, sizes: LinearAttention, scan: str) -> None:
    """Pass states as in a forward, and compute nothing else."""
    state = getattr(torch, sizes.dtype) if sizes.dtype == "float64" else torch.float32
    side, heads = sizes.D if sizes.delta else 1, (sizes.B, sizes.H)

    def passage_of(number: int) -> Passage:
        return Passage(
            torch.ones(*heads, side, side, dtype=state), torch.ones(*heads, sizes.D, sizes.Dv, dtype=state)
        )

    known = {0: Passage(None, torch.ones(*heads, sizes.D, sizes.Dv, dtype=state))} if ring.rank == 0 else {}
    one = torch.empty(1, dtype=state)
    like = Passage(one.expand(*heads, side, side), one.expand(*heads, sizes.D, sizes.Dv))
    plan = plan_scan(scan, elements_of(contiguous(ring.world_size, ring.world_size), ()))
    pass_states(ring.comm, plan, known, passage_of, like, "state")


NARROW = LinearAttention(B=1, H=2, D=32, Dv=16, dtype="float32")
WIDE = LinearAttention(B=1, H=2, D=16, Dv=48, dtype="float32")


@pytest.mark.parametrize("sizes", [NARROW, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("scan", SCANS)
def test_memory(scan: str, sizes: LinearAttention) -> None:
    """The meter's peak is the formula's, except for 4 bytes of a number that is sent with the shapes."""
    for P in (2, 5, 9):
        peak = max(report.peak_bytes for report in VirtualCluster(P).run(only_pass, sizes, scan).memory) - 4
        expected = passing_bytes(sizes, P, scan)
        assert peak == expected or (scan == "doubling" and P > 2 and peak < expected)


@pytest.mark.parametrize("delta", [True, False])
def test_flops(delta: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLOPs are torch's counts of products; a triangular solve of C rows and n columns counts C²·n."""
    sizes, L = LinearAttention(B=1, H=2, D=4, Dv=6, dtype="float32", delta=delta), 23
    problem = Problem(
        contiguous(L, 1), "gated-delta" if delta else "decay", K=2, D=4, Dv=6, dtype=torch.float32
    )
    given, solved, solve = problem.inputs(), [0], chunk._solve
    tokens = Tokens(given.q, given.k, given.v, given.decay, given.beta)

    def counted(coupling: Tensor, right: Tensor, transposed: bool = False) -> Tensor:
        solved[0] += coupling.numel() * right.shape[-1]
        return solve(coupling, right, transposed)

    monkeypatch.setattr(chunk, "_solve", counted)
    walks: list[tuple[int, Callable[[], Any]]] = [
        (passage_flops(sizes, L, 8), lambda: local_scan.passage(tokens, like_passages(tokens), 8)),
        (attend_flops(sizes, L, 8), lambda: local_scan.attend(tokens, torch.zeros(1, 2, 4, 6), 8, 0.5)),
    ]
    for expected, walk in walks:
        solved[0] = 0
        with FlopCounterMode(display=False) as counter:
            walk()
        assert counter.get_total_flops() + solved[0] == expected


def convolve(ring: Ring, layout: Layout, B: int, C: int) -> None:
    x = torch.ones(B, layout.length(ring.rank), C, requires_grad=True)
    short_convolution(x, torch.ones(C, 4), ring=ring, layout=layout).sum().backward()


def test_the_halo_is_three_tokens() -> None:
    trace = VirtualCluster(3).run(convolve, contiguous(30, 3), 2, 5).trace
    once = halo_bytes(2, 5, 4, "float32")
    assert [trace.bytes_sent(rank) for rank in range(3)] == [once, 2 * once, once]


def test_sizes_that_make_no_sense() -> None:
    for bad in (
        lambda: scan_traffic(DELTA, 0),
        lambda: rounds(4, "ring"),
        lambda: LinearAttention(dtype="int8"),
    ):
        with pytest.raises(CostError):
            bad()
