"""Find the schedule that exposes the least communication, for given tokens per rank and bandwidth.

The seconds come from the cost model, `ringlab.cost.choose`, for the forward of one attention layer with equal
links and balanced layouts. Bandwidth is in bytes per second in one direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ringlab.cost.choose import Way, ways
from ringlab.cost.hardware import Hardware, hardware
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import least_tokens_hidden, shared_heads
from ringlab.errors import CostError

HIDDEN, RING, ULYSSES, ALLGATHER, NOTHING, HYBRID = range(6)
KINDS = {"ring": RING, "ulysses": ULYSSES, "hybrid": HYBRID, "allgather": ALLGATHER}
TOKENS, BANDWIDTH = (2**5, 2**23), (1e8, 2e12)
"""The ranges of the axes: tokens per rank, and bytes per second in one direction."""


@dataclass(frozen=True)
class Question:
    """A layer of attention on P ranks, each with F FLOP/s and `memory_bytes` free, at any bandwidth.

    hybrids: whether rings of Ulysses rows, with every possible row length, are also compared.
    """

    sizes: Attention
    P: int
    F: float
    latency_s: float
    memory_bytes: float
    hybrids: bool = False

    @property
    def ulysses_refusal(self) -> str:
        """The reason why Ulysses cannot divide the heads among P ranks, or "" if it can."""
        try:
            shared_heads(self.sizes, self.P)
        except CostError as error:
            return f"needs {error.needed}"
        return ""

    def threshold(self, B: float) -> float:
        """Return the tokens per rank from which the ring's hops are hidden, at B bytes/s."""
        return least_tokens_hidden(self.F, B, self.sizes, latency_s=self.latency_s)

    def exposed(self, kind: int, c: int, B: float) -> float:
        """Return the seconds of communication that a schedule exposes.

        A hybrid uses the best row length that fits into memory.
        """
        found = self._ways[RING if kind == HIDDEN else kind]
        fitting = [it for it in found if it.held_bytes * c <= self.memory_bytes]
        return min(it.exposed_s(c, self.F, B, self.latency_s) for it in fitting or found)

    def needs_bytes(self, kind: int, c: int) -> int:
        """Return the bytes of one layer's attention on a rank; a hybrid uses the cheapest row length.

        With Ulysses these are the bytes of a rank's tokens and of its heads.
        """
        return min(it.held_bytes for it in self._ways[RING if kind == HIDDEN else kind]) * c

    @cached_property
    def _ways(self) -> dict[int, list[Way]]:
        """Every way to divide the layer among the ranks, by schedule."""
        found: dict[int, list[Way]] = {}
        for it in ways(self.sizes, self.P):
            if self.hybrids or it.schedule != "hybrid":
                found.setdefault(KINDS[it.schedule], []).append(it)
        return found

    @cached_property
    def most_tokens(self) -> dict[int, int]:
        """The most tokens per rank that fit into memory, by schedule; bytes are proportional to tokens."""
        return {kind: int(self.memory_bytes // self.needs_bytes(kind, 1)) for kind in self.choices}

    @cached_property
    def choices(self) -> tuple[int, ...]:
        """The schedules that the numbers of heads and ranks allow."""
        return tuple(kind for kind in KINDS.values() if kind in self._ways)

    def best(self, c: int, B: float) -> int:
        """Return the schedule that exposes the least time among those that fit into memory.

        Return HIDDEN if the ring fits and exposes no time, and NOTHING if no schedule fits.
        """
        fitting = [kind for kind in self.choices if c <= self.most_tokens[kind]]
        if not fitting:
            return NOTHING
        if RING in fitting and self.exposed(RING, c, B) == 0:
            return HIDDEN
        return min(fitting, key=lambda kind: self.exposed(kind, c, B))


def question(
    sizes: Attention | None = None,
    machine: str | Hardware = "h100",
    P: int = 8,
    latency_s: float | None = None,
    memory_bytes: float | None = None,
    hybrids: bool = False,
) -> Question:
    """Return the question for ranks of `machine`.

    By default it has the FLOP/s that the machine's attention kernels reach, the latency of its inner link,
    and its whole memory.
    Raises: CostError for fewer than two ranks, an unknown machine, or a dtype in which the machine cannot
    compute.
    """
    sizes = sizes or Attention()
    if not isinstance(P, int) or P < 2:
        raise CostError("P >= 2 ranks, an integer", f"P={P!r}")
    known = machine if isinstance(machine, Hardware) else hardware(machine)
    latency = known.inside.latency_s if latency_s is None else latency_s
    memory = known.memory_bytes if memory_bytes is None else memory_bytes
    if not (latency >= 0 and memory > 0):
        raise CostError("latency_s >= 0 and memory_bytes > 0", f"{latency!r} and {memory!r}")
    F = known.peak(sizes.dtype) * known.reached.attention_forward
    return Question(sizes, P, F, latency, memory, hybrids)


@lru_cache(maxsize=8)
def grid(asked: Question, columns: int = 120, rows: int = 90) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens per rank (columns,), bandwidths (rows,), and the best schedule [row, column]."""
    tokens = np.unique(np.geomspace(*TOKENS, columns).round().astype(int))
    rates = np.geomspace(*BANDWIDTH, rows)
    return tokens, rates, np.array([[asked.best(int(c), float(B)) for c in tokens] for B in rates])
