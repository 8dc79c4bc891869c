"""The simulator runs the real program and gives the same messages, the same memory and the same times."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ringlab import Ring, VirtualCluster, ring_attention
from ringlab.comm.trace import Exchange, Trace
from ringlab.comm.virtual.cluster import Costs
from ringlab.cost.block_time import MeasuredTime, PeakTime, block_time, tile_scores
from ringlab.cost.hardware import MeasuredBlock, hardware
from ringlab.cost.shape_block import Prices, ShapeBlock
from ringlab.cost.simulate import Network, Simulation, simulate
from ringlab.cost.sizes import Attention
from ringlab.errors import CostError
from ringlab.layout import Layout, contiguous, dealt, per_document, zigzag
from ringlab.mask import Mask
from ringlab.plan import Tile, tiles

SIZES = Attention(H=4, K=2, D=8, dtype="float32")
LAYOUTS = [contiguous(50, 4), dealt(50, 4, chunk=3), zigzag(64, 4)]
SCHEDULES = ["ring", "allgather", "ulysses", "hybrid(ring=2, ulysses=2)", "double-ring(node=2)"]
SCHEDULES += ["query-ring", "burst", "bidirectional", "multi-ring"]
IDS = [f"{layout!r}" for layout in LAYOUTS]


class OnCpu(ShapeBlock):
    """The shape block on CPU tensors, whose values do not matter."""

    def supports(self, q: Tensor) -> str | None:
        return None


class NoTime:
    """A block time of zero seconds for all blocks."""

    def seconds(self, tiles: tuple[Tile, ...], sizes: Attention, rows: int, backward: bool) -> float:
        return 0.0


def real(
    layout: Layout,
    sizes: Attention,
    schedule: str,
    backward: bool,
    block: Any,
    mask: Mask | None = None,
    **how: Any,
) -> Any:
    """Return the outcome of the simulated call when it runs with data on the virtual cluster."""

    def shard(rank: int, heads: int) -> Tensor:
        return torch.ones(sizes.B, heads, layout.length(rank), sizes.D)

    inputs = [[shard(rank, heads) for heads in (sizes.H, sizes.K, sizes.K)] for rank in range(layout.P)]

    def program(ring: Ring) -> None:
        q, k, v = (x.detach().requires_grad_(backward) for x in inputs[ring.rank])
        out = ring_attention(
            q,
            k,
            v,
            ring=ring,
            layout=layout,
            mask=mask or Mask(causal=sizes.causal),
            block=block(ring),
            schedule=schedule,
            validate=False,
        )
        if backward:
            torch.autograd.grad(out, (q, k, v), inputs[ring.rank][0])

    return VirtualCluster(layout.P, **how).run(program)


def run(layout: Layout, sizes: Attention = SIZES, **how: Any) -> Simulation:
    return simulate(sizes, layout, hardware("h100"), **how)


def messages(trace: Trace, rank: int) -> list[tuple[Any, ...]]:
    """Return the messages that a rank sent, in the order of their exchanges, without times."""
    return sorted(
        (e.index, e.tag, e.to, e.source, e.bytes_sent, e.bytes_received, e.shapes)
        for e in trace.exchanges(rank)
    )


@pytest.mark.sweep(3)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_its_messages_are_those_of_a_run_with_data(layout: Layout, schedule: str, backward: bool) -> None:
    same_messages(layout, schedule, backward, Mask())


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_its_messages_under_a_window_are_those_of_a_run_with_data(schedule: str) -> None:
    same_messages(zigzag(64, 4), schedule, True, Mask(window=7))


def same_messages(layout: Layout, schedule: str, backward: bool, mask: Mask) -> None:
    outcome = real(layout, SIZES, schedule, backward, lambda ring: "blockwise", mask)
    trace = run(layout, schedule=schedule, backward=backward, mask=mask).trace()
    for rank in range(layout.P):
        assert messages(trace, rank) == messages(outcome.trace, rank)
        labels = [event.label for event in outcome.trace.computes(rank)]
        assert [event.label for event in trace.computes(rank)] == labels


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("schedule", ["ring", "allgather"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_its_memory_is_that_of_a_run_with_data(layout: Layout, schedule: str, backward: bool) -> None:
    """The simulated memory is that of the same block run with data, with one exception.

    The virtual cluster swaps the memory of both ends of a hand-over. Here, and between processes, memory
    stays. If shards are unequal, a rank cannot receive a long block where the gradients of its own short
    block were, and so it holds one more pair of buffers.
    """
    prices = Prices(NoTime(), SIZES)
    outcome = real(layout, SIZES, schedule, backward, lambda ring: OnCpu(prices, lambda seconds: None))
    mine = run(layout, schedule=schedule, backward=backward).peak_bytes
    theirs = np.array([report.peak_bytes for report in outcome.memory])
    lengths = [layout.length(rank) for rank in range(layout.P)]
    row, spread = 2 * SIZES.K * SIZES.D * 4, max(lengths) - min(lengths)  # a row of k and v, or of dk and dv
    more = row * max(lengths) if backward and schedule == "ring" and spread else 0
    assert (mine >= theirs - 2 * row * spread).all()
    assert (mine <= theirs + 2 * row * spread + more).all()


class ByBytes(Costs):
    """Costs of messages that charge K and V for the bytes of both, because they leave together."""

    def __init__(self, layout: Layout, time: PeakTime, network: Network) -> None:
        self.layout, self.time, self.network = layout, time, network

    def compute(self, rank: int, label: str, args: tuple[Any, ...]) -> float:
        parts = tiles(self.layout, rank, args[2], SIZES.causal)
        return self.time.seconds(parts, SIZES, self.layout.length(rank), False)

    def message(self, source: int, to: int, nbytes: int) -> float:
        ends = np.array([source]), np.array([to])
        return float(2 * nbytes / self.network.bytes_per_s(*ends)[0] + self.network.latency_s(*ends)[0])


@pytest.mark.parametrize("speed", [1e3, 1e5, 1e9])
@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_its_times_are_those_of_the_virtual_cluster(layout: Layout, speed: float) -> None:
    """Times equal the virtual cluster's for one exchange at a time, with two nodes and one slow rank."""
    time = PeakTime(1e6, 1e6, tile=(4, 4))
    network = Network(4, speed, 1e-4, speed / 3, 1e-3, 2)
    costs = ByBytes(layout, time, network)
    outcome = real(layout, SIZES, "ring", False, lambda ring: "blockwise", costs=costs)
    done = run(layout, block_time=time, network=network)
    for rank in range(4):
        theirs = [(type(e), times(e)) for e in outcome.trace.events if e.rank == rank]
        mine = [(type(e), times(e)) for e in done.trace().events if e.rank == rank]
        assert [kind for kind, _ in mine] == [kind for kind, _ in theirs]
        for (_, got), (_, expected) in zip(mine, theirs, strict=True):
            assert got == pytest.approx(expected, rel=1e-12)


