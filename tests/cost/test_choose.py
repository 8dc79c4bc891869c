"""A schedule is chosen by bytes, memory and seconds that agree with formulas and simulations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringlab import VirtualCluster, contiguous, latent_attention
from ringlab.comm.ring import Ring
from ringlab.cost import choose
from ringlab.cost.choose import ring_exposed_s, weigh_rings
from ringlab.cost.hardware import hardware
from ringlab.cost.memory import attention_bytes
from ringlab.cost.planner import Request, plan
from ringlab.cost.planner.ring_table import RingTable
from ringlab.cost.simulate import FullMesh, simulate
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import (
    RINGS,
    allgather_traffic,
    block_s,
    hop_s,
    hybrid_traffic,
    ring_traffic,
    ulysses_traffic,
)
from ringlab.errors import BackendError, CostError
from ringlab.tile import Tile
from tests.cost.planner_cases import ideal, small_model
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
    """A hybrid takes the time of the test's own formula for its exchanges in rows and its ring of rows."""
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
        (lambda: weigh_rings(Attention(), 16, 1, (1.0, 1.0, 0.0)), "P >= 2"),
        (lambda: weigh_rings(Attention(), 16, 2, (1.0, 0.0, 0.0)), "above zero"),
        (lambda: weigh_rings(Attention(), 16, 2, (1.0, 1.0, 0.0), links=0), "above zero"),
        (lambda: FullMesh(4, 0.0), "link_bytes_per_s"),
        (lambda: FullMesh(4, 1.0, links=0), "links >= 1"),
    ],
)
def test_what_makes_no_sense_is_refused(call, needed: str) -> None:
    with pytest.raises(CostError, match=needed):
        call()


class Whole:
    """A block time that charges every visible pair at 1e14 FLOP/s."""

    def seconds(self, tiles: tuple[Tile, ...], sizes: Attention, rows: int, backward: bool) -> float:
        pairs = sum(tile.scores for tile in tiles)
        return pairs * 4 * sizes.B * sizes.H * sizes.D * (2.5 if backward else 1) / 1e14


FULL = Attention(H=8, K=8, D=64, causal=False)


@pytest.mark.parametrize("links", [1, 2, 4])
@pytest.mark.parametrize("schedule", RINGS)
def test_exposed_seconds_are_those_of_a_simulation(schedule: str, links: int) -> None:
    """The exposed seconds are exactly the simulation's if a schedule sends in one direction at a time.

    For schedules that send in several directions and expose most of each hop, they are within 1/8.
    """
    for P, backward in ((4, False), (5, False), (5, True)):
        how: Any = {"block_time": Whole(), "network": FullMesh(P, 2e9, 0.0, links)}
        layout = contiguous(64 * P, P)
        found = simulate(
            FULL, layout, hardware("h100"), schedule=schedule, backward=backward, **how
        ).exposed_s
        expected = sum(
            ring_exposed_s(FULL, schedule, 64, P, (1e14, 2e9, 0.0), links=links, backward=back)
            for back in (False, True)[: 1 + backward]
        )
        several = schedule in ("bidirectional", "multi-ring")
        assert found == pytest.approx(expected, rel=1 / 8 if several else 1e-9), (P, backward)


def test_the_choice() -> None:
    """Grouped heads and the number of links decide which schedule is best.

    With one port, burst is best for ungrouped heads, and the ring for grouped heads. With two links,
    "bidirectional" is best, and with a full mesh "multi-ring". If every hop is hidden, the ring is chosen.
    """
    grouped, slow, rates = replace(FULL, K=1), (1e14, 2e9, 0.0), (1e14, 1e15, 0.0)
    assert weigh_rings(FULL, 64, 7, slow)[0].schedule == "burst"
    assert weigh_rings(grouped, 64, 7, slow)[0].schedule == "ring"
    assert weigh_rings(grouped, 64, 7, slow, links=2)[0].schedule == "bidirectional"
    assert weigh_rings(FULL, 64, 7, slow, links=6)[0].schedule == "multi-ring"
    hidden = weigh_rings(FULL, 4096, 7, rates, training=False)
    assert [it.reason for it in hidden][:4] == ["hidden"] * 4 and hidden[0].schedule == "ring"
    found = weigh_rings(FULL, 64, 7, slow)
    assert [it.exposed_s for it in found] == sorted(it.exposed_s for it in found)
    assert {it.schedule for it in found} == set(RINGS)


