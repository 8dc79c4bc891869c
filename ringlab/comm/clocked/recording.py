"""A run of a clocked cluster: the operations of every rank, and their times on a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from ringlab.comm.clocked.log import Forms, Log, Program
from ringlab.comm.clocked.timeline import Links, Stuck, Timeline, evaluate
from ringlab.comm.memory import MemoryReport
from ringlab.comm.virtual.waiting import Half, deadlock
from ringlab.errors import RinglabError, WorldSizeError


@dataclass(eq=False)
class Posted:
    """An exchange of one rank in the form that error messages need."""

    rank: int
    tag: str
    index: int
    to: int | None
    source: int | None
    open_ends: list[Half] = field(default_factory=list)
    posted: float = 0.0
    arrival: float = 0.0
    error: RinglabError | None = None
    done: bool = False


def ends(log: Log, forms: Forms, rank: int, index: int, sending: bool) -> list[Half]:
    """Return the ends of messages that the `index`-th exchange of `rank` posted in one direction."""
    to, source = log.to[index], log.source[index]
    number = (log.sent if sending else log.received)[index]
    if number < 0:
        return []
    work, peer = posted(log, forms, rank, index), to if sending else source
    tensors = forms[number].tensors()
    return [Half(work, rank, peer, tensor, place, sending) for place, tensor in enumerate(tensors)]


def posted(log: Log, forms: Forms, rank: int, index: int, open_ends: Sequence[Half] = ()) -> Posted:
    """Return the `index`-th exchange of `rank`."""
    to, source = log.to[index], log.source[index]
    number = max(log.sent[index], log.received[index])
    tag = forms[number].tag if number >= 0 else ""
    return Posted(rank, tag, index, to if to >= 0 else None, source if source >= 0 else None, list(open_ends))


class Recording:
    """The operations, results and memory of all ranks. `clock` returns the times of the operations."""

    def __init__(
        self, logs: Sequence[Log], forms: Forms, results: list[Any], memory: list[MemoryReport]
    ) -> None:
        self.logs, self.forms, self.results, self.memory = logs, forms, results, memory
        self.P = len(logs)
        self.program = Program.of(logs, forms)

    def __repr__(self) -> str:
        return f"Recording(P={self.P}, {len(self.program.kinds)} operations)"

    def clock(
        self, network: Links, *, slow: Mapping[int, float] | None = None, jitter: float = 0.0, seed: int = 0
    ) -> Timeline:
        """Return the times of all operations on `network`, in virtual seconds.

        slow: for each slow rank, the factor by which its computations take longer.
        jitter: every computation is multiplied by a random factor of mean 1; `jitter` is the standard
        deviation of its logarithm. A rank's factors depend only on `seed` and on the number of the rank.
        Raises: DeadlockError if ranks wait for each other to post receives; WorldSizeError for a slow rank
        that does not exist.
        """
        return self.timeline(network, self._seconds(slow or {}, jitter, seed))

    def timeline(self, network: Links, seconds: Float[np.ndarray, " computations"]) -> Timeline:
        """Return the times of all operations on `network`.

        seconds: the length of each computation, rank by rank.
        Raises: DeadlockError if ranks wait for each other to post receives.
        """
        ends, messages, stuck = evaluate(self.program, network, seconds)
        if stuck:
            raise deadlock({each.rank: self._posted(each) for each in stuck})
        return Timeline(self.program, self.forms, ends, seconds, messages)

    def _posted(self, stuck: Stuck) -> Posted:
        """Return the exchange that a rank cannot complete, with the ends of messages that are still open."""
        rank, forms = stuck.rank, self.forms
        index = stuck.post - int(np.searchsorted(self.program.post_rank, rank))
        log = self.logs[rank]
        waiting = ends(log, forms, rank, index, True) if stuck.sending else []
        waiting += ends(log, forms, rank, index, False) if stuck.receiving else []
        return posted(log, forms, rank, index, waiting)

    def _seconds(self, slow: Mapping[int, float], jitter: float, seed: int) -> np.ndarray:
        """Return the seconds of all computations, rank by rank."""
        factors = np.ones(self.P)
        for rank, factor in slow.items():
            if not 0 <= rank < self.P:
                raise WorldSizeError(f"slow ranks from 0 to {self.P - 1}", f"rank {rank}")
            factors[rank] = factor
        parts = []
        for rank, log in enumerate(self.logs):
            seconds = np.array(log.seconds) * factors[rank]
            if jitter:
                draws = np.random.default_rng([seed, rank]).standard_normal(len(seconds))
                seconds = seconds * np.exp(jitter * draws - jitter**2 / 2)
            parts.append(seconds)
        return np.concatenate(parts)
