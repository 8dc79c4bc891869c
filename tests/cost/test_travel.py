"""What travels costs what its formulas say: bytes and messages of real runs, peaks and seconds of simulated ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringlab import VirtualCluster, latent_attention
from ringlab.comm.ring import Ring
from ringlab.comm.strides import strides
from ringlab.cost import travel
from ringlab.cost.choose import weigh_travel
from ringlab.cost.full_mesh import FullMesh
from ringlab.cost.hardware import hardware
from ringlab.cost.simulate import Network, Simulation, simulate
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import Traffic, ring_traffic
from ringlab.cost.travel import (
    TRAVELLERS,
    Load,
    Width,
    exposed_s,
    load,
    peak_bytes,
    travel_traffic,
    turning_point,
)
from ringlab.errors import BackendError, CostError
from ringlab.layout import Layout, contiguous, dealt, zigzag
from ringlab.tile import Tile
from tests.schedules.problems import Problem, program

MHA = Attention(B=2, H=4, K=4, D=8, dtype="float32")
GQA = Attention(H=6, K=3, D=16, dtype="bfloat16")
MQA64 = Attention(H=3, K=1, D=4, dtype="float64")
LAYOUTS = [zigzag(16, 4), contiguous(13, 4), dealt(9, 4, chunk=4), zigzag(22, 5), zigzag(8, 2), zigzag(8, 1)]


def sent_and_counted(sizes: Attention, layout: Layout, schedule: str) -> None:
    problem = Problem(layout, sizes.H, sizes.K, D=sizes.D, B=sizes.B, dtype=getattr(torch, sizes.dtype))
    trace = VirtualCluster(layout.P, memory=False).run(program, problem, schedule, False).trace
    for rank in range(layout.P):
        parts = [travel_traffic(sizes, schedule, layout, rank=rank, backward=back) for back in (False, True)]
        sent = [e.bytes_sent for e in trace.exchanges(rank)]
        counted = sum(part.total_bytes for part in parts), sum(part.messages for part in parts)
        assert (sum(sent), len(sent)) == counted, (rank, schedule)


@pytest.mark.parametrize("sizes", [MHA, GQA, MQA64], ids=["MHA fp32", "GQA bf16", "MQA fp64"])
@pytest.mark.parametrize("schedule", TRAVELLERS)
def test_bytes_and_messages_are_those_of_a_run(schedule: str, sizes: Attention) -> None:
    for layout in LAYOUTS:
        sent_and_counted(sizes, layout, schedule)


@pytest.mark.parametrize(
    ("mistake", "schedule"),
    [
        (lambda it: Load(it.around, 0), "query-ring"),
        (lambda it: replace(it, around=it.around - 8), "burst"),
        (lambda it: Load(it.around + it.following, 0), "bidirectional"),
    ],
)
def test_a_formula_that_forgets_something_is_noticed(
    mistake: Any, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = load
    monkeypatch.setattr(travel, "load", lambda *given, **how: mistake(right(*given, **how)))
    with pytest.raises(AssertionError):
        sent_and_counted(MHA, zigzag(16, 4), schedule)


def totals(sizes: Attention, schedule: str, P: int, backward: bool) -> Traffic:
    return travel_traffic(sizes, schedule, 4 * P, P, backward=backward)


@given(
    st.integers(2, 9), st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 4]), st.booleans(),
    st.sampled_from(["bfloat16", "float32", "float64"]),
)  # fmt: skip
def test_both_ways_and_many_rings_are_the_rings_bytes(
    P: int, K: int, group: int, backward: bool, dtype: str
) -> None:
    sizes = Attention(1, K * group, K, 16, dtype)
    ring = ring_traffic(sizes, 4 * P, P, backward=backward)
    assert totals(sizes, "ring", P, backward) == ring
    both, many = (totals(sizes, name, P, backward) for name in ("bidirectional", "multi-ring"))
    assert both.total_bytes == many.total_bytes == ring.total_bytes
    assert both.messages == ring.messages and both.steps == P // 2 + backward
    assert many.messages == min(K, len(strides(P))) * ring.messages
    assert sorted(sum((travel.routes_of("bidirectional", "kv", Load(1), P, K)[n].stops for n in (0, 1)), ())) == [
        0, *range(P)
    ]  # fmt: skip


@given(
    st.integers(2, 64), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([8, 64, 128]),
    st.sampled_from(["bfloat16", "float32", "float64"]),
)  # fmt: skip
def test_grouped_heads_turn_burst_around(P: int, K: int, group: int, D: int, dtype: str) -> None:
    """Burst's backward is fewer bytes where all heads have K and V of their own, and only there."""
    sizes = Attention(1, K * group, K, D, dtype)
    ring, burst = (totals(sizes, name, P, True).total_bytes for name in ("ring", "burst"))
    assert (burst < ring) == (group < turning_point(sizes, P)) == (group == 1)
    assert totals(sizes, "burst", P, False) == totals(sizes, "ring", P, False)
    assert totals(sizes, "query-ring", P, False).total_bytes > totals(sizes, "ring", P, False).total_bytes


