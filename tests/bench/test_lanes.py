"""Lanes read from a profiler's trace have the right events, covered time and exposed time."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringlab import VirtualCluster, contiguous, ring_attention
from ringlab.bench.profile import ORDERS, profiled, ring_in_order
from ringlab.blocks import get_block
from ringlab.comm.processes.launch import launch
from ringlab.errors import CommError
from ringlab.viz import lanes
from ringlab.viz.lanes import MARK, Span, exposed, lane_of, of_trace, overlap, read, union, without

pytestmark = pytest.mark.thorough

TICKS = st.integers(0, 30)
INTERVALS = st.lists(st.tuples(TICKS, TICKS).map(lambda pair: (min(pair), max(pair))), max_size=8)


def ticks(intervals):
    """Return the set of all integer ticks that the intervals cover."""
    return {tick for start, end in intervals for tick in range(start, end)}


@given(INTERVALS, INTERVALS)
def test_unions_and_differences_cover_what_they_should_and_do_not_touch(one, other):
    for found, wanted in ((union(one), ticks(one)), (without(one, other), ticks(one) - ticks(other))):
        assert ticks(found) == wanted
        assert sum(end - start for start, end in found) == len(wanted)
        assert all(start < end for start, end in found)
    whole = union(one)
    assert all(before[1] < after[0] for before, after in pairwise(whole))


@given(INTERVALS, INTERVALS)
def test_exposed_is_copied_without_a_computation(computed, copied):
    spans = [Span(0, "compute", "a", *pair) for pair in computed] + [
        Span(0, "copy", "b", *pair) for pair in copied
    ]
    spans += [Span(1, "compute", "somebody else's", 0, 30)]
    found = overlap(spans, 0)
    hidden = ticks(computed) & ticks(copied)
    assert (found.compute_s, found.copy_s) == (len(ticks(computed)), len(ticks(copied)))
    assert found.exposed_s == len(ticks(copied) - ticks(computed))
    assert found.fraction == pytest.approx(len(hidden) / len(ticks(copied)) if ticks(copied) else 1.0)


def event(name, ts, dur, cat="cpu_op", ph="X"):
    return {"ph": ph, "cat": cat, "name": name, "ts": ts, "dur": dur}


def test_a_cpu_trace_has_operators_and_messages_from_the_mark_on():
    document = {
        "traceEvents": [
            event("aten::add", 50, 10),  # before the mark
            event(MARK, 100, 1, "user_annotation"),
            event("_RingAttention", 100, 500),
            event("aten::matmul", 200, 100),
            event("aten::mm", 210, 80),
            event("gloo:send", 250, 150, "user_annotation"),
            event("c10d::send", 240, 5),
            {"ph": "M", "name": "process_name"},
        ]
    }
    assert read(document, 3) == [
        Span(3, "compute", "aten::matmul", 100 / 1e6, 200 / 1e6),
        Span(3, "copy", "gloo:send", 150 / 1e6, 300 / 1e6),
    ]


def test_in_a_gpu_trace_what_the_cpu_did_is_no_lane():
    document = {
        "traceEvents": [
            event("aten::matmul", 0, 900),
            event("ampere_bf16_gemm", 1000, 300, "kernel"),
            event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 1100, 400, "kernel"),
            event("Memcpy PtoP (Device -> Device)", 1600, 100, "gpu_memcpy"),
            event("nccl:send", 0, 2000, "user_annotation"),
        ]
    }
    spans = read(document, 0)
    assert [(span.lane, round(span.start * 1e6)) for span in spans] == [
        ("compute", 0),
        ("copy", 100),
        ("copy", 600),
    ]
    assert overlap(spans, 0).exposed_s == pytest.approx(300e-6)


def test_a_clock_that_counts_from_years_ago_costs_no_digits():
    begin = 4_500_937_571_208.125  # microseconds; neighbouring floats are a nanosecond apart
    document = {
        "traceEvents": [event(MARK, begin, 1, "user_annotation"), event("gloo:send", begin + 8, 0.3004)]
    }
    assert read(document, 0) == [Span(0, "copy", "gloo:send", 8 / 1e6, 8.3004 / 1e6)]


@pytest.mark.parametrize("nonsense", [[], {}, {"traceEvents": None}, "x"])
def test_what_is_no_trace_is_refused_by_name(nonsense):
    with pytest.raises(CommError, match="traceEvents"):
        read(nonsense, 0)


def test_names_that_only_look_like_communication():
    assert lane_of("cpu_op", "c10d::recv_", gpu=False) is None
    assert lane_of("cpu_op", "aten::copy_", gpu=False) == "compute"
    assert lane_of("gpu_memcpy", "Memcpy HtoD", gpu=True) == "compute"


def test_lanes_of_a_traced_run_have_the_exposed_seconds_of_the_trace():
    layout = contiguous(32, 4)
    qkv = tuple(torch.randn(1, 1, 32, 4) for _ in range(3))

    def program(ring):
        return ring_attention(*layout.shard(qkv, ring.rank), ring=ring, layout=layout, validate=False)

    trace = VirtualCluster(4).run(program).trace
    spans = of_trace(trace)
    for rank in range(4):
        assert sum(end - start for start, end in exposed(spans, rank)) == pytest.approx(trace.exposed(rank))


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_both_orders_compute_attention(order):
    q, k, v = (torch.randn(1, 2, 12, 4, dtype=torch.float64) for _ in range(3))
    layout = contiguous(12, 3)

    def program(ring):
        return ring_in_order(ring, *layout.shard((q, k, v), ring.rank), order)

    got = layout.unshard(VirtualCluster(3).run(program).results, dim=2)
    whole = get_block("naive", q).forward(q, k, v, causal=False, scale=0.5).out
    assert (got - whole).abs().max() < 1e-14


def waits_between(ring):
    """Wait for a message while nothing is computed, then for a message that overlaps a computation."""
    x = torch.zeros(1 << 16)
    work = ring.post(x)
    work.wait()
    torch.sin(x)


def test_real_processes_are_profiled_from_a_common_beginning():
    results = launch(lambda ring: profiled(ring, lambda: waits_between(ring)), 2, memory=False).results
    for rank, spans in enumerate(results):
        assert {span.rank for span in spans} == {rank} and {span.lane for span in spans} == {
            "compute",
            "copy",
        }
        assert any(span.name.startswith("gloo:") for span in spans)
        assert "aten::sin" in {span.name for span in spans}
        assert 0 <= min(span.start for span in spans) <= lanes.duration(spans) < 60
