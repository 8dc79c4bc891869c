"""Checks of 13.straggler: from a trace of all ranks, which rank or link delays the ring, and in which step.

The traces come from ringlab's own ring on the cost simulator, with a fault added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from ringlab_course.checking.answers import expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered
from ringlab_course.checking.exact import compare_exactly, expect_integer
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.wrong_answers import misconceptions_of

Trace = dict[str, Any]
EVERY = -1
"""The step of a fault that occurs in every step."""
TOKENS = 1024
"""The tokens of each rank."""


@dataclass(frozen=True)
class Fault:
    """A fault of a ring: "compute" on `rank` in `step`, or "link" out of `rank`. "sound" means no fault."""

    what: str = "sound"
    rank: int = -1
    step: int = -1
    times: float = 1.0

    @property
    def answer(self) -> tuple[str, int, int]:
        """Return the right answer about this fault."""
        return self.what, self.rank, self.step


@dataclass(frozen=True)
class SlowLink:
    """A network in which the link from `rank` to the next rank takes `times` as long as it should."""

    network: Links
    rank: int
    times: float

    def bytes_per_s(self, source: np.ndarray, to: np.ndarray) -> np.ndarray:
        """Return the bytes per second of the link of each pair."""
        slow = np.asarray(source) == self.rank
        return self.network.bytes_per_s(source, to) / np.where(slow, self.times, 1.0)

    def latency_s(self, source: np.ndarray, to: np.ndarray) -> np.ndarray:
        """Return the latency of the link of each pair, in seconds."""
        return self.network.latency_s(source, to)

    def port(self, source: np.ndarray, to: np.ndarray) -> np.ndarray:
        """Return the port that the message of each pair uses."""
        return self.network.port(source, to)


@cache
def recording(P: int, layout: str) -> Recording:
    """Return the recorded program of a causal ring under a layout."""
    sizes = Attention(1, 16, 16, 128, "bfloat16", causal=True)
    return simulate(sizes, getattr(layouts, layout)(P * TOKENS, P), hardware("a100")).recording


def trace(
    fault: Fault, P: int, layout: str, hop: float, seed: int, clocks: np.ndarray | None = None
) -> Trace:
    """Return the arrays of one run as a learner gets them, with a few percent of noise on every computation.

    hop: the time of a sound hop, divided by that of a whole block. clocks: the time on each rank's clock when
    the run begins, 0 if None.
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


Array = np.ndarray
Answer = tuple[str, int, int]
SOUND: Answer = ("sound", -1, -1)
WORDS = ("compute", "link", "sound")
NAMES = ("what", "rank", "step")


def rates(given: Trace) -> Array:
    """Return the seconds per pair by (rank, step), divided by their median; NaN where nothing is computed."""
    seconds = given["end"] - given["begin"]
    rate = np.where(given["work"] > 0, seconds / np.maximum(given["work"], 1), np.nan)
    return np.asarray(rate / np.nanmedian(rate))


def _read(answer: Any) -> Answer:
    what, rank, step = expect_tuple(answer, NAMES)
    if not isinstance(what, str) or what not in WORDS:
        raise Failure(f"`what` should be one of {', '.join(WORDS)}.", f"got {str(what)[:40]!r}")
    return what, expect_integer(rank, "rank"), expect_integer(step, "step")


Patient = tuple[Fault, int, str, float]
"""A fault, the number of ranks, the layout, and the time of a sound hop divided by that of a whole block."""


def _compare(
    subject: Any, patients: Iterable[Patient], rng: np.random.Generator, *, drift: float = 0.0
) -> None:
    seen: list[Answered] = []

    def asked() -> Iterator[Answered]:
        for fault, P, layout, hop in patients:
            clocks = np.sort(rng.uniform(-drift, drift, P))  # the clock of rank 0 is behind all others
            given = trace(fault, P, layout, hop, int(rng.integers(2**31)), clocks)
            text = _told(given, P, layout)
            case = Answered(_read(subject.call(given)), fault.answer, names=NAMES, text=text)
            seen.append(case)
            yield case

    try:
        compare_exactly(asked(), _read)
    except Failure as failure:
        wrong = [case for case in seen if case.answer != case.truth]
        if wrong and all(case.truth == SOUND for case in wrong):
            failure.otherwise = STAGE.misconception("never_sound").failure(failure.counterexample)
        raise


