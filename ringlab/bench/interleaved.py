"""The timer of all benchmarks, which runs several ways to do the same work in turn.

All contenders of a round run directly after each other, so noise of the machine hardly changes the ratios of
their times.
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
    """A contender's functions. `prepare` is called first and not timed, and its value is passed to `run`."""

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
    """Return the times of `rounds` rounds. Every contender runs once in each round, in rotating order.

    `fresh` is called before every round to draw new inputs. The first `warm_up` rounds are not counted.
    `progress` is called after every round.
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

    1 means that both are equally fast, 0.5 that the subject takes twice as long as the baseline.
    """
    return statistics.median(b / s for s, b in zip(times[subject], times[baseline], strict=True))


def paired(times: Times) -> dict[str, Any]:
    """Return the times of the contenders "subject" and "baseline" for JSON, with medians and their ratio."""
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
