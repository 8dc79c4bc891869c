"""Several ways to do the same work, timed in turn on one device, so that all see the same machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ringlab.bench.device import Device
from ringlab.bench.paired import Paired

Times = dict[str, tuple[float, ...]]
"""Seconds of each contender, round by round."""


@dataclass(frozen=True)
class Turn:
    """`run` is timed; `prepare`, not timed, comes before it and gives it its argument."""

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None


def interleaved(
    turns: Mapping[str, Turn],
    device: Device,
    rounds: int,
    warm_up: int = 3,
    fresh: Callable[[], None] = lambda: None,
    progress: Callable[[], None] = lambda: None,
) -> Times:
    """Return the times of `rounds` rounds; in each every contender runs once, and another begins.

    `fresh` is called before every round, to draw new inputs; `warm_up` rounds come first and are not
    counted; `progress` is called after every round.
    """
    names = list(turns)
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(-warm_up, rounds):
        fresh()
        shift = index % len(names) if names else 0
        for name in names[shift:] + names[:shift]:
            ready = turns[name].prepare()
            device.settle()
            seconds = device.seconds(lambda name=name, ready=ready: turns[name].run(ready))  # type: ignore[misc]
            del ready
            if index >= 0:
                times[name].append(seconds)
        progress()
    return {name: tuple(measured) for name, measured in times.items()}


def speed_ratio(times: Times, subject: str, baseline: str) -> float:
    """Return how fast `subject` is beside `baseline`: the median over rounds of baseline time / subject time.

    1 is as fast, 0.5 takes twice as long.
    """
    return Paired(times[baseline], times[subject]).ratio


def statistics_of(seconds: tuple[float, ...], flops: float) -> dict[str, Any]:
    """Return median, fastest and slowest time in seconds, all times, and TFLOP/s at the median."""
    median = statistics.median(seconds)
    return {
        "tflops": round(flops / median / 1e12, 2),
        "median_s": median,
        "fastest_s": min(seconds),
        "slowest_s": max(seconds),
        "times_s": list(seconds),
    }
