"""Traces of rings that are held up by something: ringlab's own ring on the cost simulator, with a fault put in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ringlab import layout as layouts
from ringlab.comm.clocked.recording import Recording
from ringlab.comm.clocked.timeline import Links
from ringlab.comm.trace import Compute, Exchange
from ringlab.cost.flops import layout_work
from ringlab.cost.hardware import hardware
from ringlab.cost.simulate import Network, simulate
from ringlab.cost.sizes import Attention

Trace = dict[str, Any]
EVERY = -1
"""Stands for every step."""
TOKENS = 1024
"""Per rank."""


@dataclass(frozen=True)
class Fault:
    """What holds a ring up: "compute" on `rank`, in `step` or EVERY; "link" out of `rank`; "sound", nothing."""

    what: str = "sound"
    rank: int = -1
    step: int = -1
    times: float = 1.0

    @property
    def answer(self) -> tuple[str, int, int]:
        """Return what is right to say of it."""
        return self.what, self.rank, self.step


@dataclass(frozen=True)
class SlowLink:
    """A network whose link from one rank to the next takes `times` as long as it should."""

    network: Links
    rank: int
    times: float

    def bytes_per_s(self, source: np.ndarray, to: np.ndarray) -> np.ndarray:
        """Return bytes per second of each pair's link."""
        slow = np.asarray(source) == self.rank
        return self.network.bytes_per_s(source, to) / np.where(slow, self.times, 1.0)

    def latency_s(self, source: np.ndarray, to: np.ndarray) -> np.ndarray:
        """Return the seconds that a link adds."""
        return self.network.latency_s(source, to)

    def port(self, source: np.ndarray, to: np.ndarray) -> np.ndarray:
        """Return the port that is used."""
        return self.network.port(source, to)


@cache
def recording(P: int, layout: str) -> Recording:
    """Return what the ranks of a causal ring do under a layout."""
    sizes = Attention(1, 16, 16, 128, "bfloat16", causal=True)
    return simulate(sizes, getattr(layouts, layout)(P * TOKENS, P), hardware("a100")).recording


def trace(
    fault: Fault, P: int, layout: str, hop: float, seed: int, clocks: np.ndarray | None = None
) -> Trace:
    """Return the arrays that a learner gets of one run; a few percent of noise on every computation.

    hop: the time of a sound hop over that of a whole block. clocks: what each rank's clock says when all begin, 0 if None.
    """
    made = recording(P, layout)
    seconds = made.clock(Network.free(P), jitter=0.02, seed=seed).seconds.reshape(P, P).copy()
    block_s = float(np.median(seconds[-1]))
    sent = int(made.program.sent_bytes[0])
    hop_s = hop * block_s
    network: Links = Network.uniform(P, sent / hop_s)
    if fault.what == "compute":
        seconds[fault.rank, slice(None) if fault.step == EVERY else fault.step] *= fault.times
    elif fault.what == "link":
        network = SlowLink(network, fault.rank, fault.times)
    timeline = made.timeline(network, seconds.ravel())
    begin, end = np.zeros((P, P)), np.zeros((P, P))
    posted, done = np.zeros((P, P - 1)), np.zeros((P, P - 1))
    for event in timeline.trace().events:
        if isinstance(event, Compute):
            step = int(event.label.split()[-1])
            begin[event.rank, step], end[event.rank, step] = event.start, event.end
        elif isinstance(event, Exchange):
            posted[event.rank, event.index], done[event.rank, event.index] = event.posted, event.done
    links = hop_s * np.where(np.arange(P) == fault.rank, fault.times if fault.what == "link" else 1.0, 1.0)
    arrived = np.maximum(posted, np.roll(posted, 1, axis=0)) + np.roll(links, 1)[:, None]
    clock = np.zeros(P) if clocks is None else clocks
    times = {"begin": begin, "end": end, "posted": posted, "arrived": arrived, "done": done}
    work = layout_work(getattr(layouts, layout)(P * TOKENS, P), tile=(128, 128))
    return {
        "work": work.astype(np.float64),
        "hop_s": hop_s,
        "clock": clock,
        **{name: value + clock[:, None] for name, value in times.items()},
    }
