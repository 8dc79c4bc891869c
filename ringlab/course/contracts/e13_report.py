"""Checks of 13.report: efficiency on the same work, MFU, and the share of a link, out of one record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ringlab.course.answers import expect_tuple
from ringlab.course.contract import Check, Misconception, Stage
from ringlab.course.contracts.e06_numbers import expect_number
from ringlab.course.contracts.e07_explain import Answered, compare_all

NAMES = ("efficiency", "mfu", "link")
BOUND = 1e-3
"""Relative: S²/2 for S(S + 1)/2 pairs is fair, at thousands of tokens."""


@dataclass(frozen=True)
class Record:
    """What a lab's result says of one process and of a ring, and two data sheets."""

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


@dataclass(frozen=True)
class Way:
    """How somebody counts; the defaults are right. Each function takes a Record."""

    pairs: Callable[[int, bool], float] = lambda S, causal: S * (S + 1) / 2 if causal else S * S
    per_pair: Callable[[Record], float] = lambda run: 14 if run.backward else 4
    flop_heads: Callable[[Record], int] = lambda run: run.heads
    devices: Callable[[Record], int] = lambda run: run.ranks
    peak: Callable[[Record], float] = lambda run: run.peak_tflops * 1e12 / (2 if run.sparse else 1)
    hop_bytes: Callable[[Record], float] = lambda run: (
        2 * run.tokens[1] / run.ranks * run.kv_heads * run.head_dim * run.element_bytes
    )
    rate: Callable[[Record], float] = lambda run: run.link_gb_per_s * 1e9 / run.directions

    def efficiency(self, run: Record) -> float:
        """Return the time of a perfect split of the ring's work over the ring's."""
        one, ring = (self.pairs(S, run.causal) for S in run.tokens)
        return run.seconds[0] * ring / one / (run.ranks * run.seconds[1])

    def mfu(self, run: Record) -> float:
        """Return the FLOP/s of visible pairs over the peak of all devices."""
        flops = (
            self.pairs(run.tokens[1], run.causal) * self.per_pair(run) * self.flop_heads(run) * run.head_dim
        )
        return flops / run.seconds[1] / (self.devices(run) * self.peak(run))

    def link(self, run: Record) -> float:
        """Return the bytes of a hop per second over what the link offers in one direction."""
        return self.hop_bytes(run) / run.hop_s / self.rate(run)


RIGHT = Way()


def truth(run: Record) -> tuple[float, float, float]:
    """Return (efficiency, mfu, link) of a record."""
    return RIGHT.efficiency(run), RIGHT.mfu(run), RIGHT.link(run)


