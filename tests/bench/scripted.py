"""A device that a test writes the script for: no GPU, no clock, and memory that it can hand out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ringlab.bench.device import fill_with_nan


class Scripted:
    """Runs what it is given at once; says of each run the next of `times`, one second where there is none."""

    name = "cpu"

    def __init__(self, times: Iterator[float] | None = None, peak: int = 0) -> None:
        self.times, self.peak = times, peak
        self.log: list[str] = []

    def seconds(self, run: Callable[[], Any]) -> float:
        self.log.append("time")
        run()
        return 1.0 if self.times is None else next(self.times)

    def settle(self) -> None:
        self.log.append("settle")

    def poison(self, outputs: tuple[Tensor, ...]) -> None:
        self.log.append("poison")
        for output in outputs:
            fill_with_nan(output)

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        self.log.append("weigh")
        run()
        return self.peak


class NoPoison(Scripted):
    """A mutant: its poison does nothing."""

    def poison(self, outputs: tuple[Tensor, ...]) -> None:
        self.log.append("poison")