def times(event: Any) -> tuple[float, ...]:
    if isinstance(event, Exchange):
        return event.posted, event.waited, event.done
    return event.start, event.end


def test_kernel_tiles_count_wholly_unless_wholly_masked() -> None:
    assert tile_scores(Tile(0, 8, 0, 8, True), (4, 4)) == 3 * 16
    assert tile_scores(Tile(0, 8, 0, 8, False), (4, 4)) == 64
    assert tile_scores(Tile(0, 9, 0, 5, False), (4, 4)) == 45
    assert tile_scores(Tile(0, 5, 0, 5, True), (4, 4)) == 4 * 4 + 1 * 5
    assert tile_scores(Tile(0, 8, 0, 8, True), (8, 2)) == 64
    assert tile_scores(Tile(0, 8, 0, 8, True), (2, 8)) == 64
    assert tile_scores(Tile(0, 8, 0, 8, True), None) == 36


def test_jitter_depends_on_the_seed_alone_and_is_each_ranks_own() -> None:
    layout = zigzag(256, 4)
    one, same, other = (run(layout, jitter=0.1, seed=seed) for seed in (1, 1, 2))
    assert one.makespan_s == same.makespan_s != other.makespan_s
    assert len(set(run(layout).busy_s)) == 1 and len(set(one.busy_s)) == 4


