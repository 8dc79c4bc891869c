"""The bars of the Gantt chart are the events of the trace, for every source of a trace."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import PolyCollection

from ringlab import VirtualCluster, contiguous, ring_attention, zigzag
from ringlab.comm.trace import Compute, Exchange, Trace
from ringlab.comm.virtual.cluster import Costs
from ringlab.errors import CommError
from ringlab.plan import work
from ringlab.viz import gantt
from ringlab.viz.gantt_chart import chart, time_unit
from tests.viz.test_style import illegible

pytestmark = pytest.mark.thorough


class ByWork(Costs):
    """Costs in which a computation takes a µs for each score element, and a message takes `message_s`."""

    def __init__(self, layout, message_s: float = 0.0) -> None:
        self.layout, self.message_s = layout, message_s

    def compute(self, rank, label, args):
        step = int(label.split()[-1])
        return 1e-6 * work(self.layout, rank, (rank - step) % self.layout.P)

    def message(self, source, to, nbytes):
        return self.message_s


def run(layout, message_s: float = 0.0) -> Trace:
    qkv = tuple(torch.ones(1, 1, layout.S, 2) for _ in range(3))

    def program(ring):
        return ring_attention(*layout.shard(qkv, ring.rank), ring=ring, layout=layout, causal=True)

    return VirtualCluster(layout.P, costs=ByWork(layout, message_s)).run(program).trace


def exchange(rank, posted, waited, done, tag="kv 0", index=0, stall=None) -> Exchange:
    return Exchange(rank, index, tag, 0, 0, 8, 8, ((1,),), posted, waited, done, stall)


def drawn(figure, kind: str, rank: int, panel: int = 0) -> list[tuple[float, float]]:
    """Return (start, end) on the axis of all bars of a kind and rank."""
    found = [c for c in figure.axes[panel].collections if c.get_gid() == f"{kind} {rank}"]
    assert all(isinstance(c, PolyCollection) for c in found)
    boxes = [path.get_extents() for c in found for path in c.get_paths()]
    return sorted((round(box.x0, 9), round(box.x1, 9)) for box in boxes)


@pytest.mark.parametrize("make", [contiguous, zigzag])
def test_every_event_is_a_bar_with_its_times(make) -> None:
    trace = run(make(24, 3), message_s=5e-6)
    scale, unit = time_unit(chart(trace).makespan)
    figure = gantt.figure(trace)
    assert figure.axes[0].get_xlabel() == f"time ({unit})"
    for rank in range(3):
        computes = [(e.start, e.end) for e in trace.computes(rank) if e.end > e.start]
        waits = [(e.waited, e.done) for e in trace.exchanges(rank) if e.exposed > 0]
        transits = [span for e in trace.exchanges(rank) for span in e.transit]
        edges = [(e.posted, *itertools.chain(*e.transit), e.done) for e in trace.exchanges(rank)]
        still = [
            span for each in edges for span in zip(each[::2], each[1::2], strict=True) if span[1] > span[0]
        ]
        assert still, "some message waits for its partner, or waits to be taken"
        for kind, events in (("forward", computes), ("wait", waits), ("transit", transits), ("still", still)):
            expected = sorted((round(a / scale, 9), round(b / scale, 9)) for a, b in events)
            assert drawn(figure, kind, rank) == expected, (kind, rank)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=8))
def test_nested_computations_count_once(spans) -> None:
    spans = [(min(span), max(span)) for span in spans]
    trace = Trace(1, [Compute(0, "attend 0", *span) for span in spans])
    one, begin = chart(trace), min(start for start, _ in spans)
    grid = sorted({0.0, *(x - begin for span in spans for x in span)})
    cells = itertools.pairwise(grid)
    covered = sum(b - a for a, b in cells if any(s - begin <= a and b <= e - begin for s, e in spans))
    assert one.busy(0) == pytest.approx(covered, abs=1e-9)


def test_real_clocks_start_at_the_first_event_and_stalls_of_a_GPU_are_waiting() -> None:
    trace = Trace(1, [Compute(0, "attend 0", 100.0, 101.0), exchange(0, 100.0, 101.0, 101.0, stall=0.5)])
    one = chart(trace)
    assert one.makespan == 1.5 and one.waited(0) == 0.5
    assert {(bar.kind, bar.start, bar.end) for bar in one.bars} == {
        ("forward", 0, 1), ("message", 0, 1), ("wait", 1, 1.5),
    }  # fmt: skip


def test_every_word_can_be_read() -> None:
    traces = [run(contiguous(64, 8)), run(zigzag(64, 8))]
    assert illegible(gantt.compare(traces, ["contiguous", "zig-zag"])) == []
    assert illegible(gantt.figure(run(contiguous(64, 16), message_s=3e-6))) == []


def test_a_simulation_is_drawn_like_a_run() -> None:
    from ringlab.cost.hardware import hardware
    from ringlab.cost.simulate import simulate
    from ringlab.cost.sizes import Attention

    simulation = simulate(
        Attention(), contiguous(4 * 2048, 4), hardware("h100"), backward=True, slow={2: 1.5}
    )
    one = chart(simulation.trace())
    assert one.makespan == pytest.approx(simulation.makespan_s)
    assert [one.busy(rank) for rank in range(4)] == pytest.approx(simulation.busy_s.tolist())
    assert [one.waited(rank) for rank in range(4)] == pytest.approx(simulation.waited_s.tolist())
    assert one.busy_fraction == pytest.approx(simulation.busy_fraction)
    words = [text.get_text() for text in gantt.figure(simulation.trace()).legends[0].get_texts()]
    assert "attention backward (number: step)" in words and "ranks agree on the call" not in words


def test_a_comparison_has_one_time_axis() -> None:
    traces = [run(contiguous(32, 4)), run(zigzag(32, 4))]
    figure = gantt.compare(traces, ["contiguous", "zig-zag"])
    assert len({ax.get_xlim() for ax in figure.axes}) == 1
    ends = [ax.lines[-1].get_xdata()[0] for ax in figure.axes]
    assert ends[0] > ends[1]
    scale = time_unit(chart(traces[0]).makespan)[0]
    assert ends == pytest.approx([chart(trace).makespan / scale for trace in traces])


def test_many_ranks_are_thinned_and_said_so() -> None:
    trace = Trace(40, [Compute(rank, "attend 0", 0.0, 1.0) for rank in range(40)])
    ax = gantt.figure(trace).axes[0]
    labels = [t.get_text() for t in ax.get_yticklabels()]
    assert len(labels) == 16 and labels[0] == "rank 0" and labels[-1] == "rank 39"
    assert "16 of 40 ranks" in ax.get_title(loc="left")
    chosen = gantt.figure(trace, ranks=[3, 39]).axes[0]
    assert [t.get_text() for t in chosen.get_yticklabels()] == ["rank 3", "rank 39"]


def test_what_cannot_be_drawn_is_refused() -> None:
    trace = Trace(1, [Compute(0, "attend 0", 0.0, 1.0)])
    with pytest.raises(CommError, match="computations or exchanges"):
        gantt.figure(Trace(2))
    with pytest.raises(CommError, match="until > 0"):
        gantt.figure(trace, until=0)
    with pytest.raises(CommError, match="as many names"):
        gantt.compare([trace], ["a", "b"])
    with pytest.raises(CommError, match="ranks from 0 to 0"):
        gantt.figure(trace, ranks=[1])


def test_the_words_give_makespan_and_shares() -> None:
    words = gantt.describe(run(contiguous(32, 4)), "contiguous")
    for part in (
        "contiguous: 4 ranks",
        "ends at 228",
        "58% of the time",
        "rank 0 computes 36 µs and waits 64 µs",
    ):
        assert part in words, words
    both = gantt.describe_all([run(contiguous(32, 4)), run(zigzag(32, 4))], ["a", "b"])
    assert "a: 4 ranks" in both and "b: 4 ranks" in both


def test_buttons_and_slider_change_the_picture() -> None:
    pytest.importorskip("ipywidgets")
    box = gantt.player({"contiguous": run(contiguous(32, 4)), "zig-zag": run(zigzag(32, 4))})
    (which, part, _), picture = box.children[0].children, box.children[1]
    seen = {picture.value}
    which.value = "zig-zag"
    seen.add(picture.value)
    assert 'alt="zig-zag: 4 ranks' in picture.value
    part.value = 50
    seen.add(picture.value)
    assert len(seen) == 3


def test_a_chart_of_gpus_says_that_its_bars_are_launches() -> None:
    """On a GPU, a computation's times are those of launching it, so a share of busy time would mislead."""
    computes, arrives = Compute(0, "attend 0", 0.0, 1e-4), exchange(0, 0.0, 2e-4, 3e-4)
    on_cpu, on_gpu = Trace(1, [computes, arrives]), Trace(1, [computes, replace(arrives, stall=1e-4)])
    title, words = gantt.figure(on_cpu).axes[0].get_title(loc="left"), gantt.describe(on_cpu)
    assert "ranks compute 33%" in title and "ranks compute 33%" in words and "launch" not in title + words
    figure, words = gantt.figure(on_gpu), gantt.describe(on_gpu)
    for text in (figure.axes[0].get_title(loc="left"), words):
        assert "bars show launches, GPUs compute later" in text and "%" not in text
    assert not [text for text in figure.axes[0].texts if "busy" in text.get_text()]
    assert "rank 0 launches for 100 µs" in words
