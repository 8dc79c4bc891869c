"""Which schedule leaves least communication exposed, over tokens per rank and bandwidth.

Everything is put together from the cost room: `overlap` for the ring, `closed_form` for the
all-gather, `traffic` for Ulysses, `memory` for what fits. Forward of one attention layer, links all
alike, balanced layouts; bytes per second count one direction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from ringlab.cost.closed_form import allgather_s
from ringlab.cost.hardware import Hardware, hardware
from ringlab.cost.memory import attention_bytes
from ringlab.cost.overlap import exposed_s, hop_s, least_tokens_hidden
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import shared_heads, ulysses_traffic
from ringlab.errors import CostError
from ringlab.viz.machines import known_links

HIDDEN, RING, ULYSSES, ALLGATHER, NOTHING = range(5)
TOKENS, BANDWIDTH = (2**5, 2**23), (1e8, 2e12)
"""The axes: tokens per rank, and bytes per second one way."""


@dataclass(frozen=True)
class Question:
    """A layer of attention on P ranks, each of F FLOP/s, with `memory_bytes` free for it, any bandwidth."""

    sizes: Attention
    P: int
    F: float
    latency_s: float
    memory_bytes: float

    @property
    def ulysses_refusal(self) -> str:
        """Return why Ulysses cannot share the heads out among P ranks; empty if it can."""
        try:
            shared_heads(self.sizes, self.P)
        except CostError as error:
            return f"needs {error.needed}"
        return ""

    def threshold(self, B: float) -> float:
        """Return the tokens per rank from which the ring's hops hide."""
        return least_tokens_hidden(self.F, B, self.sizes, latency_s=self.latency_s)

    def exposed(self, kind: int, c: int, B: float) -> float:
        """Return the seconds of communication that a schedule exposes.

        An all-gather and the two all-to-alls of Ulysses have nothing to hide behind.
        """
        if kind in (HIDDEN, RING):
            return exposed_s(self.sizes, c, self.P, self.F, B, self.latency_s)
        if kind == ALLGATHER:
            return allgather_s(self.P, 0.0, hop_s(self.sizes, c, B) / 2, self.latency_s)
        sent = ulysses_traffic(self.sizes, c * self.P, self.P)
        return sent.total_bytes / B + sent.steps * self.latency_s

    def needs_bytes(self, kind: int, c: int) -> int:
        """Return the bytes of one layer's attention on a rank; Ulysses holds its tokens and its heads."""
        if kind in (HIDDEN, RING):
            return attention_bytes(self.sizes, c, self.P, "ring")
        if kind == ALLGATHER:
            return attention_bytes(self.sizes, c, self.P, "allgather")
        heads = replace(self.sizes, H=self.sizes.H // self.P, K=shared_heads(self.sizes, self.P))
        return attention_bytes(self.sizes, c, 1, "blockwise") + attention_bytes(
            heads, c * self.P, 1, "blockwise"
        )

    @cached_property
    def most_tokens(self) -> dict[int, int]:
        """Return, for each schedule, the most tokens per rank that fit: bytes are proportional to tokens."""
        return {kind: int(self.memory_bytes // self.needs_bytes(kind, 1)) for kind in self.choices}

    @cached_property
    def choices(self) -> tuple[int, ...]:
        """Return the schedules that the heads allow."""
        return (RING, ALLGATHER) if self.ulysses_refusal else (RING, ULYSSES, ALLGATHER)

    def best(self, c: int, B: float) -> int:
        """Return the schedule that exposes least of those that fit; HIDDEN if the ring exposes nothing."""
        fitting = [kind for kind in self.choices if c <= self.most_tokens[kind]]
        if not fitting:
            return NOTHING
        if RING in fitting and self.exposed(RING, c, B) == 0:
            return HIDDEN
        return min(fitting, key=lambda kind: self.exposed(kind, c, B))


@dataclass(frozen=True)
class Machine:
    """A known machine's link, and the tokens per rank from which a ring hides on it."""

    name: str
    bytes_per_s: float
    threshold: float


def question(
    sizes: Attention | None = None,
    machine: str | Hardware = "h100",
    P: int = 8,
    latency_s: float | None = None,
    memory_bytes: float | None = None,
) -> Question:
    """Return the question for ranks of `machine`: its dense peak, its inner link's latency, its whole memory.

    Raises: CostError for fewer than two ranks, an unknown machine, or a dtype that it does not compute in.
    """
    sizes = sizes or Attention()
    if not isinstance(P, int) or P < 2:
        raise CostError("P >= 2 ranks, an integer", f"P={P!r}")
    known = machine if isinstance(machine, Hardware) else hardware(machine)
    latency = known.inside.latency_s if latency_s is None else latency_s
    memory = known.memory_bytes if memory_bytes is None else memory_bytes
    if not (latency >= 0 and memory > 0):
        raise CostError("latency_s >= 0 and memory_bytes > 0", f"{latency!r} and {memory!r}")
    return Question(sizes, P, known.peak(sizes.dtype), latency, memory)


def machines(asked: Question) -> list[Machine]:
    """Return the known machines' links by falling bandwidth, each with its own peak and latency."""
    found = [
        Machine(
            known.name,
            known.link.bytes_per_s,
            least_tokens_hidden(known.F, known.link.bytes_per_s, asked.sizes, latency_s=known.link.latency_s),
        )
        for known in known_links(asked.sizes.dtype)
    ]
    return sorted(found, key=lambda it: (-it.bytes_per_s, it.threshold))


@lru_cache(maxsize=8)
def grid(asked: Question, columns: int = 120, rows: int = 90) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens per rank (columns,), bandwidths (rows,), and the best schedule [row, column]."""
    tokens = np.unique(np.geomspace(*TOKENS, columns).round().astype(int))
    rates = np.geomspace(*BANDWIDTH, rows)
    return tokens, rates, np.array([[asked.best(int(c), float(B)) for c in tokens] for B in rates])
