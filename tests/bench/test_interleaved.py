"""Timings in turn: who runs when, what is counted, and what the statistics are.

Paired timings: what is reported, never how fast it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ringlab.bench.device import machine
from ringlab.bench.emulate import Work, bench_emulate, block_alone, ring_program, sdpa, shards
from ringlab.bench.interleaved import Paired, Turn, interleaved, paired, speed_ratio, statistics_of
from ringlab.blocks.native import Native
from ringlab.comm.virtual.cluster import VirtualCluster
from tests.bench.test_measure import Scripted


def test_each_round_every_contender_runs_once_and_another_begins() -> None:
    order: list[str] = []
    turns = {name: Turn(lambda ready: order.append(ready), lambda name=name: name) for name in "abc"}
    ticks: list[int] = []
    times = interleaved(turns, Scripted(), rounds=6, warm_up=3, progress=lambda: ticks.append(1))
    rounds = ["".join(order[start : start + 3]) for start in range(0, len(order), 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds) and len(rounds) == len(ticks) == 9
    assert sorted(each[0] for each in rounds[3:]) == ["a", "a", "b", "b", "c", "c"]
    assert {name: len(measured) for name, measured in times.items()} == {"a": 6, "b": 6, "c": 6}


def test_warm_up_is_not_counted_and_every_time_goes_to_its_contender() -> None:
    seconds = {"slow": itertools.chain([99.0], itertools.repeat(2.0)), "fast": itertools.chain([99.0], itertools.repeat(1.0))}  # fmt: skip
    running: list[str] = []

    class Clock(Scripted):
        def seconds(self, run) -> float:
            run()
            return next(seconds[running[-1]])

    turns = {name: Turn(lambda _, name=name: running.append(name)) for name in seconds}
    times = interleaved(turns, Clock(), rounds=4, warm_up=1)
    assert times == {"slow": (2.0,) * 4, "fast": (1.0,) * 4}


def test_caches_are_settled_after_preparing_and_right_before_each_timed_run() -> None:
    device = Scripted()
    turn = Turn(lambda _: device.log.append("run"), lambda: device.log.append("prepare"))
    interleaved({"a": turn}, device, rounds=2, warm_up=0, fresh=lambda: device.log.append("fresh"))
    assert device.log == ["fresh", "prepare", "settle", "time", "run"] * 2


def test_a_ratio_is_the_median_of_the_rounds_and_above_1_for_the_faster() -> None:
    times = {"ours": (1.0, 2.0, 8.0), "theirs": (2.0, 2.0, 2.0)}
    assert speed_ratio(times, "ours", "theirs") == 1.0  # of 2, 1 and 1/4; the ratio of the means is 0.55
    assert speed_ratio({"ours": (1.0,), "theirs": (3.0,)}, "ours", "theirs") == 3.0


def test_statistics_are_what_they_say() -> None:
    found = statistics_of((4.0, 1.0, 2.0), flops=6e12)
    assert (found["median_s"], found["fastest_s"], found["slowest_s"]) == (2.0, 1.0, 4.0)
    assert found["tflops"] == 3.0 and found["times_s"] == [4.0, 1.0, 2.0]


def test_nobody_to_time_is_no_error() -> None:
    assert interleaved({}, Scripted(), rounds=2) == {}


def test_without_a_gpu_the_clock_of_gpus_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from ringlab.bench.device import Cuda, no_cuda
    from ringlab.errors import DeviceError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError) as raised:
        Cuda()
    error = raised.value
    assert error.needed == "an NVIDIA GPU" and "torch" in error.got
    assert "make gpu" in error.remedy and "ringlab bench emulate" in error.remedy
    assert str(no_cuda()).startswith(f"needs {error.needed}: {error.got}; ")


def test_the_ratio_is_the_median_of_the_pairs_not_the_ratio_of_medians() -> None:
    measured = Paired(subject=(1.0, 10.0, 3.0), baseline=(1.0, 5.0, 4.0))
    assert measured.ratio == 1.0
    assert measured.summary()["subject_median_s"] == 3.0 and measured.summary()["baseline_median_s"] == 4.0


def test_runs_are_interleaved_and_the_first_side_alternates() -> None:
    order: list[str] = []
    ticks: list[int] = []
    measured = paired(lambda: order.append("s"), lambda: order.append("b"), 4, 1, lambda: ticks.append(1))
    assert "".join(order) in ("sbbssbbssb", "bssbbssbbs")
    assert len(measured.subject) == len(measured.baseline) == 4 and len(ticks) == 5


def test_both_sides_do_the_same_work() -> None:
    work, P = Work(H=2, S=96, D=16), 4
    q, k, v, dout = work.tensors()
    layout_out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    parts = [shards(rank, P, (q, k, v, dout, layout_out)) for rank in range(P)]

    def program(ring) -> torch.Tensor:
        from ringlab import ring_attention, zigzag

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
    assert report["forward_ratio"] > 0 and report["forward_backward_ratio"] > 0
    assert len(report["forward"]["subject_s"]) == len(report["forward"]["baseline_s"]) == 2
    assert len(told) == 16 and min(report["block_alone"].values()) > 0
    memory = report["memory"]["forward_backward"]
    assert len(memory["peak_bytes"]) == 2 and 0 < memory["largest_bytes"] <= max(memory["peak_bytes"])
    assert {"processor", "cores", "torch", "date", "gpus"} <= set(machine())