def _told(given: Trace, P: int, layout: str) -> str:
    rate = ", ".join(f"{x:.2f}" for x in np.nanmax(rates(given), axis=1))
    return f"{layout} on {P} ranks; by rank, the most seconds per pair, in medians: {rate}; a sound hop: {given['hop_s'] * 1e6:.0f} µs"


def _check_compute(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on a rank that is slow in all steps or in one step, and on runs without a fault."""
    _compare(subject, [
        (Fault("compute", 2, EVERY, 2.0), 4, "zigzag", 0.5),
        (Fault("compute", 1, 2, 2.5), 4, "zigzag", 0.5),
        (Fault(), 4, "zigzag", 0.5),
        (Fault("compute", 2, EVERY, 1.8), 4, "contiguous", 0.3),
        (Fault("compute", 2, 0, 1.8), 4, "contiguous", 0.3),
        (Fault(), 4, "contiguous", 0.3),
    ], rng)  # fmt: skip


def _check_link(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on slow links and late ranks.

    There is an exposed link, a hidden one, a late rank with sound links, and no fault. In the contiguous
    layout, the two ends of a link post at different times.
    """
    _compare(subject, [
        (Fault("link", 1, EVERY, 6.0), 4, "zigzag", 0.5),
        (Fault("link", 3, EVERY, 1.7), 4, "zigzag", 0.4),
        (Fault("compute", 0, EVERY, 2.0), 4, "zigzag", 0.5),
        (Fault("compute", 3, 1, 2.0), 4, "zigzag", 0.5),
        (Fault(), 4, "zigzag", 0.5),
        (Fault(), 6, "contiguous", 0.3),
        (Fault("link", 2, EVERY, 5.0), 6, "contiguous", 0.3),
    ], rng)  # fmt: skip


def _check_clocks(subject: Any, rng: np.random.Generator) -> None:
    """Check answers with clocks that differ by many times the length of a step.

    The sender of the slow link is first ahead of its receiver, then behind it.
    """
    _compare(subject, [
        (Fault("link", 3, EVERY, 4.0), 4, "zigzag", 0.5),
        (Fault("link", 1, EVERY, 4.0), 4, "zigzag", 0.5),
        (Fault(), 4, "zigzag", 0.5),
        (Fault("compute", 3, EVERY, 2.0), 5, "zigzag", 0.5),
    ], rng, drift=0.1)  # fmt: skip


def _check_any(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on random ranks, links and steps on other numbers of ranks."""
    for P in (3, 6):
        rank, step = int(rng.integers(P)), int(rng.integers(P))
        times = float(rng.uniform(1.8, 4.0))
        _compare(subject, [
            (Fault("compute", rank, EVERY, times), P, "zigzag", 0.4),
            (Fault("compute", rank, step, times), P, "zigzag", 0.4),
            (Fault("link", rank, EVERY, times), P, "zigzag", 0.4),
            (Fault("compute", P + 1, EVERY, times), P + 2, "contiguous", 0.4),
            (Fault(), P + 2, "contiguous", 0.4),
        ], rng, drift=0.01)  # fmt: skip


STAGE = Stage(
    id="13.straggler",
    function="straggler",
    title="Who holds the ring up",
    hints=(
        "Everybody waits for the slowest, so waiting is everywhere. Which two numbers of a trace do not contain somebody else's lateness?",
        "Seconds per pair of each computation, beside the median of all. And of each message the seconds from when *both* ends were posted, beside `hop_s`. "
        "Take each rank's `clock` off first: only then may times of two ranks be subtracted.",
        r"$\text{transfer}_{r,t} = \mathrm{arrived}_{r,t} - \max(\mathrm{posted}_{r-1,t},\, \mathrm{posted}_{r,t})$",
    ),
    misconceptions=misconceptions_of("13.straggler"),
    checks=(
        Check("compute", 2, "visible", "a rank that computes slowly, always or once", _check_compute),
        Check("link", 2, "visible", "a link that is slow, in sight or hidden", _check_link),
        Check("clocks", 1, "visible", "clocks that differ", _check_clocks),
        Check("any", 1, "held-out", "other numbers of ranks, other faults", _check_any),
    ),
)  # fmt: skip