def test_the_papers_ratio() -> None:
    """With dQ, dK and dV in the dtype of q, as the paper counts, and without lse and delta: 3 in place of 4."""
    sizes = Attention(H=32, K=32, D=128, dtype="float32")
    kv, queries = (load(sizes, what, backward=True) for what in ("kv", "queries"))
    numbers = 32 * 128 * 4
    assert kv == Load(2 * numbers, 2 * numbers) and queries == Load(2 * numbers + 2 * 32 * 4, numbers)


def run(sizes: Attention, P: int, schedule: str, backward: bool, tokens: int = 64, **how: Any) -> Simulation:
    return simulate(
        sizes, contiguous(tokens * P, P), hardware("h100"), schedule=schedule, backward=backward, **how
    )


@pytest.mark.parametrize("schedule", ["query-ring", "burst", "bidirectional"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_peaks_are_those_of_a_run(schedule: str, backward: bool) -> None:
    run(
        Attention(H=4, K=4, D=16), 5, schedule, True
    )  # torch's first such operators keep their arguments alive
    for P in (5, 6):
        for sizes in (
            Attention(H=4, K=4, D=16),
            Attention(H=8, K=2, D=16),
            Attention(H=8, K=2, D=16, dtype="float32"),
        ):
            peak = int(run(sizes, P, schedule, backward).peak_bytes.max())
            assert peak == peak_bytes(sizes, 64, schedule, backward=backward, odd=P % 2 == 1), (P, sizes)


class Whole:
    """The seconds of every visible pair, at 1e14 FLOP/s."""

    def seconds(self, tiles: tuple[Tile, ...], sizes: Attention, rows: int, backward: bool) -> float:
        pairs = sum(tile.scores for tile in tiles)
        return pairs * 4 * sizes.B * sizes.H * sizes.D * (2.5 if backward else 1) / 1e14


FULL = Attention(H=8, K=8, D=64, causal=False)


@pytest.mark.parametrize("links", [1, 2, 4])
@pytest.mark.parametrize("schedule", TRAVELLERS)
def test_exposed_seconds_are_those_of_a_simulation(schedule: str, links: int) -> None:
    """Exactly for one way at a time, and within an eighth for several, where most of a hop is exposed."""
    for P, backward in ((4, False), (5, False), (5, True)):
        how: Any = {"block_time": Whole(), "network": FullMesh(P, 2e9, 0.0, links)}
        found = run(FULL, P, schedule, backward, **how).exposed_s
        expected = sum(
            exposed_s(FULL, schedule, 64, P, (1e14, 2e9, 0.0), links=links, backward=back)
            for back in (False, True)[: 1 + backward]
        )
        several = schedule in ("bidirectional", "multi-ring")
        assert found == pytest.approx(expected, rel=1 / 8 if several else 1e-9), (P, backward)


def test_many_rings_pay_where_each_pair_of_ranks_has_a_link() -> None:
    """Seven ranks in a full mesh: six rings take a sixth of the time. Behind one port they take all of it."""
    sizes = replace(FULL, H=6, K=6)
    for network, ratio in (
        (FullMesh(7, 2e9), 6),
        (FullMesh(7, 2e9, links=2), 2),
        (Network.uniform(7, 2e9), 1),
    ):
        ring, many = (
            run(sizes, 7, name, False, block_time=Whole(), network=network).exposed_s
            for name in ("ring", "multi-ring")
        )
        assert ring / many == pytest.approx(ratio, rel=0.15), network


def test_both_directions_pay_where_each_has_a_link() -> None:
    for links, ratio in ((1, 1), (2, 2)):
        ring, both = (
            run(FULL, 7, name, False, block_time=Whole(), network=FullMesh(7, 2e9, links=links)).exposed_s
            for name in ("ring", "bidirectional")
        )
        assert ring / both == pytest.approx(ratio, rel=0.1), links


def test_the_choice() -> None:
    """One port: burst for all heads, the ring for grouped ones; two links: both ways; a full mesh: many rings; none: the ring."""
    grouped, slow, rates = replace(FULL, K=1), (1e14, 2e9, 0.0), (1e14, 1e15, 0.0)
    assert weigh_travel(FULL, 64, 7, slow)[0].schedule == "burst"
    assert weigh_travel(grouped, 64, 7, slow)[0].schedule == "ring"
    assert weigh_travel(grouped, 64, 7, slow, links=2)[0].schedule == "bidirectional"
    assert weigh_travel(FULL, 64, 7, slow, links=6)[0].schedule == "multi-ring"
    hidden = weigh_travel(FULL, 4096, 7, rates, training=False)
    assert [it.reason for it in hidden][:4] == ["hidden"] * 4 and hidden[0].schedule == "ring"
    found = weigh_travel(FULL, 64, 7, slow)
    assert [it.exposed_s for it in found] == sorted(it.exposed_s for it in found)
    assert {it.schedule for it in found} == set(TRAVELLERS)


def test_a_latent_of_deepseek() -> None:
    """Its latent is so small that a ring of it is hidden where K and V are not."""
    sizes = Attention(H=128, K=128, D=192)
    shown = {
        latent: weigh_travel(sizes, 256, 8, (4e14, 5e10, 0.0), training=False, width=Width(128, latent))[
            0
        ].reason
        for latent in (0, 576)
    }
    assert shown == {0: "exposed", 576: "hidden"}


def test_a_latent_is_recommended_no_schedule_that_refuses_it() -> None:
    """Seven links would make many rings the best way for K and V, but a latent has no heads to deal."""
    sizes, rates = Attention(H=128, K=128, D=192), (4e14, 25e9, 0.0)
    plain, latent = (
        [it.schedule for it in weigh_travel(sizes, 1024, 8, rates, links=7, width=Width(128, numbers))]
        for numbers in (0, 576)
    )
    assert plain[0] == "multi-ring" and set(plain) - set(latent) == {"multi-ring"}
    with pytest.raises(BackendError, match="deals heads"):
        VirtualCluster(2, memory=False).run(refuse_a_latent)


def refuse_a_latent(ring: Ring) -> None:
    given = (torch.zeros(shape) for shape in ((1, 2, 2, 6), (1, 2, 3), (1, 2, 2), (2, 4, 3), (2, 4, 3)))
    latent_attention(*given, ring=ring, layout=contiguous(4, 2), schedule="multi-ring")


@pytest.mark.parametrize(
    ("call", "needed"),
    [
        (lambda: travel_traffic(FULL, "ulysses", 16, 4), "ring, burst"),
        (lambda: load(FULL, "out"), "kv or queries"),
        (lambda: peak_bytes(FULL, 16, "ring"), "query-ring, burst or bidirectional"),
        (lambda: weigh_travel(FULL, 16, 1, (1.0, 1.0, 0.0)), "P >= 2"),
        (lambda: weigh_travel(FULL, 16, 2, (1.0, 0.0, 0.0)), "above zero"),
        (lambda: weigh_travel(FULL, 16, 2, (1.0, 1.0, 0.0), links=0), "above zero"),
        (lambda: FullMesh(4, 0.0), "link_bytes_per_s"),
        (lambda: FullMesh(4, 1.0, links=0), "links >= 1"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Any, needed: str) -> None:
    with pytest.raises(CostError, match=needed):
        call()
