"""In every scan, each element gets all earlier ones once; bytes, rounds, memory and FLOPs match formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ringlab import VirtualCluster
from ringlab.comm.ring import Ring
from ringlab.comm.trace import Trace
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
from ringlab.scan import graph as module
from ringlab.scan.chunk import Tokens
from ringlab.scan.executor import Passage, pass_states
from ringlab.scan.graph import SCANS, Element, Hops, elements_of, plan_scan
from ringlab.scan.halo import short_convolution
from ringlab.scan.program import like_passages
from tests.laws.draw import refute
from tests.scan.problems import Problem


def law_every_element_hears_of_all_before_it(
    scan: Callable[[int], Hops], elements: tuple[Element, ...]
) -> None:
    """Every element gets all earlier ones once. A list of element numbers takes the place of a state."""
    scans, module.SCANS["mine"] = dict(module.SCANS), scan
    try:
        plan = plan_scan("mine", elements)
    finally:
        module.SCANS.clear()
        module.SCANS.update(scans)
    first_before = [
        max([j for j in range(i + 1) if elements[j].fresh or j == 0], default=0) if not element.fresh else i
        for i, element in enumerate(elements)
    ]
    entering: dict[int, list[int]] = {i: [] for i, e in enumerate(elements) if e.fresh or i == 0}
    for hops in plan.rounds:
        leaving = {hop.source: [*entering.get(hop.source, []), hop.source] for hop in hops}
        knew = {
            i: i in entering and _reaches(entering[i], i, first_before, elements)
            for i in range(len(elements))
        }
        for hop in hops:
            assert hop.whole == (knew[hop.source] or elements[hop.source].forgets), hop
            near = entering.get(hop.target, [])
            assert leaving[hop.source][-1] == (near[0] if near else hop.target) - 1, "passages do not join"
            entering[hop.target] = [*leaving[hop.source], *near]
    for i in range(len(elements)):
        assert i in entering and _reaches(entering[i], i, first_before, elements), (
            f"element {i} misses states"
        )


def _reaches(before: list[int], i: int, first: list[int], elements: tuple[Element, ...]) -> bool:
    """Return whether the elements before i reach back to the first, or to one that forgets earlier ones."""
    if elements[i].fresh or i == 0:
        return True
    return bool(before) and (before[0] == first[i] or any(elements[j].forgets for j in before))


@st.composite
def chains(draw: st.DrawFn) -> tuple[Element, ...]:
    cuts = st.tuples(st.booleans(), st.integers(1, 2))
    return tuple(
        Element(rank, (slice(0, 1),) * parts, fresh)
        for rank, (fresh, parts) in enumerate(draw(st.lists(cuts, max_size=9)))
    )


@pytest.mark.parametrize("scan", SCANS)
@given(elements=chains())
def test_every_element_hears_of_all_before_it(scan: str, elements: tuple[Element, ...]) -> None:
    law_every_element_hears_of_all_before_it(SCANS[scan], elements)


def halves_only(count: int) -> Hops:
    """Return the hops of a doubling scan that stops a round too early."""
    return module.doubling(count)[:-1] if count > 2 else module.doubling(count)


def test_the_law_notices() -> None:
    elements = tuple(Element(rank, (slice(0, 1),), False) for rank in range(6))
    refute(law_every_element_hears_of_all_before_it, SCANS["doubling"], halves_only, [(elements,)])


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
SIZES = pytest.mark.parametrize(
    "sizes", [DELTA, MATRIX, DECAY], ids=["delta fp32", "delta fp64", "decay bf16"]
)


def traced(sizes: LinearAttention, layout: Layout, scan: str) -> Trace:
    kind = "gated-delta" if sizes.delta else "decay"
    problem = Problem(layout, kind, D=sizes.D, Dv=sizes.Dv, dtype=getattr(torch, sizes.dtype))
    return VirtualCluster(layout.P, memory=False).run(attend_to, problem.inputs(), layout, scan, 4).trace


def assert_as_the_formula_says(sizes: LinearAttention, P: int, scan: str, tokens: int) -> None:
    """Every rank sends the formula's bytes and messages, forward and backward."""
    run = traced(sizes, contiguous(P * tokens, P), scan)
    for rank in range(P):
        there, back = (
            scan_traffic(sizes, P, scan, rank=rank, backward=backward, return_state=True)
            for backward in (False, True)
        )
        sent = [e.bytes_sent for e in run.exchanges(rank) if e.bytes_sent]
        assert sorted(sent) == sorted((*there.by_step_bytes, *back.by_step_bytes)), rank


@SIZES
@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("P", [1, 2, 3, 6])
def test_bytes_and_messages(sizes: LinearAttention, P: int, scan: str) -> None:
    assert_as_the_formula_says(sizes, P, scan, 2)


def test_bytes_do_not_depend_on_the_length() -> None:
    short, long = (traced(DELTA, contiguous(S, 4), "all-gather") for S in (8, 200))
    assert [short.bytes_sent(rank) for rank in range(4)] == [long.bytes_sent(rank) for rank in range(4)]


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("P", [1, 2, 3, 4, 5, 8])
def test_rounds_are_those_of_the_plan(P: int, scan: str) -> None:
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


def assert_as_much_memory(sizes: LinearAttention, P: int, scan: str) -> None:
    """The meter's peak is the formula's, except for 4 bytes of a number that is sent with the shapes."""
    peak = max(report.peak_bytes for report in VirtualCluster(P).run(only_pass, sizes, scan).memory) - 4
    expected = passing_bytes(sizes, P, scan)
    assert peak == expected or (scan == "doubling" and P > 2 and peak < expected)


@pytest.mark.parametrize("sizes", [NARROW, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("P", [2, 3, 4, 5, 9])
def test_memory(P: int, scan: str, sizes: LinearAttention) -> None:
    assert_as_much_memory(sizes, P, scan)


def test_doubling_reaches_its_bound() -> None:
    reports = VirtualCluster(17).run(only_pass, WIDE, "doubling").memory
    assert max(report.peak_bytes for report in reports) - 4 == passing_bytes(WIDE, 17, "doubling")


def test_the_meter_notices_an_all_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.SCANS, "relay", module.all_gather)
    with pytest.raises(AssertionError):
        assert_as_much_memory(WIDE, 8, "relay")


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


@pytest.mark.parametrize(
    "bad",
    [
        lambda: scan_traffic(DELTA, 0),
        lambda: scan_traffic(DELTA, 4, "ring"),
        lambda: rounds(4, "ring"),
        lambda: passing_bytes(DELTA, 2, "ring"),
        lambda: LinearAttention(D=0),
        lambda: LinearAttention(dtype="int8"),
    ],
)
def test_sizes_that_make_no_sense(bad: Callable[[], Any]) -> None:
    with pytest.raises(CostError):
        bad()
