"""The one timer of all benches: several ways to do the same work, in turn, so that all see the same machine.

All contenders of a round run one right after the other, so the ratios of their times survive a noisy machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ringlab.bench.device import Clock

Times = dict[str, tuple[float, ...]]
"""Seconds of each contender, round by round."""


@dataclass(frozen=True)
class Turn:
    """`run` is timed; `prepare`, not timed, comes before it and gives it its argument."""

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None


def interleaved(
    turns: Mapping[str, Turn],
    clock: Clock,
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
            clock.settle()
            seconds = clock.seconds(lambda name=name, ready=ready: turns[name].run(ready))  # type: ignore[misc]
            del ready
            if index >= 0:
                times[name].append(seconds)
        progress()
    return {name: tuple(measured) for name, measured in times.items()}


def speed_ratio(times: Times, subject: str, baseline: str) -> float:
    """Return the speed of `subject` relative to `baseline`: the median over rounds of baseline time / subject time.

    1 is as fast, 0.5 takes twice as long.
    """
    return statistics.median(b / s for s, b in zip(times[subject], times[baseline], strict=True))


def paired(times: Times) -> dict[str, Any]:
    """Return what the contender "subject" took beside "baseline", ready for JSON: the ratio of times, medians, all times in seconds."""
    subject, baseline = times["subject"], times["baseline"]
    return {
        "ratio": round(speed_ratio(times, "baseline", "subject"), 4),
        "subject_median_s": statistics.median(subject),
        "baseline_median_s": statistics.median(baseline),
        "subject_s": list(subject),
        "baseline_s": list(baseline),
    }


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
