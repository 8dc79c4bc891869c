"""Checks of 14.loss: each rank's share of a loss that is a mean over the tokens of all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ringlab_course.checking.answers import compare_with, expect_array
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import ROUNDED, Answered, compare_all, compare_suspecting
from ringlab_course.checking.failures import Crashed
from ringlab_course.checking.numbers import random
from ringlab_course.checking.wrong_answers import misconceptions_of
from ringlab_course.exercises.e14_training.shard import IGNORE

VOCABULARY = 5


@dataclass(frozen=True)
class Problem:
    """The logits (B, L, V) and labels (B, L) of every rank."""

    logits: list[torch.Tensor]
    labels: list[torch.Tensor]
    text: str

    @cached_property
    def totals(self) -> list[float]:
        """Return each rank's sum of −log p(label) in float64."""
        pairs = zip(self.logits, self.labels, strict=True)
        return [_total(x.detach().double().numpy(), y.numpy()) for x, y in pairs]

    @cached_property
    def counts(self) -> list[int]:
        """Return how many labels count on each rank."""
        return [int((labels != IGNORE).sum()) for labels in self.labels]

    @property
    def bound(self) -> float:
        """Return the allowed relative error of a float32 answer.

        Each −log p is off by the rounding of its logits.
        """
        size = max(float(x.detach().double().abs().max()) if x.numel() else 0.0 for x in self.logits)
        shares = [total / sum(self.counts) for total in self.totals if total]
        return 16 * float(np.finfo(np.float32).eps) * (1 + size) / min(1.0, *shares)

    def slope(self, rank: int) -> np.ndarray:
        """Return the gradient of a rank's share with respect to its logits.

        It is (softmax − onehot) / N for labels that count, and 0 for others.
        """
        logits, labels = self.logits[rank].detach().double(), self.labels[rank]
        counted = labels != IGNORE
        right = torch.nn.functional.one_hot(labels.masked_fill(~counted, 0), VOCABULARY)
        return ((logits.softmax(-1) - right) * counted[..., None] / sum(self.counts)).numpy()


Slope = tuple[Any, int, Problem, str]
"""The gradient that came back or None, the rank, the problem, and the case in words."""


def _total(logits: np.ndarray, labels: np.ndarray) -> float:
    top = logits.max(axis=-1, keepdims=True)
    logs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    rows, columns = np.nonzero(labels != IGNORE)
    return float(-logs[rows, columns, labels[rows, columns]].sum())


def problem(
    rng: np.random.Generator, kept: Sequence[Sequence[int]], *, size: float = 2.0, narrow: bool = False
) -> Problem:
    """Return a problem of one sequence.

    kept[r] is a pair of numbers: how many tokens rank r has, and how many of its labels count.
    """
    logits, labels = [], []
    for length, valid in kept:
        drawn = random(rng, 1, length, VOCABULARY, size=size)
        logits.append((drawn.bfloat16() if narrow else drawn).requires_grad_())
        own = torch.from_numpy(rng.integers(0, VOCABULARY, (1, length)))
        own[:, torch.from_numpy(rng.permutation(length)[valid:])] = IGNORE
        labels.append(own)
    told = ", ".join(f"{valid} of {length}" for length, valid in kept)
    return Problem(
        logits, labels, f"P={len(kept)}, labels that count: {told}{', bfloat16' if narrow else ''}"
    )


def _results(subject: Any, given: Problem) -> list[Any]:
    try:
        return subject.run_ring(len(given.logits), given.logits, given.labels, gradient=True).results
    except Crashed as crash:
        if 0 in given.counts and re.search(r"DeadlockError|UnreceivedError|PeerDiedError", crash.message):
            sound = problem(np.random.default_rng(0), ((2, 1), (2, 2)))
            # In `sound` every rank has tokens that count. A crash on `sound` has another cause.
            subject.run_ring(2, sound.logits, sound.labels, gradient=True)
            raise STAGE.misconception("leaves_early").failure(
                f"{given.text}\n{crash.counterexample}"
            ) from None
        raise


