"""The formulas' bytes are the bytes that the real programs send, step by step and rank by rank.

The number of tokens per rank above which a hop is hidden agrees with published thresholds and with the
definition.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab import VirtualCluster
from ringlab.comm.strides import strides
from ringlab.comm.trace import Trace
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import (
    RINGS,
    Traffic,
    allgather_traffic,
    block_s,
    hop_s,
    hybrid_traffic,
    least_tokens_hidden,
    load,
    ring_traffic,
    routes_of,
    shared_heads,
    turning_point,
    ulysses_traffic,
)
from ringlab.errors import CostError, RinglabError
from ringlab.layout import Layout, contiguous, dealt, striped, zigzag
from tests.schedules.problems import Problem, program

MHA = Attention(B=2, H=4, K=4, D=8, dtype="float32")
GQA = Attention(B=1, H=6, K=3, D=16, dtype="bfloat16")
MQA64 = Attention(B=1, H=3, K=1, D=4, dtype="float64", Dv=6)
MLA = Attention(B=1, H=2, K=2, D=6, dtype="bfloat16", Dv=4)
SIZES = {"MHA fp32": MHA, "GQA bf16": GQA, "MQA fp64, Dv > D": MQA64, "MLA bf16, Dv < D": MLA}
LAYOUTS = [
    zigzag(16, 4),
    contiguous(13, 4),  # the last rank owns less
    striped(11, 3),
    dealt(9, 4, chunk=4),  # one rank owns nothing
    dealt(14, 3, chunk=2, folded=True),
    zigzag(22, 5),
    zigzag(8, 2),
    zigzag(8, 1),
]
SCHEDULES = (*RINGS, "allgather")


@cache
def run(sizes: Attention, layout: Layout, schedule: str) -> Trace:
    """Return the trace of a forward and its backward."""
    dims: dict[str, Any] = {"D": sizes.D, "Dv": sizes.value_dim, "B": sizes.B}
    problem = Problem(layout, sizes.H, sizes.K, dtype=getattr(torch, sizes.dtype), **dims)
    return VirtualCluster(layout.P, memory=False).run(program, problem, schedule, False).trace


def formula(sizes: Attention, layout: Layout, schedule: str, rank: int, backward: bool) -> Traffic:
    if schedule == "allgather":
        return allgather_traffic(sizes, layout, rank=rank, backward=backward)
    return ring_traffic(sizes, layout, schedule=schedule, rank=rank, backward=backward)


def check_sent(sizes: Attention, layout: Layout, schedule: str) -> None:
    """Check the bytes and messages of every rank, forward and backward together."""
    trace = run(sizes, layout, schedule)
    for rank in range(layout.P):
        parts = [formula(sizes, layout, schedule, rank, backward) for backward in (False, True)]
        sent = [e.bytes_sent for e in trace.exchanges(rank)]
        counted = sum(part.total_bytes for part in parts), sum(part.messages for part in parts)
        assert (sum(sent), len(sent)) == counted, (rank, schedule, layout)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bytes_and_messages_are_those_of_the_real_program(schedule: str, sizes: Attention) -> None:
    for layout in LAYOUTS:
        check_sent(sizes, layout, schedule)


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_each_step_of_the_ring_is_the_real_programs(layout: Layout) -> None:
    trace = run(GQA, layout, "ring")
    for rank in range(layout.P):
        forward = ring_traffic(GQA, layout, rank=rank)
        backward = ring_traffic(GQA, layout, rank=rank, backward=True)
        real = trace.exchanges(rank)
        hops = [e.bytes_sent for e in real if e.tag.startswith("kv")]
        assert tuple(hops[: layout.P - 1]) == forward.by_step_bytes
        again, gradients = hops[layout.P - 1 :], [e.bytes_sent for e in real if e.tag.startswith("dkv")]
        together = [a + b for a, b in zip([*again, 0], gradients, strict=True)] if gradients else []
        assert tuple(together) == backward.by_step_bytes


ranks = st.integers(1, 9)


@given(S=st.integers(1, 50), P=ranks, backward=st.booleans())
def test_the_hybrids_ends_are_ring_and_ulysses(S: int, P: int, backward: bool) -> None:
    sizes = Attention(H=2520, K=P, D=4)  # divisible by 1 to 9
    alone = ring_traffic(sizes, S * P, P, backward=backward)
    hybrid = hybrid_traffic(sizes, S * P, P, 1, backward=backward)
    assert (hybrid.total_bytes, hybrid.messages) == (alone.total_bytes, alone.messages)
    group = ulysses_traffic(sizes, S * P, P, backward=backward)
    assert hybrid_traffic(sizes, S * P, 1, P, backward=backward) == group


@settings(max_examples=30)
@given(P=st.sampled_from([1, 2, 4, 8]), length=st.integers(1, 4), K=st.sampled_from([1, 2, 8]))
def test_ulysses_bytes_are_those_of_the_elements_that_change_ranks(P: int, length: int, K: int) -> None:
    """Ulysses bytes equal a count, element by element, of the ranks that need what another rank holds."""
    sizes, S = Attention(B=1, H=8, K=K, D=2, dtype="bfloat16"), P * length
    sends = np.zeros(P, dtype=int)
    for token in range(S):
        owner = token // length
        for to in range(P):
            queries = range(to * 8 // P, (to + 1) * 8 // P)
            keys = {query * K // 8 for query in queries}
            if to != owner:
                sends[owner] += (len(queries) + 2 * len(keys)) * 2 * 2
                sends[to] += len(queries) * 2 * 2  # the output goes home
    assert set(sends) == {ulysses_traffic(sizes, S, P).total_bytes}


def test_published_figures() -> None:
    """For S=131072, P=8, D=128, 32 heads and bf16, K and V of a shard are 268 MB: 0.447 ms at 600 GB/s."""
    sizes = Attention(H=32, K=32, D=128)
    hop = ring_traffic(sizes, 131072, 8)
    assert hop.per_step_bytes == 16384 * 2 * 32 * 128 * 2
    assert round(hop.per_step_bytes / 600e9 * 1e3, 3) == 0.447  # ms
    assert hop.steps == 7
    # 1M tokens, d=4096, 8 ranks, fp16: K and V of all ranks together are 16.4 GB, and not 8 GB
    assert ring_traffic(sizes, 10**6, 8).per_step_bytes * 8 == 16_384_000_000


@pytest.mark.parametrize(
    ("sizes", "degree", "told"),
    [
        (Attention(H=6, K=6), 4, "H=6"),
        (Attention(H=12, K=4), 6, "K=4"),
    ],
)
def test_heads_that_cannot_be_shared_are_named(sizes: Attention, degree: int, told: str) -> None:
    with pytest.raises(CostError, match=told):
        shared_heads(sizes, degree)


@pytest.mark.parametrize("bad", [(0, 2), (8, 0), (True, 1), (2.5, 1)])
def test_what_makes_no_sense_is_refused(bad: tuple[int, int]) -> None:
    for formula in (ring_traffic, allgather_traffic, ulysses_traffic):
        with pytest.raises(CostError):
            formula(MHA, *bad)
    with pytest.raises(RinglabError):
        ring_traffic(MHA, zigzag(16, 4), 3)
    with pytest.raises(CostError, match="ring, burst"):
        ring_traffic(MHA, 16, 4, schedule="ulysses")
    with pytest.raises(CostError, match="kv or queries"):
        load(MHA, "out")


def totals(sizes: Attention, schedule: str, P: int, backward: bool) -> Traffic:
    return ring_traffic(sizes, 4 * P, P, schedule=schedule, backward=backward)


@given(
    st.integers(2, 9), st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 4]), st.booleans(),
    st.sampled_from(["bfloat16", "float32", "float64"]),
)  # fmt: skip
def test_both_ways_and_many_rings_are_the_rings_bytes(
    P: int, K: int, group: int, backward: bool, dtype: str
) -> None:
    sizes = Attention(1, K * group, K, 16, dtype)
    ring = ring_traffic(sizes, 4 * P, P, backward=backward)
    both, many = (totals(sizes, name, P, backward) for name in ("bidirectional", "multi-ring"))
    assert both.total_bytes == many.total_bytes == ring.total_bytes
    assert both.messages == ring.messages and both.steps == P // 2 + backward
    assert many.messages == min(K, len(strides(P))) * ring.messages
    assert sorted(sum((routes_of(sizes, "bidirectional", P)[n].offsets for n in (0, 1)), ())) == [
        0, *range(P)
    ]  # fmt: skip


@given(
    st.integers(2, 16), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([8, 64, 128]),
    st.sampled_from(["bfloat16", "float32", "float64"]),
)  # fmt: skip
def test_grouped_heads_turn_burst_around(P: int, K: int, group: int, D: int, dtype: str) -> None:
    """Burst's backward sends fewer bytes than the ring's only if every query head has its own K/V head."""
    sizes = Attention(1, K * group, K, D, dtype)
    ring, burst = (totals(sizes, name, P, True).total_bytes for name in ("ring", "burst"))
    assert (burst < ring) == (group < turning_point(sizes, P)) == (group == 1)
    assert totals(sizes, "burst", P, False) == totals(sizes, "ring", P, False)
    assert totals(sizes, "query-ring", P, False).total_bytes > totals(sizes, "ring", P, False).total_bytes


FULL = Attention(H=32, K=32, D=128, causal=False)
A100 = 312e12
THRESHOLDS = [(600e9, 520), (300e9, 1040), (12.5e9, 24960)]
"""bytes/s, tokens: A100 with NVLink counted both ways, one way, and InfiniBand."""

sizes = st.builds(
    lambda K, group, **rest: Attention(K=K, H=K * group, **rest),
    K=st.integers(1, 8),
    group=st.integers(1, 8),
    B=st.integers(1, 4),
    D=st.integers(1, 256),
    dtype=st.sampled_from(["float8", "bfloat16", "float32"]),
    causal=st.booleans(),
)
rates = st.floats(1e9, 1e16)
latencies = st.sampled_from([0.0, 1e-6, 1e-3])


@pytest.mark.parametrize(("bandwidth", "tokens"), THRESHOLDS)
def test_published_thresholds(bandwidth: float, tokens: float) -> None:
    assert least_tokens_hidden(A100, bandwidth, FULL) == pytest.approx(tokens, rel=1e-12)


@given(sizes=sizes, flops=rates, bandwidth=rates, latency=latencies, backward=st.booleans())
def test_at_the_threshold_a_hop_takes_as_long_as_a_block(
    sizes: Attention, flops: float, bandwidth: float, latency: float, backward: bool
) -> None:
    tokens = least_tokens_hidden(flops, bandwidth, sizes, latency_s=latency, backward=backward)
    compute = block_s(sizes, tokens, flops, backward=backward)
    assert compute == pytest.approx(hop_s(sizes, tokens, bandwidth, latency, backward=backward), rel=1e-9)
    for factor, hidden in ((1.01, True), (1 / 1.01, False)):
        block = block_s(sizes, tokens * factor, flops, backward=backward)
        assert hidden == (hop_s(sizes, tokens * factor, bandwidth, latency, backward=backward) <= block)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_that_are_no_rates_are_refused(bad: float) -> None:
    for call in (
        lambda: least_tokens_hidden(bad, 1e9, FULL),
        lambda: least_tokens_hidden(1e12, bad, FULL),
        lambda: block_s(FULL, bad, 1e12),
        lambda: hop_s(FULL, 10, bad),
    ):
        with pytest.raises(CostError):
            call()
