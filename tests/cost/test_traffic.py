"""The formulas' bytes are those that the real programs send, step by step, rank by rank."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringlab import VirtualCluster, ring_attention
from ringlab.comm.ring import Ring
from ringlab.comm.trace import Trace
from ringlab.cost import traffic
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import (
    Traffic,
    allgather_traffic,
    hybrid_traffic,
    ring_traffic,
    shared_heads,
    ulysses_traffic,
)
from ringlab.errors import CostError, RinglabError
from ringlab.layout import Layout, contiguous, dealt, striped, zigzag

MHA = Attention(B=2, H=4, K=4, D=8, dtype="float32")
GQA = Attention(B=1, H=4, K=2, D=16, dtype="bfloat16")
MQA64 = Attention(B=1, H=3, K=1, D=4, dtype="float64", Dv=6)
MLA = Attention(B=1, H=2, K=2, D=6, dtype="bfloat16", Dv=4)
LAYOUTS = [
    zigzag(16, 4),
    contiguous(13, 4),  # the last rank owns less
    striped(11, 3),
    dealt(9, 4, chunk=4),  # one rank owns nothing
    dealt(14, 3, chunk=2, folded=True),
    zigzag(8, 1),
]


def run(sizes: Attention, layout: Layout, schedule: str, backward: bool) -> Trace:
    def program(ring: Ring) -> None:
        def shard(heads: int, dim: int) -> Tensor:
            whole = torch.ones(sizes.B, heads, layout.S, dim, dtype=getattr(torch, sizes.dtype))
            part: Tensor = layout.shard(whole, ring.rank)
            return part.requires_grad_(backward)

        H, K, D = sizes.H, sizes.K, sizes.D
        q, k, v = shard(H, D), shard(K, D), shard(K, sizes.value_dim)
        out = ring_attention(q, k, v, ring=ring, layout=layout, schedule=schedule, block="naive")
        if backward:
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    return VirtualCluster(layout.P).run(program).trace


def sent(trace: Trace, rank: int) -> list[int]:
    return [exchange.bytes_sent for exchange in trace.exchanges(rank)]


FORMULAS: dict[str, Callable[..., Traffic]] = {"ring": ring_traffic, "allgather": allgather_traffic}


@pytest.mark.parametrize("schedule", FORMULAS)
@pytest.mark.parametrize(
    "sizes", [MHA, GQA, MQA64, MLA], ids=["MHA fp32", "GQA bf16", "MQA fp64, Dv > D", "MLA bf16, Dv < D"]
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_bytes_and_messages_are_those_of_the_real_program(
    schedule: str, sizes: Attention, layout: Layout
) -> None:
    forward = run(sizes, layout, schedule, backward=False)
    both = run(sizes, layout, schedule, backward=True)
    for rank in range(layout.P):
        there, back = (FORMULAS[schedule](sizes, layout, rank=rank, backward=b) for b in (False, True))
        assert sum(sent(forward, rank)) == there.total_bytes
        assert sum(sent(both, rank)) == there.total_bytes + back.total_bytes
        assert len(sent(forward, rank)) == there.messages
        assert len(sent(both, rank)) == there.messages + back.messages


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_each_step_of_the_ring_is_the_real_programs(layout: Layout) -> None:
    trace = run(GQA, layout, "ring", backward=True)
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


@given(S=st.integers(1, 200), P=ranks, chunk=st.integers(1, 9), folded=st.booleans())
def test_all_ranks_together_move_every_block_to_every_other_rank(
    S: int, P: int, chunk: int, folded: bool
) -> None:
    layout = dealt(S, P, chunk=chunk, folded=folded)
    for formula in FORMULAS.values():
        total = sum(formula(GQA, layout, rank=rank).total_bytes for rank in range(P))
        assert total == (P - 1) * S * GQA.block_bytes_per_token
    assert ring_traffic(GQA, layout).total_bytes == max(
        ring_traffic(GQA, layout, rank=rank).total_bytes for rank in range(P)
    )


@given(S=st.integers(1, 50), P=ranks, backward=st.booleans())
def test_the_hybrids_ends_are_ring_and_ulysses(S: int, P: int, backward: bool) -> None:
    sizes = Attention(H=2520, K=P, D=4)  # 2520 is divisible by 1..9
    alone = ring_traffic(sizes, S * P, P, backward=backward)
    hybrid = hybrid_traffic(sizes, S * P, P, 1, backward=backward)
    assert (hybrid.total_bytes, hybrid.messages) == (alone.total_bytes, alone.messages)
    group = ulysses_traffic(sizes, S * P, P, backward=backward)
    assert hybrid_traffic(sizes, S * P, 1, P, backward=backward) == group


@settings(max_examples=30)
@given(P=st.sampled_from([1, 2, 4, 8]), length=st.integers(1, 4), K=st.sampled_from([1, 2, 8]))
def test_ulysses_bytes_are_those_of_the_elements_that_change_ranks(P: int, length: int, K: int) -> None:
    """Counted element by element: who holds it before, who needs it after."""
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
    """S=131072, P=8, D=128, 32 heads, bf16: K and V of a shard are 268 MB, 0.447 ms at 600 GB/s."""
    sizes = Attention(H=32, K=32, D=128)
    hop = ring_traffic(sizes, 131072, 8)
    assert hop.per_step_bytes == 16384 * 2 * 32 * 128 * 2
    assert round(hop.per_step_bytes / 600e9 * 1e3, 3) == 0.447  # ms
    assert hop.steps == 7
    # 1M tokens, d=4096, 8 ranks, fp16: K and V are 16.4 GB over all, not 8
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
def test_sizes_below_one_are_refused(bad: tuple[int, int]) -> None:
    for formula in (ring_traffic, allgather_traffic, ulysses_traffic):
        with pytest.raises(CostError):
            formula(MHA, *bad)
    with pytest.raises(RinglabError):
        ring_traffic(MHA, zigzag(16, 4), 3)


def _k_only(sizes: Attention, layout: Layout, rank: int, backward: bool) -> int:
    return ring_traffic(sizes, layout, rank=rank, backward=backward).total_bytes // 2


def _query_heads(sizes: Attention, layout: Layout, rank: int, backward: bool) -> int:
    wide = Attention(sizes.B, sizes.H, sizes.H, sizes.D, sizes.dtype)
    return ring_traffic(wide, layout, rank=rank, backward=backward).total_bytes


def _p_hops(sizes: Attention, layout: Layout, rank: int, backward: bool) -> int:
    last = sizes.block_bytes_per_token * layout.length((rank + 1) % layout.P)
    return ring_traffic(sizes, layout, rank=rank, backward=backward).total_bytes + last


def _gradients_as_inputs(sizes: Attention, layout: Layout, rank: int, backward: bool) -> int:
    right = ring_traffic(sizes, layout, rank=rank, backward=backward).total_bytes
    wrong = sizes.block_bytes_per_token - traffic.gradient_bytes_per_token(sizes)
    return right + (wrong * layout.S if backward else 0)


def _gradients_one_hop_less(sizes: Attention, layout: Layout, rank: int, backward: bool) -> int:
    right = ring_traffic(sizes, layout, rank=rank, backward=backward).total_bytes
    home = traffic.gradient_bytes_per_token(sizes) * layout.length((rank + 1) % layout.P)
    return right - (home if backward else 0)


@pytest.mark.parametrize(
    "mutant", [_k_only, _query_heads, _p_hops, _gradients_as_inputs, _gradients_one_hop_less]
)
def test_the_trace_catches(mutant: Callable[[Attention, Layout, int, bool], int]) -> None:
    layout = contiguous(13, 4)
    there, both = run(GQA, layout, "ring", backward=False), run(GQA, layout, "ring", backward=True)
    caught = [
        sum(sent(there, rank)) != mutant(GQA, layout, rank, False)
        or sum(sent(both, rank)) != mutant(GQA, layout, rank, False) + mutant(GQA, layout, rank, True)
        for rank in range(4)
    ]
    assert all(caught)
