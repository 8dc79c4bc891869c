"""Schedules weighed: bytes of `traffic`, seconds of `overlap`, room of `memory`, and an order that these make.

The numbers of `tables/hardware.toml` once more, transcribed apart from it, in base units.

Each row: ranks in a node; bytes, bytes/s of memory; TFLOP/s by dtype; (GB/s one way, µs) inside and
between nodes; fractions reached by attention forward, backward and matrices.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab import VirtualCluster, contiguous, ring_attention
from ringlab.comm.ring import Ring
from ringlab.cost import choose
from ringlab.cost.hardware import Hardware, hardware, hardware_names
from ringlab.cost.memory import attention_bytes
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import (
    allgather_traffic,
    block_s,
    hop_s,
    hybrid_traffic,
    ring_traffic,
    ulysses_traffic,
)
from ringlab.errors import CostError
from tests.cost.test_closed_form import allgather_s

LAYERS = st.builds(
    lambda B, K, group, D, dtype, causal: Attention(B, K * group, K, D, dtype, causal),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 8, 12]),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([8, 64]),
    st.sampled_from(["bfloat16", "float32"]),
    st.booleans(),
)
RANKS = st.sampled_from([2, 3, 4, 6, 8, 12, 16, 32])
RATES = st.tuples(
    st.integers(1, 2**20),
    st.floats(1e10, 1e15),
    st.floats(1e7, 1e12),
    st.sampled_from([0.0, 1e-6, 1e-3]),
)


@given(LAYERS, RANKS, st.integers(1, 5000))
def test_bytes_are_those_of_the_traffic_room(sizes: Attention, P: int, tokens: int) -> None:
    S = tokens * P
    for it in choose.ways(sizes, P):
        expected = {
            "ring": lambda: ring_traffic(sizes, S, P),
            "allgather": lambda: allgather_traffic(sizes, S, P),
            "ulysses": lambda: ulysses_traffic(sizes, S, P),
            "hybrid": lambda degree=it.ulysses: hybrid_traffic(sizes, S, P // degree, degree),
        }[it.schedule]()
        assert it.sent_bytes * tokens == expected.total_bytes
        hops = P // it.ulysses - 1 if it.schedule != "allgather" else 0
        assert (
            it.hops == hops and it.hop_bytes * tokens * hops == expected.total_bytes - it.open_bytes * tokens
        )


@given(LAYERS, RANKS, RATES)
def test_the_ends_are_the_ring_of_overlap_and_the_all_gather_of_the_closed_forms(sizes, P, rates) -> None:
    tokens, F, B, latency = rates
    ring, gather = (choose.way(sizes, P, name) for name in ("ring", "allgather"))
    exposed = max(0.0, hop_s(sizes, tokens, B, latency) - block_s(sizes, tokens, F))
    assert ring.exposed_s(*rates) == pytest.approx((P - 1) * exposed, rel=1e-9, abs=1e-12)
    half = hop_s(sizes, tokens, B) / 2
    assert gather.exposed_s(*rates) == pytest.approx(allgather_s(P, 0.0, half, latency), rel=1e-9)
    assert ring.held_bytes * tokens == attention_bytes(sizes, tokens, P, "ring")
    assert gather.held_bytes * tokens == attention_bytes(sizes, tokens, P, "allgather")


@given(LAYERS, RANKS, RATES)
def test_a_hybrid_by_formulas_of_the_tests_own(sizes: Attention, P: int, rates) -> None:
    """A row of U ranks trades q, k, v and out; a ring of P/U takes U times the tokens, for a U-th of the heads."""
    tokens, F, B, latency = rates
    e = 2 if sizes.dtype == "bfloat16" else 4
    for it in choose.ways(sizes, P):
        if it.schedule in ("ring", "allgather"):
            continue
        U, h = it.ulysses, max(1, sizes.K // it.ulysses)
        token = sizes.B * sizes.D * e * tokens
        trades = (U - 1) * token * (2 * sizes.H // U + 2 * h) / B + 2 * latency
        hop = 2 * h * U * token / B + latency
        block = 4 * sizes.B * (sizes.H // U) * sizes.D * (U * tokens) ** 2 / F / (2 if sizes.causal else 1)
        expected = trades + (P // U - 1) * max(0.0, hop - block)
        assert it.exposed_s(*rates) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        visitor = 2 * h * U * token if U < P else 0
        held = 2 * (sizes.H + sizes.K) * token + 2 * (sizes.H // U + h) * U * token + visitor
        assert it.held_bytes * tokens == held


@given(LAYERS, RANKS, RATES, st.floats(1e6, 1e12))
def test_the_order_and_the_reasons(sizes: Attention, P: int, rates, memory: float) -> None:
    tokens, F, B, latency = rates
    found = choose.weigh(sizes, tokens, P, F, B, latency, memory)
    assert len(found) == len(choose.candidates(P))
    assert {(it.schedule, it.ulysses) for it in found} == set(choose.candidates(P))
    usable = [it for it in found if it.usable]
    assert found[: len(usable)] == usable
    assert [it.exposed_s for it in usable] == sorted(it.exposed_s for it in usable)
    for it in found:
        if it.reason == "heads":
            with pytest.raises(CostError):
                choose.way(sizes, P, it.schedule, it.ulysses)
            assert it.sent_bytes is it.held_bytes is it.exposed_s is None
        else:
            assert (it.held_bytes > memory) == (it.reason == "memory")
            assert it.reason != "hidden" or it.exposed_s == 0


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([(4, 4), (4, 2), (8, 1), (6, 3)]), st.sampled_from([2, 4, 6]), st.integers(1, 3))
def test_every_way_sends_what_the_real_program_sends(heads, P: int, tokens: int) -> None:
    sizes = Attention(1, *heads, 4, "float32")
    layout = contiguous(tokens * P, P)

    def program(ring: Ring, name: str) -> None:
        q, k, v = (torch.ones(1, count, tokens, 4) for count in (heads[0], heads[1], heads[1]))
        ring_attention(q, k, v, ring=ring, layout=layout, schedule=name, block="naive", validate=False)

    for it in choose.ways(sizes, P):
        name = f"hybrid(ulysses={it.ulysses})" if it.schedule == "hybrid" else it.schedule
        trace = VirtualCluster(P, memory=False).run(program, name).trace
        assert {trace.bytes_sent(rank) for rank in range(P)} == {it.sent_bytes * tokens}


def test_grouped_heads_turn_ring_and_ulysses_around() -> None:
    """Ring over Ulysses is P·K/(H + K): P/2 of all heads, P/9 at 8:1."""
    for K, P, ratio in ((64, 8, 4), (8, 8, 8 / 9), (8, 4, 4 / 9), (16, 16, 16 / 5)):
        ring, ulysses = (choose.way(Attention(H=64, K=K), P, *key) for key in (("ring", 1), ("ulysses", P)))
        assert ring.sent_bytes / ulysses.sent_bytes == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("call", "needed"),
    [
        (lambda: choose.candidates(1), "P >= 2"),
        (lambda: choose.weigh(Attention(), 16, 1, 1.0, 1.0), "P >= 2"),
        (lambda: choose.weigh(Attention(), 0, 2, 1.0, 1.0), "above zero"),
        (lambda: choose.weigh(Attention(), 16, 2, 1.0, 0.0), "above zero"),
        (lambda: choose.weigh(Attention(), 16, 2, 1.0, 1.0, -1.0), "latency_s >= 0"),
        (lambda: choose.weigh(Attention(), 16, 2, float("nan"), 1.0), "above zero"),
        (lambda: choose.way(Attention(), 8, "ulysses", 4), "a schedule and a degree"),
        (lambda: choose.way(Attention(H=12, K=4), 6, "ulysses", 6), "K=4 key/value heads"),
        (lambda: choose.way(Attention(), 8, "double-ring"), "a schedule and a degree"),
    ],
)
def test_what_makes_no_sense_is_refused(call, needed: str) -> None:
    with pytest.raises(CostError, match=needed):
        call()


MIB, GB, GIB = 2**20, 10**9, 2**30

A100: dict[str, float] = {"bfloat16": 312, "float16": 312, "tf32": 156, "float32": 19.5}
HOPPER: dict[str, float] = {
    "bfloat16": 989.4,
    "float16": 989.4,
    "tf32": 494.7,
    "float32": 66.9,
    "float8": 1978.9,
}
BLACKWELL: dict[str, float] = {"bfloat16": 2250, "float16": 2250, "tf32": 1100, "float32": 80, "float8": 4500}

Sheet = tuple[
    int, float, float, dict[str, float], tuple[float, float], tuple[float, float], tuple[float, float, float]
]

SHEETS: dict[str, Sheet] = {
    "a100": (8, 81920 * MIB, 2039 * GB, A100, (300, 3.4), (25, 14), (0.73, 0.63, 0.8)),
    "a100-40gb": (8, 40960 * MIB, 1555 * GB, A100, (300, 3.4), (25, 14), (0.73, 0.63, 0.8)),
    "h100": (8, 81559 * MIB, 3350 * GB, HOPPER, (450, 3.4), (50, 14), (0.655, 0.567, 0.8)),
    "h200": (8, 141 * GB, 4800 * GB, HOPPER, (450, 3.4), (50, 14), (0.655, 0.567, 0.8)),
    "h800": (8, 81559 * MIB, 3350 * GB, HOPPER, (200, 3.4), (50, 14), (0.655, 0.567, 0.8)),
    "b200": (8, 180 * GB, 8000 * GB, BLACKWELL, (900, 3.4), (50, 14), (0.71, 1, 1)),
    "tpu-v3": (1024, 32 * GIB, 900 * GB, {"bfloat16": 123}, (100, 1), (6.25, 50), (1, 1, 1)),
    "tpu-v4": (4096, 32 * GIB, 1200 * GB, {"bfloat16": 275}, (45, 1), (6.25, 50), (1, 1, 1)),
    "tpu-v5e": (256, 16 * GIB, 819 * GB, {"bfloat16": 197}, (45, 1), (3.125, 50), (1, 1, 1)),
    "tpu-v5p": (8960, 95 * GIB, 2765 * GB, {"bfloat16": 459}, (100, 1), (6.25, 50), (1, 1, 1)),
    "laptop": (4, 4 * GB, 12.8 * GB, {"float32": 0.096, "bfloat16": 0.096}, (2, 50), (0.125, 100), (1, 1, 1)),
    "laptops": (
        1,
        16 * GB,
        51.2 * GB,
        {"float32": 0.384, "bfloat16": 0.384},
        (2, 50),
        (0.125, 100),
        (1, 1, 1),
    ),
}


def _numbers(it: Hardware) -> list[float]:
    """All numbers of an entry, in the order of `SHEETS`."""
    links = [(link.bytes_per_s / 1e9, link.latency_s * 1e6) for link in (it.inside, it.between)]
    flops = [rate / 1e12 for _, rate in sorted(it.flops_per_s.items())]
    reached = it.reached.attention_forward, it.reached.attention_backward, it.reached.linear
    return [it.ranks_per_node, it.memory_bytes, it.memory_bytes_per_s, *flops, *links[0], *links[1], *reached]


@pytest.mark.parametrize("name", hardware_names())
def test_every_number_is_that_of_the_sheets(name: str) -> None:
    ranks, memory, bandwidth, flops, inside, between, reached = SHEETS[name]
    ordered = [flops[dtype] for dtype in sorted(flops)]
    assert sorted(hardware(name).flops_per_s) == sorted(flops)
    expected = [ranks, memory, bandwidth, *ordered, *inside, *between, *reached]
    assert _numbers(hardware(name)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["a100", "a100-40gb", "h100", "h200", "b200"])
def test_the_source_says_whether_memory_is_the_drivers_or_the_sheets(name: str) -> None:
    """What a driver reports is a whole number of MiB; the sheet's decimal GB is less, and is called so."""
    it = hardware(name)
    reported = f"driver reports it, {it.memory_bytes / 2**20:.0f} MiB" in it.source
    assert reported != ("decimal GB, which is conservative" in it.source)
    assert reported == (it.memory_bytes % 2**20 == 0)
