"""Checks of 15.decode: one new token attends to a K/V cache that is spread over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringlab import oracle
from ringlab_course.checking.answers import expect_array
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, blame_groups, compare_all, compare_suspecting
from ringlab_course.checking.failures import Crashed, Failure
from ringlab_course.checking.numbers import random, rounding_bound
from ringlab_course.checking.wrong_answers import misconceptions_of, mistakes_of

mistake = mistakes_of("15.decode")

Parts = list[tuple[np.ndarray, np.ndarray]]
"""For each rank, out (B, H, 1, D) and lse (B, H, 1) in float64."""
ROUNDED = 2.0**-3
"""Errors below this may come from bfloat16's 8 bits in moderate scores. Larger errors have another cause."""


@dataclass(frozen=True)
class Problem:
    """One query, the same on all ranks, and each rank's part of the cache."""

    q: Tensor
    ks: list[Tensor]
    vs: list[Tensor]
    text: str

    @property
    def ranks(self) -> int:
        return len(self.ks)

    @cached_property
    def whole(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (out, lse) of one process in float64."""
        ((out, lse),) = parts(self, [torch.cat(self.ks, dim=2)], [torch.cat(self.vs, dim=2)])
        return out, lse

    @property
    def bound(self) -> float:
        """Return the allowed relative error: that of float32, and one rounding more for bfloat16."""
        bound = rounding_bound(self.q, torch.cat(self.ks, dim=2), torch.cat(self.vs, dim=2), self.whole)
        return bound + (2.0**-8 if self.q.dtype == torch.bfloat16 else 0.0)


def problem(
    rng: np.random.Generator,
    lengths: Sequence[int],
    heads: tuple[int, int] = (2, 2),
    *,
    B: int = 1,
    D: int = 8,
    size: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Problem:
    """Return a problem whose rank r holds lengths[r] tokens. Scores differ much between ranks."""
    H, K = heads
    q = (random(rng, B, H, 1, D) * size).to(dtype)
    ks = [(random(rng, B, K, n, D) * size).to(dtype) for n in lengths]
    vs = [random(rng, B, K, n, D).to(dtype) for n in lengths]
    narrow = ", bfloat16" if dtype == torch.bfloat16 else ""
    text = f"P={len(lengths)}, tokens of the ranks {list(lengths)}, B={B}, H={H}, K={K}, D={D}{narrow}"
    return Problem(q, ks, vs, text)


def parts(
    given: Problem,
    ks: Sequence[Tensor] | None = None,
    vs: Sequence[Tensor] | None = None,
) -> Parts:
    """Return each rank's partial result. Without keys, out is 0 and lse is −inf."""
    q = oracle.float64(given.q)
    found = []
    for k, v in zip(given.ks if ks is None else ks, given.vs if vs is None else vs, strict=True):
        group = q.shape[1] // k.shape[1]
        key, value = (np.repeat(oracle.float64(x), group, axis=1) for x in (k, v))
        scores = q @ key.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
        largest = scores.max(-1, initial=-np.inf)
        shift = np.where(np.isfinite(largest), largest, 0.0)
        weights = np.exp(scores - shift[..., None])
        total = weights.sum(-1)
        with np.errstate(divide="ignore"):
            lse = shift + np.log(total)
        found.append((weights @ value / np.where(total > 0, total, 1.0)[..., None], lse))
    return found


def merged(found: Parts) -> np.ndarray:
    """Return the exact merge of the partial results of all ranks."""
    top = np.max([lse for _, lse in found], axis=0)
    weights = [np.exp(lse - top)[..., None] for _, lse in found]
    total: np.ndarray = sum(w * out for w, (out, _) in zip(weights, found, strict=True)) / sum(weights)
    return total


def _run(subject: Any, given: Problem) -> Any:
    try:
        return subject.run_ring(given.ranks, [given.q] * given.ranks, given.ks, given.vs)
    except Crashed as crash:
        if any(k.shape[2] == 0 for k in given.ks):
            raise mistake("empty_stays_away").failure(f"{given.text}\n{crash.counterexample}") from None
        raise


def _answers(subject: Any, cases: Iterable[Problem]) -> Iterator[Answered]:
    for given in cases:
        yield from _read(_run(subject, given).results, given)


def _read(results: Sequence[Any], given: Problem) -> Iterator[Answered]:
    """Yield each rank's answer. Raises: Failure if an answer is not an array of the right shape and dtype."""
    truth = given.whole[0]
    for rank, answer in enumerate(results):
        got = expect_array(answer, truth.shape, name="out")
        text = f"{given.text}: rank {rank}"
        if np.isnan(got).any() and any(k.shape[2] == 0 for k in given.ks):
            raise mistake("empty_is_not_a_number").failure(text)
        if str(answer.dtype).removeprefix("torch.") != str(given.q.dtype).removeprefix("torch."):
            raise mistake("another_dtype").failure(f"{text}: {answer.dtype} for {given.q.dtype}")
        yield Answered(got, truth, given.bound, names=("out",), text=text)


def _verify(subject: Any, *cases: Problem) -> None:
    compare_all(_answers(subject, cases))


def _verify_suspecting(subject: Any, given: Problem, name: str, plausible: Callable[[float], bool]) -> None:
    """Compare one case as `compare_suspecting` does; `name` is that of the suspected mistake."""
    compare_suspecting(list(_answers(subject, [given])), mistake(name), plausible)


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, *(problem(rng, lengths, size=2.0) for lengths in ((4,), (3, 3), (4, 2, 3))))