def test_measurements_of_another_head_dim_do_not_count() -> None:
    """Measurements of another head dim are ignored, and the peak rate is used in their place."""
    blocks = tuple(
        MeasuredBlock("bfloat16", name, 1.0, 1.0, 1.0, 64, "made up") for name in ("forward", "backward")
    )
    measured = replace(hardware("h100"), block_times=blocks)
    assert isinstance(block_time(measured, "bfloat16", D=64), MeasuredTime)
    rate = measured.peak("bfloat16") * measured.reached.attention_forward
    assert block_time(measured, "bfloat16", D=128).forward_flops_per_s == rate  # type: ignore[attr-defined]
    assert block_time(measured, "bfloat16", D=128) == block_time(hardware("h100"), "bfloat16")
    assert isinstance(block_time(measured, "float16", D=64), PeakTime)
    sizes, layout = Attention(D=128), zigzag(256, 2)
    plain, other = (simulate(sizes, layout, it).makespan_s for it in (hardware("h100"), measured))
    assert plain == other < 1.0 < simulate(replace(sizes, D=64), layout, measured).makespan_s


def test_a_rank_of_ulysses_computes_its_heads_of_all_rows() -> None:
    """A Ulysses rank computes as much as one of a balanced ring, and exposes less if hops are longer."""
    sizes = Attention(H=8, K=8, D=64)
    layout = contiguous(4096, 4)
    exact = {"tile": None, "backward": True}
    shared = simulate(sizes, layout, hardware("h100"), schedule="ulysses", **exact)
    even = simulate(sizes, zigzag(4096, 4), hardware("h100"), **exact)
    assert shared.busy_s.tolist() == pytest.approx(even.busy_s.tolist(), rel=1e-3)
    assert np.ptp(shared.busy_s) == 0


def test_what_a_window_hides_is_neither_computed_nor_sent() -> None:
    """A window of 257 over contiguous shards of 256 computes its pairs only, and sends one hop of three."""
    layout, exact = contiguous(1024, 4), {"tile": None}
    near = run(layout, mask=Mask(window=257), **exact)
    whole = run(layout, **exact)
    assert near.recording.program.sent_bytes.sum() * 3 == whole.recording.program.sent_bytes.sum()
    pairs = [Mask(window=257).visible(layout.positions(rank), np.arange(1024)).sum() for rank in range(4)]
    assert near.busy_s / near.busy_s[0] == pytest.approx(np.array(pairs) / pairs[0])


def test_packed_documents_dealt_one_by_one_are_balanced() -> None:
    lengths = (3000, 700, 396)
    mask = Mask(documents=lengths)
    even = run(per_document(lengths, 4), mask=mask, tile=None).busy_s
    uneven = run(zigzag(4096, 4), mask=mask, tile=None).busy_s
    assert even.max() / even.mean() < 1.01 < uneven.max() / uneven.mean()


@pytest.mark.parametrize(
    ("layout", "how", "told"),
    [
        (lambda: zigzag(2**20, 2), {"mask": Mask(window=15)}, "a window of at least 16 tokens"),
        (lambda: zigzag(8, 2), {"slow": {1: 0.0}}, "slow factors > 0"),
        (lambda: zigzag(8, 2), {"jitter": float("nan")}, "jitter"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    layout: Callable[[], Layout], how: dict[str, Any], told: str
) -> None:
    with pytest.raises(CostError, match=told):
        run(layout(), **how)

    with pytest.raises(CostError, match="float64"):
        simulate(Attention(dtype="float64"), zigzag(8, 2), hardware("tpu-v4"))
    for wrong in ((0, 1.0, 0.0, 1.0, 0.0, 1), (1, 0.0, 0.0, 1.0, 0.0, 1), (1, 1.0, -1.0, 1.0, 0.0, 1)):
        with pytest.raises(CostError):
            Network(*wrong)


def test_the_first_simulation_of_a_process_counts_no_more_memory_than_later_ones() -> None:
    code = (
        "from ringlab.cost.simulate import simulate\n"
        "from ringlab.cost.sizes import Attention\n"
        "from ringlab.cost.hardware import hardware\n"
        "from ringlab.layout import zigzag\n"
        "sizes = Attention(1, 32, 4, 128, 'bfloat16')\n"
        "run = simulate(sizes, zigzag(64000, 8), hardware('h100'), backward=True)\n"
        "print(*sorted(set(run.peak_bytes.tolist())))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 1
