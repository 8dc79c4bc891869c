"""Checks of 19.merge: the merge of the partials of all ranks at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ringlab_course.checking.answers import expect_array, expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.numbers import fold
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("19.merge")

NAMES = ("out", "lse")
BOUND = 2e-6
"""Relative: a float32 sum of some partials of numbers near 1."""
Answer = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class How:
    """How partials are merged; as it stands, rightly."""

    base: float = float(np.e)
    lse: str = "logaddexp"
    normalise: bool = True

    def __call__(self, outs: Any, lses: Any) -> Answer:
        """Return (out, lse) of partials along the first axis."""
        o, x = np.asarray(outs, np.float64), np.asarray(lses, np.float64)
        if self == RIGHT:
            return fold(zip(o, x, strict=True))
        top = np.max(x, axis=0)
        top = np.where(np.isneginf(top), 0.0, top)
        weights = self.base ** (x - top)
        total = weights.sum(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = weights / np.where(total > 0, total, 1.0) if self.normalise else weights
            joined = top + np.log(total) / np.log(self.base)
        told = {"logaddexp": joined, "sum": x.sum(0), "max": x.max(0)}[self.lse]
        return (shares[..., None] * o).sum(0), told


RIGHT = How()


def _averages(outs: Any, lses: Any) -> Answer:
    return np.asarray(outs, np.float64).mean(0), RIGHT(outs, lses)[1]


MISTAKES = (
    mistake("averages_the_outs", _averages),
    mistake("base_two", How(base=2.0)),
    mistake("adds_the_lses", How(lse="sum")),
    mistake("takes_the_largest_lse", How(lse="max")),
    mistake("does_not_normalise", How(normalise=False)),
    mistake("overflows"),
    mistake("nan_without_keys"),
)
NAMED = {each.name: each for each in MISTAKES}


def _partials(
    rng: np.random.Generator, R: int, H: int = 2, n: int = 3, D: int = 4, size: float = 1.0
) -> Answer:
    outs = rng.standard_normal((R, H, n, D)).astype(np.float32)
    lses = (size * rng.standard_normal((R, H, n))).astype(np.float32)
    return outs, lses


def _answers(subject: Any, cases: Iterable[tuple[str, Answer]]) -> Iterator[Answered]:
    for text, (outs, lses) in cases:
        right = RIGHT(outs, lses)
        inputs = torch.from_numpy(outs), torch.from_numpy(lses)
        parts = expect_tuple(subject.call(*inputs), NAMES)
        got = tuple(
            expect_array(part, x.shape, name=name) for name, part, x in zip(NAMES, parts, right, strict=True)
        )
        text = f"{len(outs)} partials{text}"
        if any(np.isnan(x).any() for x in got) or np.isposinf(got[1]).any():
            empty = np.isneginf(lses).any()
            raise NAMED["nan_without_keys" if empty else "overflows"].failure(text)
        size = np.abs(lses[np.isfinite(lses)]).max(
            initial=1.0
        )  # an lse of this size is rounded by its share of it
        yield Answered(got, right, BOUND * max(1.0, float(size)), inputs, NAMES, text)


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    cases = [("", _partials(rng, R)) for R in (1, 2, 3, 8)]
    compare_all(_answers(subject, cases), MISTAKES)


def _check_empty(subject: Any, rng: np.random.Generator) -> None:
    """Ranks without a key that a row sees, for some rows; and rows that see no key at all."""
    outs, lses = _partials(rng, 4)
    lses[1, 0], lses[3] = -np.inf, -np.inf
    nothing = _partials(rng, 3)
    nothing[1][:, 1] = -np.inf
    for part in ((outs, lses), nothing):
        part[0][np.isneginf(part[1])] = 0.0
    compare_all(
        _answers(subject, [(", some without keys", (outs, lses)), (", rows without keys", nothing)]), MISTAKES
    )


def _check_large(subject: Any, rng: np.random.Generator) -> None:
    """lse of some hundreds, whose exponentials overflow, or are all zero."""
    cases = []
    for lift in (300.0, -300.0):
        outs, lses = _partials(rng, 3)
        cases.append(
            (f", lse near {lift:g}", (outs, (lses + np.float32(lift + rng.random())).astype(np.float32)))
        )
    compare_all(_answers(subject, cases), MISTAKES)


STAGE = Stage(
    id="19.merge",
    function="merge_all",
    title="The merge of all ranks",
    hints=(
        "lse is the logarithm of a sum of exponentials. Which share of the whole sum does each rank have?",
        "Take the largest lse of each row off before you take exponentials, but 0 where it is −∞. The sum of the exponentials gives "
        "both the shares of the outs and, with its logarithm, the lse.",
        r"$L = m + \ln \sum_r e^{L_r - m}$, $\;\mathrm{out} = \sum_r e^{L_r - L} \mathrm{out}_r$, $\;m = \max_r L_r$; "
        r"where all $L_r = -\infty$: $(0, -\infty)$",
    ),
    misconceptions=MISTAKES,
    checks=(
        Check("values", 1, "visible", "one partial and several", _check_values),
        Check("empty", 1, "visible", "ranks without keys, and rows without any", _check_empty),
        Check("large", 1, "visible", "lse far from zero", _check_large),
    ),
)  # fmt: skip
