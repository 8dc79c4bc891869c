"""Ratios that survive a noisy machine: both sides of every pair run one right after the other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


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
