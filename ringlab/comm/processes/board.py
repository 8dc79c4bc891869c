"""The board on which ranks of real processes write who failed first, and who has ended."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

_FAILURE = "ringlab/failure"
_SETTLE = 3.0  # seconds for the reason of a closed connection to reach the board
_POLL = 0.02


@dataclass(frozen=True)
class Failure:
    """The first failure of a run: the rank that failed, and why."""

    rank: int
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank} failed first: {self.reason}"


class Board:
    """A view of a key-value store that never raises: without a store nothing is known."""

    def __init__(self, store: dist.Store | None) -> None:
        self.store = store

    def record(self, rank: int, reason: str) -> Failure | None:
        """Write a failure, unless there is one already; return the one that counts."""
        mine = Failure(rank, reason)
        content = json.dumps(asdict(mine))
        self._ask(lambda store: store.compare_set(_FAILURE, "", content))
        return self.first_failure() or mine

    def first_failure(self) -> Failure | None:
        """Return the failure written first, or None."""
        content = self._ask(lambda store: store.get(_FAILURE) if store.check([_FAILURE]) else None)
        return Failure(**json.loads(content)) if content else None

    def end(self, rank: int) -> None:
        """Write that `rank` has ended its program, with or without an error."""
        self._ask(lambda store: store.set(_ended(rank), "1"))

    def ended(self, ranks: list[int]) -> bool:
        """Return whether all of `ranks` have ended their programs."""
        return bool(self._ask(lambda store: store.check([_ended(r) for r in ranks])))

    def why_gone(self, peer: int) -> Failure | None:
        """Return the failure behind a closed connection to `peer`; None if there is none to find.

        The reason may come later than the closed connection, so this waits a little.
        """
        deadline = time.monotonic() + _SETTLE
        while self.store is not None and time.monotonic() < deadline:
            if failure := self.first_failure():
                return failure
            if self.ended([peer]):
                return None
            time.sleep(_POLL)
        return None

    def linger(self, ranks: list[int], seconds: float) -> None:
        """Return when all of `ranks` have ended, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while self.store is not None and not self.ended(ranks) and time.monotonic() < deadline:
            time.sleep(_POLL)

    def _ask(self, question: Callable[[dist.Store], T]) -> T | None:
        if self.store is None:
            return None
        try:
            return question(self.store)
        except RuntimeError:  # the process that hosts the store is gone
            self.store = None
            return None


def _ended(rank: int) -> str:
    return f"ringlab/ended/{rank}"


def common_start(store: dist.Store, rank: int, host: str, timeout: float) -> float:
    """Return rank 0's clock reading at the start, so that clocks of one machine agree.

    On another machine that reading means nothing; there the start is the moment of this call.
    """
    key = "ringlab/start"
    if rank == 0:
        store.set(key, json.dumps([host, time.perf_counter()]))
    store.wait([key], timedelta(seconds=timeout))
    first_host, start = json.loads(store.get(key))
    return start if first_host == host else time.perf_counter()
