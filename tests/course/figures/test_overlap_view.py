"""The overlap picture shows a simulation's timeline, and its threshold is that of the cost model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab.cost.hardware import hardware
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import block_s, hop_s, least_tokens_hidden
from ringlab.viz.gantt_chart import time_unit
from ringlab_course.figures import overlap_view
from ringlab_course.figures.overlap_view import MHA, overlap, presets
from ringlab_course.figures.papers import MACHINES

pytestmark = pytest.mark.thorough

A100 = 312e12, 300e9
RATES = st.tuples(st.sampled_from([64, 1024, 20_000]), st.floats(1e12, 1e15), st.floats(1e9, 1e12))
SIZES = st.sampled_from(
    [MHA, replace(MHA, K=4), replace(MHA, causal=True), replace(MHA, dtype="float32", H=64)]
)


def bars(ax, kind: str) -> list[tuple[float, float]]:
    """Return the (start, end) times of all bars of a kind."""
    found = [bar for bar in ax.patches if bar.get_gid() == kind]
    return [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in found]


@given(RATES, st.integers(2, 6), SIZES)
def test_a_simulated_ring_is_blocks_and_the_hops_that_stand_out(rates, P, sizes) -> None:
    """The makespan is P blocks and P − 1 exposed parts. If causal, it is up to 2 % off: the first block is longer."""
    c, F, B = rates
    seen = overlap(c, F, B, P, sizes)
    block, hop = block_s(sizes, c, F), hop_s(sizes, c, B)
    expected = max(0.0, hop - block) * (P - 1) + P * block
    assert seen.makespan_s == pytest.approx(expected, rel=0.02 if sizes.causal else 1e-9)
    assert seen.threshold == least_tokens_hidden(F, B, sizes) and seen.hidden == (hop <= block * (1 + 1e-12))


@pytest.mark.parametrize("c", [256, 4096])
@pytest.mark.parametrize("sizes", [MHA, replace(MHA, K=8, causal=True)])
def test_the_bars_are_the_trace_of_rank_0(c: int, sizes: Attention) -> None:
    seen = overlap(c, *A100, 4, sizes)
    ax = overlap_view.figure(c, *A100, 4, sizes).axes[0]
    scale, unit = time_unit(seen.makespan_s)
    assert ax.get_xlabel() == f"time ({unit})"
    for kind, events in (
        ("block", [(e.start, e.end) for e in seen.trace.computes(0)]),
        ("exposed", [(e.waited, e.done) for e in seen.trace.exchanges(0) if e.exposed]),
        ("hop", [(e.posted, e.posted + seen.hop_s) for e in seen.trace.exchanges(0)]),
    ):
        flat = [x for span in bars(ax, kind) for x in span]
        assert flat == pytest.approx([x / scale for span in events for x in span]), kind


@pytest.mark.parametrize("sizes", [MHA, replace(MHA, K=8)])
def test_a_hop_that_stands_out_ends_when_the_trace_says(sizes: Attention) -> None:
    seen = overlap(64, *A100, 4, sizes)
    for event in seen.trace.exchanges(0):
        assert event.posted + seen.hop_s == pytest.approx(event.done)


def test_published_thresholds() -> None:
    """An A100 in bf16 needs 1,040 tokens at 300 GB/s and 24,960 at 12.5 GB/s; GQA and causal masks shift them."""
    assert overlap(64, *A100).threshold == pytest.approx(1040)
    assert overlap(64, 312e12, 12.5e9).threshold == pytest.approx(24_960)
    assert overlap(64, *A100, 4, replace(MHA, K=8)).threshold == pytest.approx(260)
    assert overlap(64, *A100, 4, replace(MHA, causal=True)).threshold == pytest.approx(2080)


def test_presets_are_the_hardware_table() -> None:
    known = presets()
    a100 = hardware("a100")
    assert known["A100, NVLink 3"] == (a100.peak("bfloat16"), a100.inside.bytes_per_s)
    assert known["A100, InfiniBand HDR"] == (a100.peak("bfloat16"), a100.between.bytes_per_s)
    assert len(known) == 2 * len(MACHINES) and any(name.startswith("TPU") for name in known)


def test_the_tokens_on_offer_can_all_be_drawn() -> None:
    for c in overlap_view.TOKENS:
        assert overlap(c, *A100, 8, replace(MHA, causal=True)).c == c
    assert 1024 in overlap_view.TOKENS and 2**20 in overlap_view.TOKENS
