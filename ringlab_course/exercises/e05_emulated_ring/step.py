"""Checks of 05.step, one step of the ring: block and merge; its common mistakes, imitated in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ringlab import oracle
from ringlab_course.checking.answers import compare_with, expect_array, expect_tuple, explains
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.numbers import NAMES, State, attend, merged, random, rounding_bound
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("05.step")


def _averages(q, k, v, out, lse, mask=None) -> State:
    here = attend(q, k, v, mask)
    return (oracle.float64(out) + here[0]) / 2, np.logaddexp(oracle.float64(lse), here[1])


def _adds(q, k, v, out, lse, mask=None) -> State:
    here = attend(q, k, v, mask)
    return oracle.float64(out) + here[0], np.logaddexp(oracle.float64(lse), here[1])


def _drops_state(q, k, v, out, lse, mask=None) -> State:
    return attend(q, k, v, mask)


def _no_scale(q, k, v, out, lse, mask=None) -> State:
    return merged((oracle.float64(out), oracle.float64(lse)), attend(q, k, v, mask, scale=1.0))


def _inverted(q, k, v, out, lse, mask=None) -> State:
    here = attend(q, k, v, None if mask is None else ~np.asarray(mask))
    return merged((oracle.float64(out), oracle.float64(lse)), here)


def _wrong_groups(q, k, v, out, lse, mask=None) -> State:
    group = q.shape[1] // k.shape[1]
    k, v = (np.tile(oracle.float64(x), (1, group, 1, 1)) for x in (k, v))
    return merged((oracle.float64(out), oracle.float64(lse)), attend(q, k, v, mask))


STEP = (
    mistake("averages_partials", _averages),
    mistake("adds_partials", _adds),
    mistake("drops_the_state", _drops_state),
    mistake("forgets_the_scale", _no_scale),
    mistake("nan_in_blind_rows"),
    mistake("mask_inverted", _inverted),
    mistake("finite_mask"),
    mistake("ignores_groups", _wrong_groups),
    mistake("overflows"),
    mistake("low_precision_state"),
)


MISTAKES = {mistake.name: mistake for mistake in STEP}


@dataclass(frozen=True)
class Case:
    """Inputs of one step: the block, the state before it, and which keys may be seen."""

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


def _compare(subject: Any, case: Case) -> None:
    right = merged(
        (case.out.double().numpy(), case.lse.double().numpy()), attend(case.q, case.k, case.v, case.mask)
    )
    bound = rounding_bound(case.q, case.k, case.v, right)
    answer = subject.call(*case.inputs)
    parts = expect_tuple(answer, NAMES)
    _expect_no_nan(parts, right, case, bound)
    compare_with(
        answer, right, bound=bound, misconceptions=STEP, inputs=case.inputs, names=NAMES, case=case.text
    )


def _expect_no_nan(
    parts: tuple[Any, ...], right: tuple[np.ndarray, np.ndarray], case: Case, bound: float
) -> None:
    """A NaN in a row that sees no key, or for large scores, has a name; so has a number in a row that saw none."""
    got = [expect_array(part, r.shape, name=name) for part, r, name in zip(parts, right, NAMES, strict=True)]
    broken = np.isnan(got[0]).any(-1) | np.isnan(got[1])
    blind = (
        np.zeros_like(broken)
        if case.mask is None
        else np.broadcast_to(~case.mask.numpy().any(-1), broken.shape)
    )
    if (broken & blind).any():
        raise MISTAKES["nan_in_blind_rows"].failure(case.text)
    if (np.isneginf(right[1]) & np.isfinite(got[1])).any():
        upside_down = explains(MISTAKES["mask_inverted"], parts, right, bound, case.inputs)
        raise MISTAKES["mask_inverted" if upside_down else "finite_mask"].failure(case.text)
    if broken.any() or (np.isposinf(got[1])).any():
        raise MISTAKES["overflows"].failure(case.text)


def _check_first_block(subject: Any, rng: np.random.Generator) -> None:
    for Lq, Lk, D in ((1, 1, 1), (1, 2, 2), (2, 3, 4)):
        _compare(subject, _case(rng, 1, 1, Lq, Lk, D, identity=True))


def _check_merge(subject: Any, rng: np.random.Generator) -> None:
    for H, Lq, Lk, D in ((1, 1, 1, 1), (1, 2, 3, 4), (2, 4, 3, 4)):
        _compare(subject, _case(rng, H, H, Lq, Lk, D))


def _check_masked(subject: Any, rng: np.random.Generator) -> None:
    for case, mask in _masked_cases(rng):
        text = f"{case.text}, mask {mask.int().tolist()}"
        _compare(subject, Case(*case.inputs[:5], mask, text))


def _masked_cases(rng: np.random.Generator) -> Iterator[tuple[Case, torch.Tensor]]:
    for identity in (True, False):
        yield _case(rng, 1, 1, 1, 1, 2, identity=identity), torch.zeros(1, 1, dtype=torch.bool)
        yield _case(rng, 1, 1, 2, 2, 2, identity=identity), torch.tensor([[False, False], [True, False]])


def _check_large(subject: Any, rng: np.random.Generator) -> None:
    for size in (100.0, 1000.0):
        _compare(subject, _case(rng, 1, 1, 2, 3, 4, size=size))


def _check_grouped(subject: Any, rng: np.random.Generator) -> None:
    for H, K in ((2, 1), (4, 2)):
        _compare(subject, _case(rng, H, K, 2, 3, 4))


def _check_state(subject: Any, rng: np.random.Generator) -> None:
    """bfloat16 inputs are exact in float32, so only a rounded state can differ."""
    case = _case(rng, 1, 1, 4, 8, 16)
    case = Case(
        case.q.bfloat16(), case.k.bfloat16(), case.v.bfloat16(), *case.inputs[3:], "bfloat16 q, k and v"
    )
    parts = expect_tuple(subject.call(*case.inputs), NAMES)
    if any(getattr(part, "dtype", None) is torch.bfloat16 for part in parts):
        raise MISTAKES["low_precision_state"].failure(case.text)
    try:
        _compare(subject, case)
    except Failure as failure:
        if failure.misconception is None:
            raise MISTAKES["low_precision_state"].failure(failure.counterexample) from None
        raise


HINTS = (
    "After this block, the query has seen the keys of before and the keys of now. What two numbers per row tell "
    "you how much each of them weighs?",
    "Compute the block's own (out, lse) first, as if it were the whole sequence. Then merge the two partials as in "
    "lesson 02, and look after rows whose lse is −inf.",
    r"$L = \mathrm{logaddexp}(L_1, L_2)$, $\;o = o_1 e^{L_1-L} + o_2 e^{L_2-L}$, with $e^{-\infty-(-\infty)}$ taken as 0",
)

STAGE = Stage(
    id="05.step",
    function="ring_step",
    title="One step: attend to the block that is here, merge",
    hints=HINTS,
    misconceptions=STEP,
    checks=(
        Check("first_block", 1, "visible", "the first block alone", _check_first_block),
        Check("merge", 2, "visible", "a block merged into what was seen before", _check_merge),
        Check("masked", 2, "visible", "rows that see no key of the block", _check_masked),
        Check("large", 1, "stress", "scores in the hundreds and thousands", _check_large),
        Check("grouped", 1, "stress", "fewer K/V heads than query heads", _check_grouped),
        Check("state", 1, "held-out", "bfloat16 inputs, float32 state", _check_state),
    ),
)
