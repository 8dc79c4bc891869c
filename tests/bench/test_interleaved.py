"""Timings in turn: who runs when, what is counted, and what the statistics are."""

from __future__ import annotations

import itertools

import pytest

from ringlab.bench.interleaved import Turn, interleaved, speed_ratio, statistics_of
from tests.bench.scripted import Scripted


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