def _answers(subject: Any, cases: Iterable[Problem], slopes: list[Slope]) -> Iterator[Answered]:
    for given in cases:
        for rank, (answer, slope) in enumerate(_results(subject, given)):
            answer = np.asarray(answer) if isinstance(answer, float) else answer
            got = expect_array(answer, (), name="the share")
            text = f"{given.text}: rank {rank}"
            truth = np.asarray(given.totals[rank] / sum(given.counts))
            if np.isnan(got) and 0 in given.counts:
                raise STAGE.misconception("nan_without_labels").failure(text)
            slopes.append((slope, rank, given, text))
            yield Answered(got, truth, given.bound, names=("the share",), text=text)


def _expect_slopes(slopes: Iterable[Slope]) -> None:
    """Raise Failure unless the right gradient flows through each share.

    In bfloat16, any gradient is enough.
    """
    for slope, rank, given, text in slopes:
        if slope is None:
            raise STAGE.misconception("no_gradient").failure(text)
        if given.logits[rank].dtype != torch.bfloat16:
            right = given.slope(rank)
            compare_with(slope, right, bound=given.bound, names=("the gradient of the share",), case=text)


def _verify(subject: Any, *cases: Problem) -> None:
    slopes: list[Slope] = []
    compare_all(_answers(subject, cases, slopes), read=_shares)
    _expect_slopes(slopes)


def _verify_suspecting(subject: Any, given: Problem, name: str, plausible: Callable[[float], bool]) -> None:
    """Compare one case as `compare_suspecting` does; `name` is that of the suspected mistake."""
    slopes: list[Slope] = []
    answers = list(_answers(subject, [given], slopes))
    compare_suspecting(answers, STAGE.misconception(name), plausible, read=_shares)
    _expect_slopes(slopes)


def _shares(results: Sequence[Any]) -> list[Any]:
    return [share for share, _ in results]


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    _verify(
        subject, *(problem(rng, kept) for kept in (((3, 2),), ((4, 3), (4, 1)), ((4, 3), (4, 1), (4, 2))))
    )


def _check_uneven(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, *(problem(rng, kept) for kept in (((4, 0), (4, 3)), ((3, 2), (0, 0), (2, 1)))))


def _check_large(subject: Any, rng: np.random.Generator) -> None:
    _verify_suspecting(
        subject, problem(rng, ((4, 3), (4, 2)), size=300.0), "overflows", lambda error: not error < np.inf
    )


def _check_bfloat16(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on bfloat16 logits.

    bfloat16 logits are exact in float32, so only computing in bfloat16 makes a difference.
    """
    _verify_suspecting(
        subject, problem(rng, ((40, 33), (40, 21)), narrow=True), "narrow_loss", lambda error: error < ROUNDED
    )


STAGE = Stage(
    id="14.loss",
    function="loss_share",
    title="A share of the loss",
    kind="ring",
    hints=(
        "The loss is a mean over tokens. Over the tokens of which ranks? And which number in it can a rank not know alone?",
        "Sum −log p over your own labels that count. Find how many count on all ranks, by one all_reduce. Divide. "
        "cross_entropy has the arguments ignore_index and reduction.",
        r"$\mathrm{share}_r = \frac{1}{N}\sum_{t \in r,\ \ell_t \neq -100} -\log p_t(\ell_t)$, $\;N = \sum_r N_r$, $\;\mathcal{L} = \sum_r \mathrm{share}_r$",
    ),
    misconceptions=misconceptions_of("14.loss"),
    checks=(
        Check("values", 2, "visible", "shares that add up to the loss, and their gradients, P = 1, 2, 3", _check_values),
        Check("uneven", 2, "visible", "ranks without a label that counts, ranks without tokens", _check_uneven),
        Check("large", 1, "visible", "logits of hundreds", _check_large),
        Check("bfloat16", 1, "visible", "bfloat16 logits, a loss in float32", _check_bfloat16),
    ),
)  # fmt: skip
