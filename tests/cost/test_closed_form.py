"""The simulated makespan equals a closed form, derived by hand, to 1e-9 for all sizes and speeds.

The form assumes that all shards have L tokens and all links are alike. Let T(r, s) be the time at which rank
r begins step s, c(r, s) its computation in that step and h the time of a hop, bytes over bandwidth plus
latency. The rank posts the exchange of step s at T(r, s). A message starts when both its ends are posted, and
the rank waits for its own sending and receiving:

    T(r, s+1) = max( T(r, s) + c(r, s),  max(T(r−1, s), T(r, s), T(r+1, s)) + h ),   T(r, 0) = 0

The ring is done at max over r of T(r, P−1) + c(r, P−1). If a rank r* computes at least as long as every other
rank in each step, no rank is ever later than r*: by induction T(r, s) ≤ T(r*, s), and so T(r*, s+1) = T(r*,
s) + max(c(r*, s), h). With first = c(r*, s) at the rank's own block and later = c(r*, s) at every other
block,

    makespan = max(first, h) + (P − 2)·max(later, h) + later        for P ≥ 2, and first for P = 1.

In units of score elements, for one rank and kernels that compute visible pairs only, WORK has first and later:

    no mask      first = later = L²
    contiguous   rank P−1 meets all keys of all others: first L(L+1)/2, later L²
    striped      row i of rank P−1 sees keys 0 … i of every block: first = later = L(L+1)/2
    zig-zag      two pieces of n = L/2: the own block n² + 2·n(n+1)/2; any other one 2n²,
                 all rows with its first piece or the second piece's rows with all of it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.cost.block_time import PeakTime
from ringlab.cost.hardware import hardware
from ringlab.cost.simulate import Network, Simulation, simulate
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import hop_s
from ringlab.layout import Layout, contiguous, striped, zigzag

pytestmark = pytest.mark.thorough

WORK: dict[str, tuple[Callable[[int, int], Layout], Callable[[int], tuple[float, float]]]] = {
    "no mask": (contiguous, lambda L: (L * L, L * L)),
    "contiguous": (contiguous, lambda L: (L * (L + 1) / 2, L * L)),
    "striped": (striped, lambda L: (L * (L + 1) / 2, L * (L + 1) / 2)),
    "zigzag": (zigzag, lambda L: (L * L / 2 + L / 2, L * L / 2)),
}


def ring_s(P: int, first_s: float, later_s: float, hop_s: float) -> float:
    """Return the makespan if one rank computes longest in each step: its own block, then P-1 others."""
    return first_s if P == 1 else max(first_s, hop_s) + (P - 2) * max(later_s, hop_s) + later_s


def backward_uniform_s(P: int, block_s: float, dkv_hop_s: float) -> float:
    """Return the makespan of the backward without a mask, if computing hides both hops of a step.

    The gradients of each block make P hops, and no computation is left to hide the last hop.
    """
    return P * block_s + (dkv_hop_s if P > 1 else 0.0)


def allgather_s(P: int, block_s: float, transfer_s: float, latency_s: float = 0.0) -> float:
    """Return the makespan of the all-gather forward without a mask, which no computation hides.

    First K arrives from all other ranks, in P-1 messages of `transfer_s` through one port, then V in the same
    way. Then P blocks are computed.
    """
    gather = (P - 1) * transfer_s + latency_s if P > 1 else 0.0
    return 2 * gather + P * block_s


FLOPS = st.floats(1e6, 1e15)
BYTES = st.floats(1e3, 1e13)
LATENCY = st.sampled_from([0.0, 1e-6, 1e-3, 1.0])
RANKS = st.integers(1, 9)
SIZES = st.builds(
    lambda B, K, group, D, dtype: Attention(B=B, H=K * group, K=K, D=D, dtype=dtype),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([1, 8, 128]),
    st.sampled_from(["bfloat16", "float32"]),
)


def run(sizes: Attention, layout: Layout, flops: float, network: Network, **how: object) -> Simulation:
    time = PeakTime(flops, flops, tile=None)
    return simulate(sizes, layout, hardware("h100"), block_time=time, network=network, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WORK)
@settings(max_examples=60, deadline=None)
@given(P=RANKS, n=st.integers(1, 300), sizes=SIZES, flops=FLOPS, speed=BYTES, latency=LATENCY)
def test_a_ring_forward(
    name: str, P: int, n: int, sizes: Attention, flops: float, speed: float, latency: float
) -> None:
    (layout, work), L = WORK[name], 2 * n
    sizes = replace(sizes, causal=name != "no mask")
    done = run(sizes, layout(P * L, P), flops, Network.uniform(P, speed, latency))
    hop = hop_s(sizes, L, speed, latency)
    first, later = (4 * sizes.D * sizes.B * sizes.H / flops * scores for scores in work(L))
    assert done.makespan_s == pytest.approx(ring_s(P, first, later, hop), rel=1e-9)
    # If messages take no time, only the computation remains.
    exposed = ring_s(P, first, later, hop) - ring_s(P, first, later, 0.0)
    assert done.exposed_s == pytest.approx(exposed, rel=1e-9, abs=1e-9 * done.makespan_s)


@settings(max_examples=30, deadline=None)
@given(P=RANKS, L=st.integers(1, 100), speed=st.floats(1e6, 1e12), latency=LATENCY, slack=st.floats(1, 9))
def test_the_backward_hides_all_hops_but_the_last(
    P: int, L: int, speed: float, latency: float, slack: float
) -> None:
    sizes = Attention(H=2, K=1, D=8, causal=False)
    kv = hop_s(sizes, L, speed, latency)
    dkv = 2 * L * sizes.K * sizes.D * 4 * sizes.B / speed + latency
    flops = 4 * L * L * sizes.D * sizes.H / (slack * (kv + dkv))
    both = run(sizes, contiguous(P * L, P), flops, Network.uniform(P, speed, latency), backward=True)
    forward = run(sizes, contiguous(P * L, P), flops, Network.uniform(P, speed, latency))
    block = 2.5 * slack * (kv + dkv)
    expected = backward_uniform_s(P, block, dkv)
    assert both.makespan_s - forward.makespan_s == pytest.approx(expected, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(P=RANKS, L=st.integers(1, 100), speed=BYTES, latency=LATENCY, flops=FLOPS)
def test_the_all_gather_hides_nothing(P: int, L: int, speed: float, latency: float, flops: float) -> None:
    sizes = Attention(H=4, K=2, D=8, causal=False)
    done = run(sizes, contiguous(P * L, P), flops, Network.uniform(P, speed, latency), schedule="allgather")
    block = 4 * L * L * sizes.D * sizes.H / flops
    transfer = L * sizes.block_bytes_per_token / 2 / speed
    assert done.makespan_s == pytest.approx(allgather_s(P, block, transfer, latency), rel=1e-9)
