"""The deadline of a worker, extended by the time for which the worker waited for a processor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ringlab.errors import SandboxError

BUSY = 30.0
"""A submission without a processor is given up after this many times the seconds of its deadline."""


class Deadline:
    """A deadline `seconds` from now, extended by the time for which the submission waited for a processor.

    waited, computed: return the submission's seconds of waiting and computing so far. A submission that has
    computed as much as all processors of this machine could in `seconds` gets no extension.
    within: another deadline; when it is over, this one is over too.
    """

    def __init__(
        self,
        seconds: float,
        waited: Callable[[], float] = lambda: 0.0,
        computed: Callable[[], float] = lambda: 0.0,
        within: Deadline | None = None,
    ) -> None:
        self.seconds, self._waited, self._computed, self._within = seconds, waited, computed, within
        self._begin, self._waited_before, self._computed_before = time.monotonic(), waited(), computed()
        self._put_off = 0.0

    def left(self) -> float:
        """Return the remaining seconds, or 0 if the deadline is over.

        Raises: SandboxError if the machine is too busy to judge.
        """
        gone = time.monotonic() - self._begin
        if gone >= self.seconds + self._put_off:
            had_its_share = self._computed() - self._computed_before >= self.seconds * (os.cpu_count() or 1)
            self._put_off = 0.0 if had_its_share else self._waited() - self._waited_before
            if gone > BUSY * self.seconds and gone < self.seconds + self._put_off:
                raise SandboxError(
                    "a processor for the submission: the machine was busy",
                    f"{gone:.0f} s, mostly without one, in a call that may take {self.seconds:g} s",
                    "grade it again when the machine is less busy, or with fewer --jobs",
                )
        left = max(0.0, self.seconds + self._put_off - gone)
        return left if self._within is None else min(left, self._within.left())

    @property
    def over(self) -> bool:
        """Whether no seconds are left."""
        return self.left() <= 0
