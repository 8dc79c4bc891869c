"""Every picture can be read, has a description in words, and refuses arguments that it cannot draw."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgba

from ringlab import Run, VirtualCluster, contiguous, striped, zigzag
from ringlab.comm.trace import Compute, Exchange, Trace
from ringlab.conformance.report.findings import Finding
from ringlab.cost.hardware import hardware
from ringlab.cost.planner.serve_time import ServeRequest, serving_time
from ringlab.cost.sizes import Attention
from ringlab.errors import CommError, CostError, CourseError, LayoutError
from ringlab.packing import Packing
from ringlab.scan.graph import SCANS
from ringlab.viz.lanes import Span, overlap
from ringlab.viz.style import PURPLE
from ringlab_course.catalogue import PAPERS
from ringlab_course.clinic.suite import KillMatrix
from ringlab_course.figures import (
    courier_view,
    course_ring,
    decision_map,
    error_curves,
    exchanges,
    kill_matrix,
    layout_view,
    load_mosaic,
    loss_curves,
    memory_ledger,
    online_softmax,
    overlap_view,
    packed_view,
    papers,
    profiler_lanes,
    ring_step,
    rounding,
    scaling_view,
    scan_view,
    serving_view,
    side_by_side,
    step_report,
    tile_scan,
)
from ringlab_course.figures.layout_tiles import LAYOUTS
from ringlab_course.figures.memory_ledger import Layer
from ringlab_course.figures.side_by_side import Job
from tests.viz.test_style import illegible

pytestmark = pytest.mark.thorough

A100 = 312e12, 300e9
MHA, MQA = Attention(H=32, K=32, causal=False), Attention(H=8, K=1)
GROUPED = Attention(H=64, K=8)
KNOWN = [[(rank - step) % 4 + 10 for step in range(4)] for rank in range(4)]
SEGMENT = striped(64, 4), 1, 3, (9, 16), (0, 8, 15, -1)
FOUR = ring_step.layouts_at(1024, 4, rank=1, step=1)
STEPS = {"ring": (3, 180e-6, 100e-6), "rows of 2": (1, 180e-6, 200e-6)}
DISTANCES = {"contiguous": np.array([[0, np.nan], [1, 0]]), "zigzag": np.array([[0.5, 1], [1, 0]])}
LADDER = {"block + merge": [(96, 36)] * 4, "carried": [(48, 20)] * 4, "first and last": [(40, 15)] * 4}
DOCUMENTS = (3, 1, 4)
DEALT = [contiguous(8, 2), zigzag(8, 2), striped(8, 2)]
ROW = Packing.of_lengths(DOCUMENTS)
PACKED = ROW, DEALT[0], "aaabcccc"
LINES = {"ids": [*"00012222"], "mine": [*"00011222"]}
MARKED, LOWER = {"mine": np.arange(8) == 4}, {"mine": np.arange(8) == 5}
WEIGHED = {"all": np.array([1, 1, 1, 0, 1, 1, 1, 1]) / 7}
LOST = np.array([1, 2, -1, -1, 5, -1, 7, -1])
LABELS = ROW, {"zigzag": DEALT[1]}, "aaabcccc", {"zigzag": LOST}
SEEN = np.tri(8, dtype=bool)
SERVER = partial(ServeRequest, "llama3-70b", "h100", context=2**17)
ROWS = {"token_ranks": 2, "head_ranks": 8, "sharing": "copies"}
WAYS = {
    "heads": SERVER(sequences=1, token_ranks=1, head_ranks=16, sharing="copies"),
    "rows": SERVER(sequences=1, **ROWS),
    "small": SERVER(sequences=1, token_ranks=1, head_ranks=8, sharing="copies"),
}
DECODED = {f"{users} in all": serving_time(SERVER(users, **ROWS)) for users in (1, 16)}
SENT = (
    [2**n for n in range(9, 21)],
    {"keys": [256.0 * (2**n + 512) for n in range(9, 21)], "queries": [1581056.0] * 12},
    5664,
)
TURNS = {"Long chunks": [(0.6, 8.0)] * 3, "Short chunks": [(0.01, 0.1)] * 200}, 0.01, 0.016
LANES = [
    Span(0, "compute", "a", 0.0, 0.004),
    Span(0, "copy", "b", 0.003, 0.006),
    Span(1, "compute", "a", 0.0, 0.010),
    Span(1, "copy", "b", 0.002, 0.003),
]
POSTED = ((0.0, 0.002), (0.0, 0.003)), ((0.004, 0.006), (0.003, 0.005))
ENDS = [
    tuple(
        Exchange(rank, 0, "kv", 1, 1, 8, 8, (), posted, posted, done)
        for rank, (posted, done) in enumerate(pair)
    )
    for pair in POSTED
]
THREE = [contiguous(32, 4), striped(32, 4), zigzag(32, 4)]
LEFT = """
def ring(x):
    total = 0
    for step in range(3):
        total = add(total, x)
    return total
