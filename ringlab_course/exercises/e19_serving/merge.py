"""Checks of 19.merge: the merge of the partials of all ranks at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ringlab_course.checking.answers import expect_arrays
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.numbers import fold
from ringlab_course.checking.wrong_answers import misconceptions_of

NAMES = ("out", "lse")
BOUND = 2e-6
"""The allowed relative error: that of a float32 sum of a few partials of numbers near 1."""
Answer = tuple[np.ndarray, np.ndarray]


def _partials(
    rng: np.random.Generator, R: int, H: int = 2, n: int = 3, D: int = 4, size: float = 1.0
) -> Answer:
    outs = rng.standard_normal((R, H, n, D)).astype(np.float32)
    lses = (size * rng.standard_normal((R, H, n))).astype(np.float32)
    return outs, lses


def _answers(subject: Any, cases: Iterable[tuple[str, Answer]]) -> Iterator[Answered]:
    for text, (outs, lses) in cases:
        right = fold(zip(outs.astype(np.float64), lses.astype(np.float64), strict=True))
        inputs = torch.from_numpy(outs), torch.from_numpy(lses)
        got = expect_arrays(subject.call(*inputs), right, NAMES)
        text = f"{len(outs)} partials{text}"
        if any(np.isnan(x).any() for x in got) or np.isposinf(got[1]).any():
            empty = np.isneginf(lses).any()
            raise STAGE.misconception("nan_without_keys" if empty else "overflows").failure(text)
        size = np.abs(lses[np.isfinite(lses)]).max(
            initial=1.0
        )  # the rounding error of an lse is proportional to its size
        yield Answered(got, right, BOUND * max(1.0, float(size)), names=NAMES, text=text)


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    cases = [("", _partials(rng, R)) for R in (1, 2, 3, 8)]
    compare_all(_answers(subject, cases))


def _check_empty(subject: Any, rng: np.random.Generator) -> None:
    """Check answers for rows that see no key on some ranks, and for rows that see no key on any rank."""
    outs, lses = _partials(rng, 4)
    lses[1, 0], lses[3] = -np.inf, -np.inf
    nothing = _partials(rng, 3)
    nothing[1][:, 1] = -np.inf
    for part in ((outs, lses), nothing):
        part[0][np.isneginf(part[1])] = 0.0
    compare_all(_answers(subject, [(", some without keys", (outs, lses)), (", rows without keys", nothing)]))


def _check_large(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on lse of some hundreds, whose exponentials overflow or are all zero."""
    cases = []
    for lift in (300.0, -300.0):
        outs, lses = _partials(rng, 3)
        cases.append(
            (f", lse near {lift:g}", (outs, (lses + np.float32(lift + rng.random())).astype(np.float32)))
        )
    compare_all(_answers(subject, cases))


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
    misconceptions=misconceptions_of("19.merge"),
    checks=(
        Check("values", 1, "visible", "one partial and several", _check_values),
        Check("empty", 1, "visible", "ranks without keys, and rows without any", _check_empty),
        Check("large", 1, "visible", "lse far from zero", _check_large),
    ),
)  # fmt: skip
