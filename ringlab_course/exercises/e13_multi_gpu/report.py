"""Checks of 13.report: efficiency at equal work, MFU and the used share of a link, from one record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ringlab_course.checking.answers import expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.numbers import expect_number
from ringlab_course.checking.wrong_answers import misconceptions_of

NAMES = ("efficiency", "mfu", "link")
BOUND = 1e-3
"""The allowed relative error. With thousands of tokens, S²/2 pairs instead of S(S + 1)/2 are within it."""


@dataclass(frozen=True)
class Record:
    """A lab's results for one process and for a ring, and figures from two data sheets."""

    tokens: tuple[int, int] = (8192, 8192)
    seconds: tuple[float, float] = (0.008, 0.0025)
    ranks: int = 4
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    element_bytes: int = 2
    causal: bool = False
    backward: bool = False
    hop_s: float = 4e-4
    peak_tflops: float = 100.0
    sparse: bool = False
    link_gb_per_s: float = 250.0
    directions: int = 1

    @property
    def text(self) -> str:
        one, ring = self.tokens
        mask = "causal" if self.causal else "no mask"
        pass_ = "forward and backward" if self.backward else "forward"
        return f"{one:,} tokens on one process, {ring:,} on {self.ranks} ranks, {mask}, {pass_}, heads {self.heads}/{self.kv_heads}"


def truth(run: Record) -> tuple[float, float, float]:
    """Return (efficiency, mfu, link) of a record, the right answer of this stage."""
    (one, ring), (one_s, ring_s) = (_pairs(S, run.causal) for S in run.tokens), run.seconds
    flops = ring * (12 if run.backward else 4) * run.heads * run.head_dim
    peak = run.peak_tflops * 1e12 / (2 if run.sparse else 1)
    hop_bytes = 2 * run.tokens[1] / run.ranks * run.kv_heads * run.head_dim * run.element_bytes
    rate = run.link_gb_per_s * 1e9 / run.directions
    return (
        one_s * ring / one / (run.ranks * ring_s),
        flops / ring_s / (run.ranks * peak),
        hop_bytes / run.hop_s / rate,
    )


def _pairs(S: int, causal: bool) -> float:
    return S * (S + 1) / 2 if causal else S * S


def _compare(subject: Any, rng: np.random.Generator, runs: Iterable[Record], name: str) -> None:
    """Compare the number called `name` with the right one, on records like `runs` with other times and rates."""
    place = NAMES.index(name)

    def read(answer: Any) -> float:
        return expect_number(expect_tuple(answer, NAMES)[place])

    def asked() -> Iterator[Answered]:
        for like in runs:
            run = _near(like, rng)
            answer, right = np.asarray(read(subject.call(asdict(run)))), np.asarray(truth(run)[place])
            yield Answered((answer,), (right,), BOUND, names=(name,), text=run.text)

    compare_all(asked(), read=read)


def _near(run: Record, rng: np.random.Generator) -> Record:
    one, ring, hop, peak, link = (round(float(x), 3) for x in rng.uniform(0.8, 1.25, 5))
    return replace(
        run,
        seconds=(one * run.seconds[0], ring * run.seconds[1]),
        hop_s=hop * run.hop_s,
        peak_tflops=peak * run.peak_tflops,
        link_gb_per_s=link * run.link_gb_per_s,
    )


STRONG, WEAK = Record(), Record(tokens=(8192, 32768), seconds=(0.008, 0.036), hop_s=1.6e-3)
DEEP = Record(tokens=(4096, 16384), seconds=(0.0034, 0.016), causal=True, backward=True, kv_heads=4)


def _check_efficiency(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on strong scaling, weak scaling, and a scaling between the two."""
    between = Record(tokens=(4096, 8192), seconds=(0.0011, 0.0006), ranks=8, causal=True)
    _compare(subject, rng, (STRONG, WEAK, between), "efficiency")


def _check_mfu(subject: Any, rng: np.random.Generator) -> None:
    _compare(subject, rng, (STRONG, replace(STRONG, causal=True), DEEP), "mfu")


def _check_link(subject: Any, rng: np.random.Generator) -> None:
    _compare(subject, rng, (STRONG, DEEP, replace(WEAK, ranks=8, element_bytes=4)), "link")


def _check_sheets(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on records with sparse peaks and rates for both directions, as data sheets state them."""
    for name in ("mfu", "link"):
        runs = [
            replace(
                DEEP,
                # There are six query heads per K/V head. With four, an answer that counts K/V heads would be
                # off by a factor of four, as is an answer that doubles the peak instead of halving it.
                heads=24,
                sparse=True,
                directions=2,
                peak_tflops=float(rng.uniform(50, 2000)),
                link_gb_per_s=float(rng.uniform(50, 2000)),
                ranks=int(ranks),
            )
            for ranks in rng.choice([2, 8, 16], 2, replace=False)
        ]
        _compare(subject, rng, [*runs, STRONG], name)


STAGE = Stage(
    id="13.report",
    function="report",
    title="An honest report",
    hints=(
        "The ring's sequence may be longer than that of one process. How many pairs does each of them have? How long would P "
        "processes take for the ring's pairs if nothing were lost?",
        "Count the visible pairs of both sequences. Efficiency: the one process's seconds, times the ratio of the work, over P, "
        "over the ring's seconds. MFU: the model's FLOPs per second over P dense peaks. Link: the bytes of one rank's K and V "
        "per second over the rate of one direction.",
        r"$\dfrac{T_1\,W_P/W_1}{P\,T_P},\quad \dfrac{(4\text{ or }12)\,D\,H\cdot\text{pairs}}{T_P\,P\,F},\quad \dfrac{2\,(S/P)\,K\,D\,e}{t_\text{hop}\,B}$",
    ),
    misconceptions=misconceptions_of("13.report"),
    checks=(
        Check("efficiency", 2, "visible", "one sequence for both, a longer one for the ring", _check_efficiency),
        Check("mfu", 2, "visible", "with and without a mask, with a backward", _check_mfu),
        Check("link", 1, "visible", "shared heads, float32", _check_link),
        Check("sheets", 1, "visible", "sparse peaks, and rates that add up both directions", _check_sheets),
    ),
)  # fmt: skip
