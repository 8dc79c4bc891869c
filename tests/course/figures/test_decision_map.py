"""The decision map's regions follow from the cost model, and its line is the threshold for hidden hops."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.cost.hardware import hardware
from ringlab.cost.sizes import Attention, element_bytes
from ringlab.cost.traffic import least_tokens_hidden
from ringlab_course.figures import decision_map
from ringlab_course.figures.decision_rules import (
    ALLGATHER,
    HIDDEN,
    HYBRID,
    NOTHING,
    RING,
    ULYSSES,
    Question,
    question,
)

pytestmark = pytest.mark.thorough

MHA, MQA = Attention(H=32, K=32, causal=False), Attention(H=8, K=1)
QUESTIONS = st.builds(
    Question,
    st.builds(
        Attention,
        H=st.just(32),
        K=st.sampled_from([1, 4, 32]),
        D=st.sampled_from([64, 128]),
        dtype=st.sampled_from(["bfloat16", "float32"]),
        causal=st.booleans(),
    ),
    st.sampled_from([2, 8, 64]),
    st.sampled_from([1e12, 1e15]),
    st.sampled_from([0.0, 1e-5]),
    st.just(80e9),
    st.booleans(),
)
POINTS = st.tuples(st.integers(32, 2**20), st.floats(1e8, 2e12))


def seconds(asked: Question, c: int, B: float) -> dict[int, float]:
    """Return the seconds that each schedule exposes, by formulas written for this test."""
    a, P, e = asked.sizes, asked.P, element_bytes(asked.sizes.dtype)
    block = 4 * a.H * a.D * c * c / asked.F / (2 if a.causal else 1)
    kv = 2 * a.K * a.D * e * c / B
    found = {
        RING: (P - 1) * max(0.0, asked.latency_s + kv - block),
        ALLGATHER: 2 * asked.latency_s + (P - 1) * kv,
    }
    if a.H % P == 0:
        q, k = a.H // P, max(1, a.K // P)
        found[ULYSSES] = (P - 1) * c * a.D * e * (2 * q + 2 * k) / B + 2 * asked.latency_s
    degrees = [U for U in range(2, P) if P % U == 0 and a.H % U == 0 and (a.K % U == 0 or U % a.K == 0)]
    if asked.hybrids and degrees:
        found[HYBRID] = min(hybrid_seconds(asked, c, B, U, block) for U in in_memory(asked, c, degrees))
    return found


def hybrid_seconds(asked: Question, c: int, B: float, U: int, block: float) -> float:
    """Return the seconds that the hybrid with rows of U ranks exposes.

    All-to-alls are exposed fully. A hop is exposed as far as it takes longer than U blocks of a ring.
    """
    a, e = asked.sizes, element_bytes(asked.sizes.dtype)
    head, k = c * a.D * e / B, max(1, a.K // U)
    trades = (U - 1) * head * (2 * a.H // U + 2 * k) + 2 * asked.latency_s
    return trades + (asked.P // U - 1) * max(0.0, asked.latency_s + 2 * k * U * head - U * block)


def in_memory(asked: Question, c: int, degrees: list[int]) -> list[int]:
    """Return the degrees for which a rank's arrays fit into memory, or all degrees if they fit for none."""
    a, e = asked.sizes, element_bytes(asked.sizes.dtype)
    head = c * a.D * e
    held = {U: head * (2 * a.H + 2 * a.K + 2 * a.H + 4 * U * max(1, a.K // U)) for U in degrees}
    return [U for U in degrees if held[U] <= asked.memory_bytes] or degrees


@given(QUESTIONS, POINTS)
def test_seconds_are_those_of_the_formulas(asked: Question, point) -> None:
    expected = seconds(asked, *point)
    assert set(asked.choices) == set(expected)
    for kind, value in expected.items():
        assert asked.exposed(kind, *point) == pytest.approx(value, rel=1e-9, abs=1e-12)


@given(QUESTIONS, POINTS)
def test_the_best_is_the_least_exposed_of_those_that_fit(asked: Question, point) -> None:
    best, expected = asked.best(*point), seconds(asked, *point)
    fitting = {
        kind: s for kind, s in expected.items() if asked.needs_bytes(kind, point[0]) <= asked.memory_bytes
    }
    if best == NOTHING:
        assert not fitting
    elif best == HIDDEN:
        assert expected[RING] < 1e-12 and RING in fitting
    else:
        assert expected[best] <= min(fitting.values()) * (1 + 1e-9) and best in fitting


@given(QUESTIONS, st.floats(1e8, 2e12))
def test_a_ring_hides_from_the_threshold_on(asked: Question, B: float) -> None:
    at = asked.threshold(B)
    above, below = int(at * 1.01) + 1, int(at * 0.99)
    if 32 < below and above < asked.most_tokens[RING]:
        assert asked.best(above, B) == HIDDEN != asked.best(below, B)


def test_memory_of_the_ring_is_least_and_the_whole_sequence_is_not_held() -> None:
    asked = question(P=8)
    room = {kind: asked.most_tokens[kind] for kind in asked.choices}
    assert room[RING] > room[ULYSSES] > room[ALLGATHER]
    for kind, most in room.items():
        assert asked.needs_bytes(kind, most) <= asked.memory_bytes < asked.needs_bytes(kind, most + 1)


def test_rows_win_where_a_ring_of_them_hides() -> None:
    """Rows have more work beside a hop than a plain ring. At 0.6 of the ring's threshold they hide it, and win."""
    grouped = Attention(H=64, K=8)
    asked = question(grouped, "h100", 16, hybrids=True)
    at = asked.threshold(50e9)
    assert asked.best(int(0.6 * at), 50e9) == HYBRID and asked.best(int(1.01 * at) + 1, 50e9) == HIDDEN
    without = question(grouped, "h100", 16)
    assert HYBRID not in without.choices and without.best(int(0.6 * at), 50e9) == RING
    assert HYBRID not in question(grouped, "h100", 2, hybrids=True).choices
    assert set(decision_map.WORDS) == set(decision_map.LOOKS)


def test_heads_that_cannot_be_shared_rule_Ulysses_out() -> None:
    asked = question(MHA, "a100", 64)
    assert ULYSSES not in asked.choices and "query heads" in asked.ulysses_refusal
    assert "cannot share these heads" in decision_map.figure(MHA, "a100", 64).axes[0].get_xlabel()
    assert ULYSSES in question(MHA, "a100", 32).choices


def test_few_kv_heads_favour_the_all_gather_in_short_shards() -> None:
    asked = question(MQA, "tpu-v4", 8)
    assert asked.best(64, 45e9) == ALLGATHER
    assert question(MHA, "a100", 8).best(64, 25e9) == ULYSSES


def test_the_line_is_the_threshold_and_the_diamonds_are_the_machines_links() -> None:
    sizes, h100 = Attention(), hardware("h100")
    (ax,) = decision_map.figure(sizes, "h100", 8).axes
    rate = h100.peak("bfloat16") * h100.reached.attention_forward
    line = ax.lines[0]
    for at, B in zip(line.get_xdata(), line.get_ydata(), strict=True):
        assert at == least_tokens_hidden(rate, B, sizes, latency_s=h100.inside.latency_s)
    own = diamonds(ax)
    assert len(own) == 2
    for link in (h100.inside, h100.between):
        hides = least_tokens_hidden(rate, link.bytes_per_s, sizes, latency_s=link.latency_s)
        assert own[f"H100, {link.name}"] == (hides, link.bytes_per_s)


def diamonds(ax) -> dict[str, tuple[float, float]]:
    return {line.get_gid(): tuple(line.get_xydata()[0]) for line in ax.lines if line.get_marker() == "D"}