"""
MESH_SOURCE = "def mesh(x):\n    total = nothing()\n    total = plus(total, x)\n    return total\n"
JOBS = (Job("begin", ("total = 0",), ("nothing",)), Job("add", ("add(",), ("plus(",)))
PROGRAMS = ("left", "right"), (LEFT, MESH_SOURCE), JOBS
SCALES = {"same": [1.0, 0.5], "grown": [1.0, 2.0]}
CURVES = {"one": [2.0, 1.0], "other": [2.0, 1.5]}
HOLDS = Finding("x", "asks", True, "saw 1", 0.0, True)
CHECKS = {"masks": HOLDS, "dq": replace(HOLDS, applies=False), "bytes": replace(HOLDS, ok=False)}
FOUND = KillMatrix(("ash", "elm"), tuple(CHECKS), {"ash": CHECKS, "elm": CHECKS})
WRONG = {
    name: error_curves.curves(name, (1, 4), rows=8) for name in ("sound", "bf16 lse", "bf16 accumulator")
}
OVERFLOWS = {"all": {probe: [0.1, np.inf] for probe in error_curves.PROBES} | {"repeat": [0.0, 0.0]}}
ROUNDED = rounding.Steps("sum", "additions", "sum", [255.0, 256.0, 257.0], [255.0, 256.0, 256.0])


def couriers():
    """Return the trace of two ranks that send a courier beside each block."""

    def program(ring):
        dk = torch.ones(2)
        for step in range(2):
            ring.compute(f"attend backward {step}", torch.neg, dk)
            courier = ring.post(dk, tag=f"dkv {step}")
            blocks = ring.post(dk, tag=f"kv {step}")
            courier.wait(), blocks.wait()

    return {"a run": VirtualCluster(2).run(program).trace}


def of(module, *arguments, figure="figure", words="describe", **options):
    """Return a function that makes a picture and its description from the same arguments."""
    return lambda: (
        getattr(module, figure)(*arguments, **options),
        getattr(module, words)(*arguments, **options),
    )


def named(module, name, *arguments):
    return of(module, *arguments, figure=name, words=f"describe_{name}")


IDENTITY = [[1.0, 0.0], [0.0, 1.0]]
WRITES = [
    scan_view.Token(name, value, keeps)
    for name, value, keeps in (
        ("a", (1, 0), 1.0),
        ("b", (0, 1), 1.0),
        ("b", (-2, 0), 1.0),
        ("a", (1, 2), 0.5),
    )
]
DOUBLING = scan_view.known(SCANS["doubling"](8), 8)
COMPUTED = Trace(1, [Compute(0, "passage", 0.0, 1.0), Compute(0, "attend", 1.0, 2.0)])
SCAN = tile_scan.scan(1024, 128, 64)
SAYS = {
    "notes": (of(course_ring, KNOWN, figure="draw_notes", words="describe_notes"), ()),
    "papers": (of(papers, figure="draw_papers", words="describe_papers"), [paper.arxiv for paper in PAPERS]),
    "shapes": (of(memory_ledger, figure="shapes_figure", words="describe_shapes"), ()),
    "sharing": (of(memory_ledger, 8, 2, figure="sharing_figure", words="describe_sharing"), ("repeat", "tile")),
    "ledger": (of(memory_ledger, 131_072, figure="ledger_figure"), ("scores 1.1 TB", "does not fit into a device of 80 GB; the largest S that fits is 24,920.")),
    "tile scan": (lambda: (tile_scan.still(SCAN, 9), tile_scan.describe(SCAN, 9)), ("step 10 of 36", "query tile 3", "key tile 3", "diagonal", "192.5 KiB", "4,096 KiB", "28 never")),
    "softmax": (lambda: (online_softmax.stream_figure(*online_softmax.example(), 4), online_softmax.describe(online_softmax.stream(*online_softmax.example(), 4))), ()),
    "tile strip": (lambda: (tile_scan.strip(SCAN), tile_scan.describe_strip(SCAN)), ("step 12 of 36", "step 36 of 36", "192.5 KiB fits into the 227 KiB")),
    "merge": (of(online_softmax, [12.7, 30.0], [10.1, 20.1], figure="merge_figure", words="describe_merge"), ("block a: width 10.1, height 12.7", "at 24.2")),
    "orders of merges": (of(online_softmax, figure="orders_figure", words="describe_orders"), ("c is empty",)),
    "dial": (named(layout_view, "dial", [2**i for i in range(13)], {False: [1.03] * 8 + [1.06, 1.1, 1.2, 1.4, 1.88], True: [1.03] * 7 + [1.004] * 5 + [1.88]}, 128, "Title"), ("folded: 3.0, 3.0",)),
    "meetings of runs": (named(layout_view, "meetings", [Run(9, 4, 4), Run(2, 4, 4)], Run(10, 4, 4)), ("d = -1: the rows see the first [0, 1, 2, 3] keys", "d = -2: the rows see the first [0, 0, 1, 2] keys")),
    "overlap": (of(overlap_view, 512, *A100), ("512 tokens on each of 4 ranks", "312 TFLOP/s, 300 GB/s one way", "Exposed: a hop takes 2.03 × a block", "44% of the time is waiting", "from 1,040 tokens per rank")),
    "hidden": (of(overlap_view, 4096, *A100), ("Hidden: a hop takes 0.25 × a block",)),
    "map": (of(decision_map), ("8 × H100 at 648 TFLOP/s", "32 query, 8 K/V heads of 128", "latency 3.4 µs", "ring: nothing exposed on", "Most tokens per rank in 85.5 GB: ring 3.48 million")),
    "map of rows": (of(decision_map, GROUPED, "h100", 16, hybrids=True), ("hybrid on 42%", "hybrid 1.1 million")),
    "map with points": (of(decision_map, GROUPED, "h100", 16, latency_s=hardware("h100").between.latency_s, hybrids=True, points={"short": (2048, 50e9), "long": (65536, 50e9)}), ("Marked: short, 2,048 tokens per rank and 50 GB/s.",)),
    "map without Ulysses": (of(decision_map, MHA, "a100", 64), ("Ulysses cannot be used: it needs a Ulysses degree that divides the H=32 query heads",)),
    "layouts": (of(layout_view, [contiguous(64, 4), striped(64, 4)], 4), ("64 tokens on 4 ranks", "tiles of 4 × 4", "first 0, 4, 8, 12", "64 partly masked", "the busiest rank computes 928, the idlest 160")),
    "layouts of documents": (of(layout_view, [striped(64, 4)], 4, documents=[10, 54]), ("2 documents of 10, 54",)),
    "mosaic": (of(load_mosaic, THREE), ("rank 3 computes most, 228, rank 0 least, 36", "36, 64, 64, 64: 228 in all", "1.73 times", "striped, 32 tokens on 4 ranks", "144 in all")),
    "mosaic of tiles": (of(load_mosaic, contiguous(32, 4), 4), ("tiles of 4 × 4",)),
    "couriers in time": (lambda: (courier_view.lanes(couriers()), courier_view.describe_lanes(couriers())), ("computes 2 in all", "couriers in transit 1 to 1.5, 2.5 to 3")),
    "profile": (of(profiler_lanes, {"one": LANES, "other": LANES[:2]}), ("rank 0 computes", "rank 1 computes")),
    "profile with a gap": (of(profiler_lanes, {"one": [*LANES[:1], Span(0, "copy", "b", 0.006, 0.007)]}), ("rank 0 computes 4 ms and copies 1 ms, 1 ms of it exposed, and does neither for 2 ms.",)),
    "profile with blame": (lambda: (profiler_lanes.figure({"one": LANES, "other": LANES}, blame={"one": (0,), "other": (0, 1)}), profiler_lanes.describe({"one": LANES, "other": LANES})), ("rank 0 computes",)),
    "bounds": (lambda: (profiler_lanes.bounds({"A link": ENDS}, 0.001), profiler_lanes.describe_bounds({"A link": ENDS})), ("A link: at most 2.0, 1.0 ms",)),
    "profile of a rank": (of(profiler_lanes, {"one": LANES}, 1), ("one, over after 10 ms: rank 1 computes 10 ms and copies 1 ms, 0 ms of it exposed, and does neither for 0 ms.",)),
    "side by side": (of(side_by_side, *PROGRAMS), ("1, begin. left: total = 0. right: total = nothing().", "2, add. left: total = add(total, x). right: total = plus(total, x).")),
    "two ways home": (named(side_by_side, "two_ways", 4), ("once more around",)),
    "ring step": (lambda: (ring_step.grid(FOUR), ring_step.describe_grid(FOUR)), ("striped", "6 full tiles, 4 masked", "6 skipped")),
    "traffic": (named(step_report, "traffic", LADDER, 4), ()),
    "segment": (named(step_report, "segment", *SEGMENT), ()),
    "trade": (named(exchanges, "trade"), ()),
    "schedules": (named(exchanges, "schedules"), ()),
    "decode": (named(exchanges, "decode_step", [64, 64, 63]), ()),
    "steps": (named(exchanges, "steps", STEPS), ()),
    "prompts": (named(exchanges, "prompts", {f"{n:,} tokens": {"ring": n / 2**14, "rows of 2": n / 2**15, "Ulysses": n / 2**13} for n in (1024, 2048, 4096, 8192)}), ("1,024 tokens: ring 62.5 ms", "the fastest is rows of 2.")),
    "losses": (of(loss_curves, CURVES, "Title"), ("other leaves it in step 2.",)),
    "recorded losses": (lambda: (loss_curves.figure(loss_curves.recorded().curves, "Title"), loss_curves.describe(loss_curves.recorded().curves, "Title")), loss_curves.recorded().curves),
    "strong and weak scaling": (of(scaling_view, (1, 2), SCALES), ("same: from 1 to 2 ranks the work of a rank goes from 1 to 0.5; grown: from 1 to 2 ranks the work of a rank goes from 1 to 2.",)),
    "losses apart": (lambda: (loss_curves.apart(CURVES, "Title"), loss_curves.describe(CURVES, "Title")), ("other leaves it in step 2.",)),
    "shares of the loss": (named(loss_curves, "shares"), ()),
    "distances": (named(loss_curves, "distances", DISTANCES), ()),
    "bits": (named(rounding, "bits", 100.4), ("keeps 100.5",)),
    "a sum that stands still": (named(rounding, "steps", [ROUNDED]), ("ends at 257, the one kept in bfloat16 at 256",)),
    "faults": (of(error_curves, (1, 4), WRONG, figure="fault_figure", words="describe_faults"), ("bf16 accumulator: plain",)),
    "faults that overflow": (of(error_curves, (1, 4), OVERFLOWS, figure="fault_figure", words="describe_faults"), ("all: plain 1e-01 to inf",)),
    "kill matrix": (of(kill_matrix, FOUND), ("ash: found by bytes. elm: found by bytes.",)),
    "kill matrix in groups": (lambda: (kill_matrix.figure(FOUND, groups={"values": ("masks", "dq"), "traffic": ("bytes",)}), kill_matrix.describe(FOUND)), ("ash: found by bytes.",)),
    "strip": (lambda: (packed_view.strip(*PACKED, LINES, MARKED, LOWER, title="Title", bounds=True), packed_view.describe(*PACKED, LINES, MARKED, LOWER, title="Title", bounds=True)), ("cu_seqlens: 0, 3, 4, 8.", "mine: 0 0 0 1 1 2 2 2. Wrong at places 4. Lower at places 5.")),
    "pairs": (named(packed_view, "pairs", *PACKED, {"causal": SEEN}, 1), ("at place 1 has a frame", "17 pairs seen, rightly, 19 pairs seen by mistake, 0 pairs lost")),
    "labels": (named(packed_view, "labels", *LABELS), ("Labels lost at places 5; wrong labels at places none.",)),
    "weights": (named(packed_view, "weights", *PACKED, {"all": np.full(8, 1 / 8)}), ("weights: 1/8 1/8",)),
    "shares": (lambda: (packed_view.weights(*PACKED, WEIGHED, shares=True), packed_view.describe_weights(*PACKED, WEIGHED, shares=True)), ("Sums of the documents: 3/7 0 4/7.",)),
    "travellers": (named(serving_view, "travellers", 4), ()),
    "hand over": (named(serving_view, "hand_over", 4), ()),
    "hand over of one rank": (named(serving_view, "hand_over", 1), ()),
    "ring beside state": (named(scan_view, "beside", 8, 2**28, 2**21), ("256 MiB, which makes 7 hops", "a state of 2 MiB, once", "a block is 128 times as large")),
    "states handed on": (named(scan_view, "states", WRITES, 2, {"sum": [IDENTITY, IDENTITY]}), ("rank 1: b ← (−2, 0), forget half, a ← (1, 2)", "sum: a (1, 0) b (0, 1), then a (1, 0) b (0, 1)")),
    "states and a note": (named(scan_view, "states", WRITES, 2, {"sum": [IDENTITY, IDENTITY]}, (3, "a has changed")), ("On rank 1, a has changed.",)),
    "transitions": (named(scan_view, "transitions", WRITES, [(IDENTITY, IDENTITY)] * 2), ("rank 1: A (1, 0) (0, 1), B (1, 0) (0, 1)",)),
    "transitions that leave nothing": (named(scan_view, "transitions", WRITES, [([[0, 0], [0, 0]], IDENTITY)] * 2), ("rank 1: A (0, 0) (0, 0)",)),
    "doubling": (named(scan_view, "doubling", DOUBLING, 5), ("in 3 rounds", "after round 2 it knows of 2 to 5")),
    "kept in doubling": (named(scan_view, "kept", DOUBLING, 5), ("in round 2 it hears of 2 to 3, so that all is 2 to 5 and before is 2 to 4",)),
    "states by doubling": (named(scan_view, "entering", 2 * WRITES, [(IDENTITY, IDENTITY), ([[0, 1], [0, 0]], [[1, 0], [0, 1]])] * 2, [IDENTITY] * 4), ("after round 2", "rank 2 (1, 1) (0, 1)", "rank 3 (2, 1) (0, 2)", "from a relay rank 0 (1, 0) (0, 1)")),
    "pairs in a state": (named(scan_view, "recall", [1, 8, 16], {"plain sum": [0.0, 0.4, 1.2], "the best state": [0.0, 0.0, 0.7]}, 8), ("a state of 8 × 8 numbers", "plain sum from 0.00 to 1.20")),
    "kinds of A": (named(scan_view, "kinds", {kind: ["Some model"] for kind in scan_view.KINDS}), ("a full matrix: Some model",)),
    "timeline of a scan": (named(scan_view, "timeline", {"Relay": COMPUTED, "Other": COMPUTED}), ("Relay: 1 rank, ends at 2 s",)),
    "shares of a layer": (named(scan_view, "shares", {"8 × 131,072 tokens, InfiniBand": {"matrices": 0.023, "outputs": 0.001, "A and B": 0.001, "scan": 0.0003}}), ("scan 0.30 ms",)),
    "chunk masks": (named(serving_view, "chunk_masks", 4), ("chunk 4 sees 7 half squares",)),
    "last chunk": (named(serving_view, "last_chunk", 4), ("queries of chunk 4", "see 3 whole squares and half of their own")),
    "bytes by prefix": (lambda: (serving_view.bytes_by_prefix(*SENT), serving_view.describe_bytes(*SENT)), ("keys: 0.3 to 268.6 MB", "queries: 1.6 to 1.6 MB", "meet at 5,664 tokens")),
    "turns of two users": (named(serving_view, "turns", *TURNS), ("Long chunks: Ben gets a token between two chunks, and the longest keeps him waiting 8,600 ms", "a token every 16 ms")),
    "steps of users": (named(serving_view, "step_bars", DECODED, "Title"), ("1 in all: weights 5.3, caches 0.8, messages 4.4 ms, 10.5 ms: 96 tokens/s, 96 each", "16 in all: weights 5.3, caches 12.8")),
    "steps in a group": (named(serving_view, "step_bars", DECODED, "Title", 2), ("1 in all: weights 5.3, caches 0.8, messages 4.4 ms, 10.5 ms: 96 tokens/s each", "22.7 ms (+12.3): 44 tokens/s each")),
    "reading of users": (named(serving_view, "read_bars", DECODED, "Title", 2), ("1 in all: weights 5.3 and caches 0.8, together 6.1 ms", "16 in all: weights 5.3 and caches 12.8, together 18.1 ms")),
    "copies": (named(serving_view, "copies", WAYS), ("heads: two copies of every cache", "rows: two copies of the weights, Each rank reads 17.6 GB of weights and 2.7 GB of each cache", "small: one copy of everything")),
    "survival": (named(scan_view, "survival", [0.5, 0.9, 0.8]), ("token 2 reads 0.36 of the state and 0.72, 0.8, 1 of the writes so far",)),
}  # fmt: skip


@pytest.mark.parametrize("name", SAYS)
def test_a_picture_can_be_read_and_its_words_carry_its_numbers(name):
    draw, parts = SAYS[name]
    figure, words = draw()
    assert illegible(figure) == [], "leave labels out, make them smaller, or widen the figure"
    assert len(words) > 20 and not [part for part in parts if part not in words], words


OFFERED = {
    **{f"lesson {lesson}": (course_ring.draw_course, lesson) for lesson in ("00", "05", "17")},
    **{f"machine {name}": (overlap_view.figure, 1024, *rates) for name, rates in overlap_view.presets().items()},
    "hops of hours": (overlap_view.figure, 64, 1e16, 1e7, 8),
    "at the threshold": (overlap_view.figure, 1040, *A100, 16),
    "map of few heads": (decision_map.figure, MQA, "tpu-v4", 8),
    "map of a laptop": (lambda: decision_map.figure(Attention(H=128, K=8, D=256, dtype="float32"), "laptop", 2, memory_bytes=1e6),),
    "ledger of many tokens": (memory_ledger.ledger_figure, 2**24, Layer(heads=128, itemsize=4)),
    "many layouts": (lambda: layout_view.figure([LAYOUTS[name](2048, 8) for name in tuple(LAYOUTS)[:4]], 128),),
    "layout of one rank": (layout_view.figure, [striped(30, 1)], 8),
    **{f"mosaic of {P} ranks": (load_mosaic.figure, [LAYOUTS[name](4096 * P, P) for name in tuple(LAYOUTS)[:3]], 128) for P in (1, 5, 12, 40)},
}  # fmt: skip


@pytest.mark.parametrize("name", OFFERED)
def test_whatever_the_notebooks_and_their_sliders_offer_can_be_read(name):
    draw, *arguments = OFFERED[name]
    assert illegible(draw(*arguments)) == []


def bars(spans: list[Span], look: str) -> list[float]:
    """Return the seconds of each bar with this look in the picture of rank 0's lanes, which is drawn in milliseconds."""
    drawn = profiler_lanes.figure({"one": spans}, rank=0)
    found = [each for ax in drawn.axes for each in ax.collections if each.get_gid() == f"{look} 0"]
    return [np.ptp(path.vertices[:, 0]) / 1e3 for each in found for path in each.get_paths()]


