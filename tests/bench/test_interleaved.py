"""The timer of all benchmarks runs contenders in turn, and compares equal work by the median of the rounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ringlab import ring_attention, zigzag
from ringlab.bench.device import Cpu, machine
from ringlab.bench.emulate import Work, bench_emulate, block_alone, ring_program, sdpa, shards
from ringlab.bench.interleaved import Turn, interleaved, paired, speed_ratio, statistics_of
from ringlab.blocks.native import Native
from ringlab.comm.virtual.cluster import VirtualCluster

pytestmark = pytest.mark.thorough


def test_each_round_every_contender_runs_once_and_another_begins() -> None:
    order: list[str] = []
    turns = {name: Turn(lambda ready: order.append(ready), lambda name=name: name) for name in "abc"}
    fresh: list[None] = []
    ticks: list[None] = []
    times = interleaved(turns, Cpu(), 6, 3, lambda: fresh.append(None), lambda: ticks.append(None))
    rounds = ["".join(order[start : start + 3]) for start in range(0, len(order), 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(rounds) == len(ticks) == len(fresh) == 9
    assert sorted(each[0] for each in rounds[3:]) == ["a", "a", "b", "b", "c", "c"]
    assert {name: len(measured) for name, measured in times.items()} == {"a": 6, "b": 6, "c": 6}
    assert interleaved({}, Cpu(), rounds=2) == {}


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    times = {"ours": (1.0, 2.0, 8.0), "theirs": (2.0, 2.0, 2.0)}
    assert speed_ratio(times, "ours", "theirs") == 1.0  # the median of 2, 1 and 1/4; their mean is larger
    assert speed_ratio({"ours": (1.0,), "theirs": (3.0,)}, "ours", "theirs") == 3.0
    found = paired({"subject": (1.0, 10.0, 3.0), "baseline": (1.0, 5.0, 4.0)})
    assert (found["ratio"], found["subject_median_s"], found["baseline_median_s"]) == (1.0, 3.0, 4.0)
    of_flops = statistics_of((4.0, 1.0, 2.0), flops=6e12)
    assert (of_flops["median_s"], of_flops["fastest_s"], of_flops["slowest_s"]) == (2.0, 1.0, 4.0)
    assert of_flops["tflops"] == 3.0


def test_both_sides_do_the_same_work() -> None:
    work, P = Work(H=2, S=96, D=16), 4
    q, k, v, dout = work.tensors()
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    parts = [shards(rank, P, (q, k, v, dout, whole)) for rank in range(P)]

    def program(ring: Any) -> torch.Tensor:
        mine = parts[ring.rank]
        ring_program(ring, work.S, mine[:4], gradients=True)
        return ring_attention(*mine[:3], ring=ring, layout=zigzag(work.S, P)) - mine[4]

    assert max(float(r.abs().max()) for r in VirtualCluster(P).run(program).results) < 1e-5
    sdpa((q, k, v, dout), gradients=True)


@pytest.mark.parametrize("gradients", [False, True])
def test_the_block_alone_computes_each_visible_pair_once(
    gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, P = Work(H=1, S=64, D=16), 4
    parts = [shards(rank, P, work.tensors()) for rank in range(P)]
    pairs = {"forward": 0, "backward": 0}

    def counted(of: str, computed: Callable[..., object]) -> Callable[..., object]:
        def compute(self: Native, first: Any, k: torch.Tensor, *others: object, **how: Any) -> object:
            q = first if of == "forward" else first.q
            rows, keys = q.shape[-2], k.shape[-2]
            pairs[of] += rows * (rows + 1) // 2 if how["causal"] else rows * keys
            return computed(self, first, k, *others, **how)

        return compute

    for of in pairs:
        monkeypatch.setattr(Native, of, counted(of, getattr(Native, of)))
    block_alone(work.S, parts, gradients)
    whole = work.S * (work.S + 1) // 2
    assert pairs == {"forward": whole, "backward": whole if gradients else 0}


def test_a_report_has_what_readers_need() -> None:
    told: list[None] = []
    report = bench_emulate(Work(H=1, S=64, D=16), P=2, pairs=2, progress=lambda: told.append(None))
    assert json.loads(json.dumps(report)) == report
    assert report["forward_ratio"] > 0 and report["forward_backward_ratio"] > 0
    assert len(report["forward"]["subject_s"]) == len(report["forward"]["baseline_s"]) == 2
    assert len(told) == 16 and min(report["block_alone"].values()) > 0
    memory = report["memory"]["forward_backward"]
    assert len(memory["peak_bytes"]) == 2 and 0 < memory["largest_bytes"] <= max(memory["peak_bytes"])
    assert {"processor", "cores", "torch", "date", "gpus"} <= set(machine())
