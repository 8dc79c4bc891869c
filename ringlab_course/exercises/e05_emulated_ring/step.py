"""Checks of 05.step, one step of the ring: block and merge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ringlab import oracle
from ringlab_course.checking.answers import expect_array, expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all, compare_suspecting
from ringlab_course.checking.numbers import NAMES, State, attend, merged, random, rounding_bound
from ringlab_course.checking.wrong_answers import misconceptions_of, mistakes_of

mistake = mistakes_of("05.step")


@dataclass(frozen=True)
class Case:
    """The inputs of one step: the block, the state before the step, and a mask of the visible keys."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    mask: torch.Tensor | None
    text: str

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v, self.out, self.lse, self.mask


def _case(
    rng: np.random.Generator, H: int, K: int, Lq: int, Lk: int, D: int, *, size=1.0, identity=False
) -> Case:
    q, k, v = random(rng, 1, H, Lq, D, size=size), random(rng, 1, K, Lk, D), random(rng, 1, K, Lk, D)
    out, lse = torch.zeros(1, H, Lq, D), torch.full((1, H, Lq), -np.inf)
    if not identity:
        earlier = attend(q, random(rng, 1, K, Lk, D), random(rng, 1, K, Lk, D))
        out, lse = (torch.from_numpy(x).float() for x in earlier)
    state = "nothing seen before" if identity else "one block seen before"
    return Case(
        q, k, v, out, lse, None, f"{H} query heads, {K} K/V heads, {Lq} queries, {Lk} keys, D={D}, {state}"
    )


def _compare(subject: Any, cases: Iterable[Case]) -> None:
    compare_all(_answered(subject, case) for case in cases)


def _answered(subject: Any, case: Case) -> Answered:
    """Return the learner's answer and the right one.

    Raises: the named mistake that a NaN or an infinity shows.
    """
    right = merged(
        (case.out.double().numpy(), case.lse.double().numpy()), attend(case.q, case.k, case.v, case.mask)
    )
    parts = expect_tuple(subject.call(*case.inputs), NAMES)
    got = [expect_array(part, r.shape, name=name) for part, r, name in zip(parts, right, NAMES, strict=True)]
    _expect_numbers(got, right, case)
    bound = rounding_bound(case.q, case.k, case.v, right)
    return Answered(parts, right, bound, names=NAMES, text=case.text)


def _expect_numbers(got: list[np.ndarray], right: State, case: Case) -> None:
    """Raise the named mistake for NaN in rows without visible keys, other NaN, infinities, or a finite mask.

    With a large finite number in place of −inf, a row that has seen no key gets equal weights.
    """
    broken = np.isnan(got[0]).any(-1) | np.isnan(got[1])
    blind = (
        np.zeros_like(broken)
        if case.mask is None
        else np.broadcast_to(~case.mask.numpy().any(-1), broken.shape)
    )
    if (broken & blind).any():
        raise mistake("nan_in_blind_rows").failure(case.text)
    unseen = np.isneginf(right[1]) & np.isfinite(got[1])
    group = case.q.shape[1] // case.v.shape[1]
    mean = oracle.float64(case.v).mean(-2, keepdims=True).repeat(group, axis=1)
    if (unseen & (got[1] < -1e3) & np.isclose(got[0], mean, rtol=1e-4, atol=1e-6).all(-1)).any():
        raise mistake("finite_mask").failure(case.text)
    if broken.any() or (np.isposinf(got[1])).any():
        raise mistake("overflows").failure(case.text)


def _check_first_block(subject: Any, rng: np.random.Generator) -> None:
    sizes = ((1, 1, 1), (1, 2, 2), (2, 3, 4))
    _compare(subject, (_case(rng, 1, 1, Lq, Lk, D, identity=True) for Lq, Lk, D in sizes))


def _check_merge(subject: Any, rng: np.random.Generator) -> None:
    sizes = ((1, 1, 1, 1), (1, 2, 3, 4), (2, 4, 3, 4))
    _compare(subject, (_case(rng, H, H, Lq, Lk, D) for H, Lq, Lk, D in sizes))


def _check_masked(subject: Any, rng: np.random.Generator) -> None:
    _compare(subject, _masked_cases(rng))


def _masked_cases(rng: np.random.Generator) -> Iterator[Case]:
    for identity in (True, False):
        for mask in ([[False]], [[False, False], [True, False]]):
            case = _case(rng, 1, 1, len(mask), len(mask), 2, identity=identity)
            yield replace(
                case, mask=torch.tensor(mask), text=f"{case.text}, mask {np.array(mask, int).tolist()}"
            )


def _check_large(subject: Any, rng: np.random.Generator) -> None:
    _compare(subject, (_case(rng, 1, 1, 2, 3, 4, size=size) for size in (100.0, 1000.0)))


def _check_grouped(subject: Any, rng: np.random.Generator) -> None:
    _compare(subject, (_case(rng, H, K, 2, 3, 4) for H, K in ((2, 1), (4, 2), (6, 2))))


def _check_state(subject: Any, rng: np.random.Generator) -> None:
    """Check the state for bfloat16 inputs.

    bfloat16 inputs are exact in float32, so an answer differs only if the state is rounded.
    """
    for _ in range(2):
        case = _case(rng, 1, 1, 4, 8, 16)
        q, k, v = (x.bfloat16() for x in (case.q, case.k, case.v))
        case = replace(case, q=q, k=k, v=v, text="bfloat16 q, k and v")
        answered = _answered(subject, case)
        if any(getattr(part, "dtype", None) is torch.bfloat16 for part in answered.answer):
            raise mistake("low_precision_state").failure(case.text)
        most = 2.0**-7 * max(1.0, float(np.abs(answered.truth[1]).max()))  # error of one rounding to bfloat16
        suspected = mistake("low_precision_state")
        compare_suspecting([answered], suspected, lambda error, most=most: error <= most)


HINTS = (
    "After this block, a query has seen the earlier keys and the keys of this block. Which two numbers per row say "
    "how much each of the two sets weighs?",
    "First compute the block's own (out, lse), as if the block were the whole sequence. Then merge the two partials as "
    "in lesson 02. Treat rows whose lse is −inf separately.",
    r"$L = \mathrm{logaddexp}(L_1, L_2)$, $\;o = o_1 e^{L_1-L} + o_2 e^{L_2-L}$, with $e^{-\infty-(-\infty)}$ taken as 0",
)

STAGE = Stage(
    id="05.step",
    function="ring_step",
    may_change=("out", "lse"),
    title="One step: attend to the block that is here, merge",
    hints=HINTS,
    misconceptions=misconceptions_of("05.step"),
    checks=(
        Check("first_block", 1, "visible", "the first block alone", _check_first_block),
        Check("merge", 2, "visible", "a block merged into what was seen before", _check_merge),
        Check("masked", 2, "visible", "rows that see no key of the block", _check_masked),
        Check("grouped", 1, "visible", "fewer K/V heads than query heads", _check_grouped),
        Check("state", 1, "visible", "bfloat16 inputs, float32 state", _check_state),
        Check("large", 1, "visible", "scores in the hundreds and thousands", _check_large),
    ),
)