EFFICIENCY = (
    Misconception(
        "equal_local",
        "You compared the times as they are, as if a rank of the ring did as much as the one process. Twice the sequence is four times the pairs: with "
        "as many tokens on every rank, each has P times the work. That is no slow ring.",
        lambda run: run.seconds[0] / run.seconds[1],
    ),
    Misconception(
        "same_sequence",
        "T₁/(P·T_P) holds where both have the same sequence. Here the ring's is longer: its time has to be held against that of the same work.",
        lambda run: run.seconds[0] / run.seconds[1] / run.ranks,
    ),
    Misconception(
        "counts_tokens",
        "You took work to grow as the tokens. Attention's grows as the pairs, quadratically.",
        lambda run: run.seconds[0] * run.tokens[1] / run.tokens[0] / (run.ranks * run.seconds[1]),
    ),
    Misconception(
        "speedup",
        "This is the speed-up. Efficiency is the speed-up by the number of ranks.",
        lambda run: RIGHT.efficiency(run) * run.ranks,
    ),
    Misconception(
        "upside_down",
        "This is the inverse: the ring's time over the perfect one. Efficiency is 1 for a perfect split and falls as the ring gets slower.",
        lambda run: 1 / RIGHT.efficiency(run),
    ),
    Misconception(
        "per_cent",
        "This is in per cent. Return shares: 1 is a perfect split.",
        lambda run: 100 * RIGHT.efficiency(run),
    ),
)  # fmt: skip
MFU = (
    Misconception(
        "counts_masked",
        "You counted hidden pairs as work. Nobody computes them, so FLOP/s that count them are up to twice too high: a causal mask leaves S(S + 1)/2 pairs.",
        Way(pairs=lambda S, causal: S * S).mfu,
    ),
    Misconception(
        "forgets_backward",
        "The time is that of forward and backward, the FLOPs are those of the forward. Backward takes five products to the forward's two: 4·D and 10·D a pair.",
        Way(per_pair=lambda run: 4).mfu,
    ),
    Misconception(
        "backward_only",
        "The FLOPs are those of the backward alone. The time is that of forward and backward: 4·D and 10·D a pair.",
        Way(per_pair=lambda run: 10 if run.backward else 4).mfu,
    ),
    Misconception(
        "twice_the_forward",
        "You took the backward for twice the forward. It computes the scores once more, since nobody kept them: five products, 10·D a pair.",
        Way(per_pair=lambda run: 12 if run.backward else 4).mfu,
    ),
    Misconception(
        "always_masked",
        "You counted half of the pairs where nothing is masked: S(S + 1)/2 is what a causal mask leaves, S² is all.",
        Way(pairs=lambda S, causal: S * (S + 1) / 2).mfu,
    ),
    Misconception(
        "work_of_one",
        "These are the FLOPs of the one process's sequence over the ring's seconds. In those it went through its own, the longer one.",
        lambda run: RIGHT.mfu(replace(run, tokens=(run.tokens[0], run.tokens[0]))),
    ),
    Misconception(
        "peak_of_one",
        "You held all ranks' FLOPs against the peak of one device. There are P of them.",
        Way(devices=lambda run: 1).mfu,
    ),
    Misconception(
        "multiply_adds",
        "A multiply-add is two FLOPs, for you and for the data sheet. You counted it as one.",
        Way(per_pair=lambda run: RIGHT.per_pair(run) / 2).mfu,
    ),
    Misconception(
        "flops_of_kv_heads",
        "Work is that of the query heads. Shared K/V heads save bytes and memory, and not a single FLOP.",
        Way(flop_heads=lambda run: run.kv_heads).mfu,
    ),
    Misconception(
        "sparse_peak",
        "The data sheet's number is for sparse matrices, half of whose elements are zero by construction. Attention's are dense: half of it is the peak.",
        Way(peak=lambda run: run.peak_tflops * 1e12).mfu,
    ),
)  # fmt: skip
LINK = (
    Misconception(
        "keys_only",
        "Half of the bytes are missing: K and V travel, both.",
        Way(hop_bytes=lambda run: RIGHT.hop_bytes(run) / 2).link,
    ),
    Misconception(
        "bytes_of_query_heads",
        "You sent as many heads as there are query heads. K and V have `kv_heads`.",
        Way(hop_bytes=lambda run: RIGHT.hop_bytes(run) * run.heads / run.kv_heads).link,
    ),
    Misconception(
        "whole_sequence",
        "A hop carries one rank's share of K and V, not the whole sequence.",
        Way(hop_bytes=lambda run: RIGHT.hop_bytes(run) * run.ranks).link,
    ),
    Misconception(
        "binary_giga",
        "A data sheet's GB is 10⁹ bytes. With 2³⁰ the link looks 7% less used than it is.",
        Way(rate=lambda run: RIGHT.rate(run) * 2**30 / 1e9).link,
    ),
    Misconception(
        "both_directions",
        "The data sheet adds up both directions. A hop goes one way, and has half of it.",
        Way(rate=lambda run: run.link_gb_per_s * 1e9).link,
    ),
    Misconception(
        "in_bits",
        "You took the link's rate for gigabits. GB is 10⁹ bytes, and a hop is in bytes too.",
        Way(rate=lambda run: RIGHT.rate(run) / 8).link,
    ),
)  # fmt: skip
PARTS = dict(zip(NAMES, (EFFICIENCY, MFU, LINK), strict=True))