def test_the_bars_of_exposed_copying_last_as_long_as_it_however_short_a_computation_divides_them():
    spans = [Span(0, "copy", "b", 0.0, 0.01)]
    spans += [Span(0, "compute", "a", at / 1e5, (at + 1) / 1e5) for at in range(100, 500, 2)]
    assert sum(bars(spans, "exposed")) == pytest.approx(overlap(spans, 0).exposed_s) == pytest.approx(0.008)


def test_the_first_piece_of_a_chunk_is_drawn_only_where_it_can_be_seen():
    def purple(ax):
        return [patch for patch in ax.patches if patch.get_facecolor() == to_rgba(PURPLE)]

    long, short = serving_view.turns(*TURNS).axes
    assert [round(patch.get_width(), 9) for patch in purple(long)] == [0.6] * 2
    assert purple(short) == []


def test_time_in_neither_lane_is_drawn_until_the_last_span_of_the_rank_unless_it_is_too_short_to_be_seen():
    assert bars([*LANES, Span(0, "copy", "b", 0.008, 0.009)], "neither") == pytest.approx([0.002])
    assert bars([*LANES, Span(0, "copy", "b", 0.00601, 0.009)], "neither") == []
    assert bars(LANES, "neither") == []


def test_long_computations_of_a_profile_are_numbered_in_order():
    spans = [
        Span(0, "compute", "aten::a", at, at + lasts)
        for at, lasts in ((0.005, 0.004), (0.0, 0.003), (0.004, 0.0001))
    ]
    (ax,) = profiler_lanes.figure({"one": spans}, rank=0).axes
    numbers = {text.get_text(): text.get_position()[0] for text in ax.texts if text.get_text().isdigit()}
    assert numbers == pytest.approx({"1": 1.5, "2": 7.0})