def test_a_latent_of_deepseek() -> None:
    """DeepSeek's latent is so small that computation hides a ring of it, but not a ring of K and V."""
    sizes = Attention(H=128, K=128, D=192, Dv=128)
    shown = {
        latent: weigh_rings(sizes, 256, 8, (4e14, 5e10, 0.0), training=False, latent=latent)[0].reason
        for latent in (0, 576)
    }
    assert shown == {0: "exposed", 576: "hidden"}


def test_a_latent_is_recommended_no_schedule_that_refuses_it() -> None:
    """Multi-ring is not offered for a latent, which has no heads, though it is best for K and V here."""
    sizes, rates = Attention(H=128, K=128, D=192, Dv=128), (4e14, 25e9, 0.0)
    plain, latent = (
        [it.schedule for it in weigh_rings(sizes, 1024, 8, rates, links=7, latent=numbers)]
        for numbers in (0, 576)
    )
    assert plain[0] == "multi-ring" and set(plain) - set(latent) == {"multi-ring"}
    with pytest.raises(BackendError, match="deals heads"):
        VirtualCluster(2, memory=False).run(refuse_a_latent)


def refuse_a_latent(ring: Ring) -> None:
    given = (torch.zeros(shape) for shape in ((1, 2, 2, 6), (1, 2, 3), (1, 2, 2), (2, 4, 3), (2, 4, 3)))
    latent_attention(*given, ring=ring, layout=contiguous(4, 2), schedule="multi-ring")


# The schedules of a plan's ring.

SPLIT = {"dp": 1, "tp": 2, "ring": 8, "ulysses": 1, "fsdp": 1, "recomputation": "full"}


def ring_table(K: int, purpose: str = "training", **changes: object) -> RingTable:
    given = {"hardware": ideal()} | SPLIT | changes
    asked = Request(small_model(H=32, K=K), 2**16, nodes=2, purpose=purpose, **given)  # type: ignore[arg-type]
    table = plan(asked).ring_table
    assert table is not None
    return table


def test_with_all_heads_burst_sends_least() -> None:
    """With as many K/V heads as query heads, burst sends less than the ring.

    A rank has 16 of 32 heads and 8,192 tokens. Blocks make 7 hops and gradients 8. Burst's q, dout, lse,
    delta and dq take fewer bytes than the ring's K, V, dK and dV.
    """
    table, tokens, head = ring_table(32), 8192 * 16, 128
    kv = 7 * 2 * head * 2
    ring = tokens * (2 * kv + 8 * 2 * head * 4)
    burst = tokens * (kv + 7 * (2 * head * 2 + 2 * 4) + 8 * head * 4)
    sent = {it.schedule: it.sent_bytes for it in table.options}
    assert sent["ring"] == ring and sent["burst"] == burst < ring
    assert table.least.schedule == "burst" and table.latent_below == 2 * 16 * head


def test_with_grouped_heads_the_ring_sends_least() -> None:
    """With 4 of 8 K/V heads on each rank, the ring sends the fewest bytes; a prompt has no gradients."""
    table = ring_table(8, "prefill", recomputation=None)
    assert table.least is table.ring and table.ring.sent_bytes == 7 * 8192 * 2 * 4 * 128 * 2
    assert table.latent_below == 2 * 4 * 128


def test_the_links_of_a_ring() -> None:
    """On a torus, a rank sends to both neighbours at once; between nodes, a hop takes the slower link."""
    slow = replace(ideal(between=1e9), name="slow")
    table = ring_table(8, "prefill", hardware=slow, recomputation=None)
    torus = replace(slow, name="tpu-made-up")
    both = ring_table(8, "prefill", hardware=torus, recomputation=None)
    assert (table.links, both.links, table.link) == (1, 2, "between")
    assert both.shortest.schedule != "ring" and (both.shortest.exposed_s or 0) < 0.7 * (
        table.shortest.exposed_s or 0
    )
    hop = 8192 * 2 * 4 * 128 * 2 / 1e9
    assert 0.8 * 7 * hop < (table.ring.exposed_s or 0) < 7 * hop


def test_nothing_is_said_without_a_ring_or_of_a_token() -> None:
    for changes in ({"ring": 1, "ulysses": 8}, {"purpose": "decode", "recomputation": None}):
        asked = Request(small_model(), 2**16, ideal(), 2, **(SPLIT | changes))  # type: ignore[arg-type]
        assert plan(asked).ring_table is None and plan(asked).as_dict()["travel"] is None