def _compare(subject: Any, runs: Iterable[Record], name: str) -> None:
    """Compare one of the three numbers on all records."""
    place = NAMES.index(name)
    mistakes: Sequence[Misconception] = PARTS[name]

    def asked() -> Iterator[Answered]:
        for run in runs:
            found = expect_tuple(subject.call(asdict(run)), NAMES)[place]
            answer, right = np.asarray(expect_number(found)), np.asarray(truth(run)[place])
            yield Answered((answer,), (right,), BOUND, (run,), (name,), run.text)

    compare_all(asked(), [replace(m, imitate=_as_part(m.imitate)) for m in mistakes])


def _as_part(imitate: Callable[..., Any] | None) -> Callable[..., Any]:
    def imitated(run: Record) -> tuple[np.ndarray]:
        assert imitate is not None
        return (np.asarray(imitate(run)),)

    return imitated


STRONG, WEAK = Record(), Record(tokens=(8192, 32768), seconds=(0.008, 0.036), hop_s=1.6e-3)
DEEP = Record(tokens=(4096, 16384), seconds=(0.0034, 0.016), causal=True, backward=True, kv_heads=4)


def _check_efficiency(subject: Any, rng: np.random.Generator) -> None:
    """Strong, weak, and in between."""
    between = Record(tokens=(4096, 8192), seconds=(0.0011, 0.0006), ranks=8, causal=True)
    _compare(subject, (STRONG, WEAK, between), "efficiency")


def _check_mfu(subject: Any, rng: np.random.Generator) -> None:
    _compare(subject, (STRONG, replace(STRONG, causal=True), DEEP), "mfu")


def _check_link(subject: Any, rng: np.random.Generator) -> None:
    _compare(subject, (STRONG, DEEP, replace(WEAK, ranks=8, element_bytes=4)), "link")


def _check_sheets(subject: Any, rng: np.random.Generator) -> None:
    """Figures as data sheets state them, beside others."""
    for name in ("mfu", "link"):
        runs = [
            replace(
                DEEP,
                sparse=True,
                directions=2,
                peak_tflops=float(rng.uniform(50, 2000)),
                link_gb_per_s=float(rng.uniform(50, 2000)),
                ranks=int(ranks),
            )
            for ranks in rng.choice([2, 8, 16], 2, replace=False)
        ]
        _compare(subject, [*runs, STRONG], name)


STAGE = Stage(
    id="13.report",
    function="report",
    title="An honest report",
    hints=(
        "The ring's sequence may be longer than that of one process. How much work is each, in pairs? How long would P perfect helpers take for the ring's?",
        "Count visible pairs of both sequences. Efficiency: the one process's seconds, times the ratio of work, over P, over the ring's seconds. MFU: FLOPs of "
        "visible pairs per second over P dense peaks. Link: bytes of one rank's K and V per second over one direction's rate.",
        r"$\dfrac{T_1\,W_P/W_1}{P\,T_P},\quad \dfrac{(4\text{ or }14)\,D\,H\cdot\text{pairs}}{T_P\,P\,F},\quad \dfrac{2\,(S/P)\,K\,D\,e}{t_\text{hop}\,B}$",
    ),
    misconceptions=(*EFFICIENCY, *MFU, *LINK),
    checks=(
        Check("efficiency", 2, "visible", "one sequence for both, a longer one for the ring", _check_efficiency,
              tuple(m.name for m in EFFICIENCY)),
        Check("mfu", 2, "visible", "with and without a mask, with a backward", _check_mfu,
              ("counts_masked", "forgets_backward", "backward_only", "twice_the_forward", "always_masked", "work_of_one", "peak_of_one", "multiply_adds", "flops_of_kv_heads")),
        Check("link", 1, "visible", "shared heads, float32", _check_link,
              ("keys_only", "bytes_of_query_heads", "whole_sequence", "binary_giga", "in_bits")),
        Check("sheets", 1, "stress", "sparse peaks, and rates of both directions together", _check_sheets, ("sparse_peak", "both_directions")),
    ),
)  # fmt: skip