REFUSED = [
    (CommError, "one of the ranks", lambda: profiler_lanes.figure({"one": LANES}, rank=2)),
    (CommError, "at most 6 ranks", lambda: courier_view.follow(print, contiguous(14, 7))),
    (CourseError, "gone", lambda: side_by_side.figure(*PROGRAMS[:2], (Job("x", ("gone",), ("plus",)),))),
    (LayoutError, "tile >= 1", lambda: layout_view.figure([contiguous(8, 2)], 0)),
    (LayoutError, "1 to 8,192 tokens", lambda: layout_view.figure([contiguous(10_000, 2)], 128)),
    (LayoutError, "add up to S=8", lambda: layout_view.figure([contiguous(8, 2)], 1, documents=[3, 4])),
    (LayoutError, "by=", lambda: load_mosaic.figure(contiguous(8, 2), by="rank")),
    (CostError, "tokens per rank", lambda: overlap_view.figure(3, *A100, 4)),
    (CostError, "above zero", lambda: overlap_view.figure(512, 0.0, 300e9)),
    (CostError, "one of the machines", lambda: overlap_view.play(preset="a100")),
    (CostError, "P >= 2", lambda: decision_map.figure(P=1)),
    (CostError, "known hardware", lambda: decision_map.figure(machine="h1000")),
    (CostError, "latency_s >= 0", lambda: decision_map.figure(latency_s=-1.0)),
    (ValueError, "plain, large, sloped, not 'steep'", lambda: error_curves.inputs("steep", 0)),
]


@pytest.mark.parametrize(("error", "needed", "draw"), REFUSED)
def test_what_cannot_be_drawn_is_refused(error, needed, draw):
    with pytest.raises(error, match=needed):
        draw()