def _check_grouped(subject: Any, rng: np.random.Generator) -> None:
    alone = problem(rng, (3, 4), (4, 4), B=2, size=2.0)
    shared = [problem(rng, (3, 4), heads, B=2, size=2.0) for heads in ((4, 2), (6, 3), (8, 1))]
    blame_groups(lambda: _verify(subject, *shared), lambda: _verify(subject, alone))


def _check_empty(subject: Any, rng: np.random.Generator) -> None:
    """Check answers with empty ranks.

    In the first step of a generation there is a single token, here on two ranks. In the other cases, empty
    ranks come first, last or between others.
    """
    _verify(subject, *(problem(rng, lengths, size=0.5) for lengths in ((1, 0), (0, 2), (3, 0, 2, 0))))


def _check_bytes(subject: Any, rng: np.random.Generator) -> None:
    """Check that the bytes do not grow with the tokens, and that values are right.

    A rank's partial result is counted as B·H·(D + 2) numbers. Twice these bytes are allowed.
    """
    P, (H, K) = 3, (4, 4)
    sent = []
    cases = [problem(rng, (n, n, n), (H, K)) for n in (4, 64)]
    for given in cases:
        outcome = _run(subject, given)
        compare_all(_read(outcome.results, given))
        trace = outcome.trace
        sent.append([trace.bytes_sent(rank) for rank in range(P)])
    few, many = (max(each) for each in sent)
    example = f"P={P}, H={H}, K={K}, D=8: {few:,} bytes with 4 tokens on each rank, {many:,} with 64"
    if few != many:
        grown = (many - few) / (60 * 4)
        name = "gathers_the_cache" if grown >= K * 8 else "gathers_the_scores"
        raise mistake(name).failure(example)
    for given in cases:
        partial = (P - 1) * 4 * H * (given.q.shape[-1] + 2)
        if many > 2 * partial:
            raise Failure(
                "You send more than partial results need: out and lse of each head, in float32, to each other rank.",
                f"{example}; {partial:,} are enough",
            )


def _check_large(subject: Any, rng: np.random.Generator) -> None:
    given = problem(rng, (4, 3), D=16, size=12.0)
    _verify_suspecting(subject, given, "overflows", lambda error: not error < math.inf)
    _verify_far_below(subject, problem(rng, (4, 3), D=16, size=12.0))
    _verify_far_below(subject, problem(rng, (4, 0, 3), D=16, size=12.0))


def _verify_far_below(subject: Any, drawn: Problem) -> None:
    """Check answers for scores far below 0, made by changing the signs of q and k.

    Among such scores, a 0 from an empty rank would be the largest.
    """
    given = Problem(
        -drawn.q.abs(), [k.abs() for k in drawn.ks], drawn.vs, f"{drawn.text}, all scores far below 0"
    )
    try:
        _verify_suspecting(subject, given, "underflows", lambda error: not error < math.inf)
    except Failure as failure:
        if (
            failure.misconception == "empty_is_not_a_number"
        ):  # another check finds this mistake on small scores
            raise mistake("underflows").failure(failure.counterexample) from None
        raise


def _check_bfloat16(subject: Any, rng: np.random.Generator) -> None:
    """Check a merge in float32, and then in bfloat16.

    If the merge is wrong in float32 too, the fault is not a lack of digits.
    """
    _verify(subject, problem(rng, (40,) * 8, (8, 2), B=2, D=16, size=3.0))
    given = problem(rng, (40,) * 8, (8, 2), B=2, D=16, size=3.0, dtype=torch.bfloat16)
    _verify_suspecting(subject, given, "narrow_merge", lambda error: error < ROUNDED)


STAGE = Stage(
    id="15.decode",
    function="decode_step",
    title="A decode step",
    kind="ring",
    hints=(
        "Each rank can attend to its own keys alone. What else must the others know about that result, so that they can weight it?",
        "Find the largest score of all ranks, M, per head: all_reduce with op='max'. Compute the weights exp(s − M), their sum, and the sum of weighted values; all_reduce both "
        "sums; divide. A rank without keys contributes a maximum of −inf and sums of 0.",
        r"$\mathrm{out} = \dfrac{\sum_r e^{\mathrm{lse}_r - M}\,\mathrm{out}_r}{\sum_r e^{\mathrm{lse}_r - M}}$, $\;M = \max_r \mathrm{lse}_r$",
    ),
    misconceptions=misconceptions_of("15.decode"),
    checks=(
        Check("values", 2, "visible", "out of one process, on every rank, P = 1, 2, 3", _check_values),
        Check("grouped", 1, "visible", "query heads that share a K/V head, two sequences", _check_grouped),
        Check("empty", 1, "visible", "ranks without a token", _check_empty),
        Check("bytes", 2, "visible", "bytes per token that do not grow with the sequence", _check_bytes, kind="cost"),
        Check("large", 1, "visible", "scores of hundreds", _check_large),
        Check("bfloat16", 1, "visible", "bfloat16, merged in float32", _check_bfloat16),
    ),
)  # fmt: skip
