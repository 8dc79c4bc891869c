"""The simulated makespan equals what can be worked out by hand, to 1e-9, whatever the sizes and speeds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.cost.block_time import PeakTime
from ringlab.cost.hardware import hardware
from ringlab.cost.network import Network
from ringlab.cost.simulate import Simulation, simulate
from ringlab.cost.sizes import Attention
from ringlab.errors import CostError
from ringlab.layout import Layout, contiguous, striped, zigzag
from tests.cost import closed_form

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
CAUSAL = {
    "contiguous": (contiguous, closed_form.contiguous_s),
    "striped": (striped, closed_form.striped_s),
    "zigzag": (zigzag, closed_form.zigzag_s),
}


def run(sizes: Attention, layout: Layout, flops: float, network: Network, **how: object) -> Simulation:
    time = PeakTime(flops, flops, tile=None)
    return simulate(sizes, layout, hardware("h100"), block_time=time, network=network, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CAUSAL)
@settings(max_examples=60, deadline=None)
@given(P=RANKS, n=st.integers(1, 300), sizes=SIZES, flops=FLOPS, speed=BYTES, latency=LATENCY)
def test_causal_layouts(
    name: str, P: int, n: int, sizes: Attention, flops: float, speed: float, latency: float
) -> None:
    layout, formula = CAUSAL[name]
    L = 2 * n
    done = run(sizes, layout(P * L, P), flops, Network.uniform(P, speed, latency))
    hop = closed_form.hop_s(sizes, L, speed, latency)
    score_s = 4 * sizes.D * sizes.B * sizes.H / flops
    assert done.makespan_s == pytest.approx(formula(P, L, score_s, hop), rel=1e-9)
    # On links that cost nothing, what is left is computing.
    assert done.exposed_s == pytest.approx(
        formula(P, L, score_s, hop) - formula(P, L, score_s, 0.0), rel=1e-9, abs=1e-9 * done.makespan_s
    )


@settings(max_examples=60, deadline=None)
@given(P=RANKS, L=st.integers(1, 300), sizes=SIZES, flops=FLOPS, speed=BYTES, latency=LATENCY)
def test_a_uniform_ring_bound_by_computing_or_by_its_links(
    P: int, L: int, sizes: Attention, flops: float, speed: float, latency: float
) -> None:
    sizes = Attention(sizes.B, sizes.H, sizes.K, sizes.D, sizes.dtype, causal=False)
    done = run(sizes, contiguous(P * L, P), flops, Network.uniform(P, speed, latency))
    hop = closed_form.hop_s(sizes, L, speed, latency)
    score_s = 4 * sizes.D * sizes.B * sizes.H / flops
    assert done.makespan_s == pytest.approx(closed_form.uniform_s(P, L, score_s, hop), rel=1e-9)
    block = L * L * score_s
    bound = P * block if block >= hop else (P - 1) * hop + block
    assert done.makespan_s == pytest.approx(bound, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(P=RANKS, L=st.integers(1, 100), speed=st.floats(1e6, 1e12), latency=LATENCY, slack=st.floats(1, 9))
def test_the_backward_hides_all_hops_but_the_last(
    P: int, L: int, speed: float, latency: float, slack: float
) -> None:
    sizes = Attention(H=2, K=1, D=8, causal=False)
    kv = closed_form.hop_s(sizes, L, speed, latency)
    dkv = 2 * L * sizes.K * sizes.D * 4 * sizes.B / speed + latency
    flops = 4 * L * L * sizes.D * sizes.H / (slack * (kv + dkv))
    both = run(sizes, contiguous(P * L, P), flops, Network.uniform(P, speed, latency), backward=True)
    forward = run(sizes, contiguous(P * L, P), flops, Network.uniform(P, speed, latency))
    block = 2.5 * slack * (kv + dkv)
    expected = closed_form.backward_uniform_s(P, block, kv, dkv)
    assert both.makespan_s - forward.makespan_s == pytest.approx(expected, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(P=RANKS, L=st.integers(1, 100), speed=BYTES, latency=LATENCY, flops=FLOPS)
def test_the_all_gather_hides_nothing(P: int, L: int, speed: float, latency: float, flops: float) -> None:
    sizes = Attention(H=4, K=2, D=8, causal=False)
    done = run(sizes, contiguous(P * L, P), flops, Network.uniform(P, speed, latency), schedule="allgather")
    block = 4 * L * L * sizes.D * sizes.H / flops
    transfer = L * sizes.block_bytes_per_token / 2 / speed
    assert done.makespan_s == pytest.approx(closed_form.allgather_s(P, block, transfer, latency), rel=1e-9)


def test_what_has_no_closed_form_is_refused() -> None:
    with pytest.raises(CostError, match="L even"):
        closed_form.zigzag_s(4, 3, 1.0, 1.0)
    with pytest.raises(CostError, match="both hops"):
        closed_form.backward_uniform_s(4, 1.0, 1.0, 1.0)
    with pytest.raises(CostError, match="P >= 1"):
        closed_form.uniform_s(0, 3, 1.0, 1.0)
