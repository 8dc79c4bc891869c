"""Time several ways to do the same work, in turn on one device, so that all see the same machine.

Both sides of every pair run one right after the other, so their ratio survives a noisy machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ringlab.bench.device import Device


@dataclass(frozen=True)
class Paired:
    """Seconds of the subject and the baseline, pair by pair."""

    subject: tuple[float, ...]
    baseline: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Return the median of subject/baseline over the pairs."""
        return statistics.median(s / b for s, b in zip(self.subject, self.baseline, strict=True))

    def summary(self) -> dict[str, object]:
        """Return ratio, medians and all times, in seconds, ready for JSON."""
        return {
            "ratio": round(self.ratio, 4),
            "subject_median_s": statistics.median(self.subject),
            "baseline_median_s": statistics.median(self.baseline),
            "subject_s": list(self.subject),
            "baseline_s": list(self.baseline),
        }


def paired(
    subject: Callable[[], object],
    baseline: Callable[[], object],
    pairs: int,
    warm_up: int = 1,
    progress: Callable[[], None] = lambda: None,
) -> Paired:
    """Return the times of `pairs` interleaved runs; the side that goes first alternates.

    `warm_up` pairs are run first and not counted; `progress` is called after every pair.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(-warm_up, pairs):
        order = ((0, subject), (1, baseline)) if pair % 2 else ((1, baseline), (0, subject))
        for side, run in order:
            begin = time.perf_counter()
            run()
            if pair >= 0:
                times[side].append(time.perf_counter() - begin)
        progress()
    return Paired(tuple(times[0]), tuple(times[1]))


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
    """Return the speed of `subject` relative to `baseline`: the median over rounds of baseline time / subject time.

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
