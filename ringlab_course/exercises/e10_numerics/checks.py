"""Exercise 10: the checks of relative_error and fold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ringlab_course.checking.answers import (
    bound_from,
    compare_with,
    expect_array,
    expect_tuple,
    relative_error,
)
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.numbers import rounding
from ringlab_course.exercises.e10_numerics import mistakes

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Subject

NAMES = ("out", "lse")
ROUGH = 0.1
"""Two parts folded in bfloat16 throughout are far closer than this; a wrong formula is not."""
FLOAT32 = 1e-6
"""A relative error that was computed in float32 is right to this."""
CLOSE = 1e-9
"""Two float64 computations of one relative error agree far better than this, and no mistake does."""


def check_worked(subject: Subject, rng: np.random.Generator) -> None:
    """Two or three numbers, to follow on paper."""
    pairs = [(_tenths(rng, length), _tenths(rng, length)) for length in (2, 3, 3)]
    _errors(subject, [(x, truth, f"x = {x}, truth = {truth}") for x, truth in pairs])


def _tenths(rng: np.random.Generator, length: int) -> list[float]:
    """Numbers with one decimal, from 1 to 100."""
    return [int(n) / 10 for n in rng.integers(10, 1000, length)]


def check_scale(subject: Subject, rng: np.random.Generator) -> None:
    """The same numbers in another unit have the same error."""
    x, truth = _numbers(rng, 2, 3)
    units = 2.0**-20, 2.0**20
    _errors(subject, [(x * unit, truth * unit, f"2 × 3 numbers of size {unit:.0e}") for unit in units])


def check_narrow(subject: Subject, rng: np.random.Generator) -> None:
    """What bfloat16 and float16 lose counts."""
    cases = []
    for dtype in (torch.bfloat16, torch.float16):
        truth = torch.from_numpy(rng.standard_normal((4, 8)))
        cases.append((truth.to(dtype), truth, f"x is the truth, rounded to {str(dtype)[6:]}"))
    _errors(subject, cases)


def check_zero(subject: Subject, rng: np.random.Generator) -> None:
    """A truth that is 0 in places, and one that is 0 everywhere."""
    (a, b), (c, d) = _tenths(rng, 2), _tenths(rng, 2)
    _error(subject, [a, b], [c, 0.0], f"x = [{a}, {b}], truth = [{c}, 0]")
    shape = tuple(int(n) for n in rng.integers(1, 200, 2))
    _error(subject, torch.zeros(shape), torch.zeros(shape).double(), f"x and truth are 0, shape {shape}")
    _error(subject, [c, d], [0.0, 0.0], f"x = [{c}, {d}], truth = [0, 0]")


def check_not_finite(subject: Subject, rng: np.random.Generator) -> None:
    """NaN and infinity where there should be a number."""
    for wrong in (math.nan, math.inf, -math.inf):
        a, b = _tenths(rng, 2)
        _error(subject, [a, wrong], [a, b], f"x = [{a}, {wrong}], truth = [{a}, {b}]")


def check_empty_rows(subject: Subject, rng: np.random.Generator) -> None:
    """Lse −inf where the truth says −inf."""
    a, b = _tenths(rng, 2)
    _error(subject, [-math.inf, a], [-math.inf, b], f"x = [−inf, {a}], truth = [−inf, {b}]")
    _error(subject, [-1e9, b], [-math.inf, b], f"x = [−1e9, {b}], truth = [−inf, {b}]")
    _error(subject, [math.inf, b], [-math.inf, b], f"x = [inf, {b}], truth = [−inf, {b}]")
    shape = tuple(int(n) for n in rng.integers(1, 200, 2))
    nothing = torch.full(shape, -math.inf, dtype=torch.float64)
    _error(subject, nothing.float(), nothing, f"x and truth are −inf, shape {shape}")


def check_shape(subject: Subject, rng: np.random.Generator) -> None:
    """Another shape is no result."""
    x, truth = _numbers(rng, 3, 3)
    for other in (x[:, :1], x[0], x[:1]):
        _error(subject, other, truth, f"x of shape {tuple(other.shape)}, truth of shape {tuple(truth.shape)}")


def check_any_error(subject: Subject, rng: np.random.Generator) -> None:
    """All sorts of numbers."""
    for spread in (0.0, 1.0, 4.0):
        x, truth = _numbers(rng, 5, 40)
        factor = torch.from_numpy(np.exp(spread * rng.standard_normal((5, 1))))
        x, truth = (x * factor).float(), truth * factor
        truth[2] = 0.0
        _error(subject, x, truth, f"5 × 40 numbers, rows that differ in size by e^{spread:g}, one row of 0")
    x[1, 7] = math.nan
    _error(subject, x, truth, "one NaN among 200 numbers")


def _error(subject: Subject, x: Any, truth: Any, case: str) -> None:
    """Check one case that only few mistakes can be made on, so that one case tells them apart."""
    one = _answered(subject, x, truth, case)
    try:
        compare_with(
            one.answer,
            one.truth,
            bound=CLOSE,
            misconceptions=mistakes.ERROR,
            inputs=one.inputs,
            names=one.names,
            case=case,
        )
    except Failure as failure:
        raise _in_float32([one], failure) from None


def _errors(subject: Subject, cases: Iterable[tuple[Any, Any, str]]) -> None:
    """Check several cases; a mistake is named if it explains all of them."""
    seen: list[Answered] = []

    def answered() -> Iterator[Answered]:
        for case in cases:
            seen.append(_answered(subject, *case))
            yield seen[-1]

    try:
        compare_all(answered(), mistakes.ERROR)
    except Failure as failure:
        raise _in_float32(seen, failure) from None


def _in_float32(seen: Sequence[Answered], failure: Failure) -> Failure:
    """Return `failure`, as one of float32 where every answer is right but for that and nothing else explains them."""
    right = all(relative_error(one.answer, one.truth) <= FLOAT32 for one in seen)
    if failure.misconception is None and seen and right:
        return mistakes.named(mistakes.ERROR, "in_float32", failure.counterexample)
    return failure


def _answered(subject: Subject, x: Any, truth: Any, case: str) -> Answered:
    x, truth = (t if isinstance(t, Tensor) else torch.tensor(t, dtype=torch.float64) for t in (x, truth))
    answer = _number(subject.call(x, truth))
    right = np.float64(mistakes.relative_error(x, truth))
    if np.isnan(answer):
        raise mistakes.named(mistakes.ERROR, "nan_is_no_number", f"{case}: got nan, expected {right:.4g}")
    return Answered(answer, right, CLOSE, (x, truth), ("the error",), case)


def _number(answer: Any) -> np.float64:
    """Return the learner's error as a number. Raises: Failure for anything else."""
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        return np.float64(answer)
    array = expect_array(answer, (), name="the error")
    if array.dtype.kind != "f":
        raise Failure(f"The error should be one floating-point number, but is {array.dtype.name}.")
    return np.float64(array)


def _numbers(rng: np.random.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    truth = rng.standard_normal(shape)
    return torch.from_numpy(truth + 1e-3 * rng.standard_normal(shape)), torch.from_numpy(truth)


def check_fold_worked(subject: Subject, rng: np.random.Generator) -> None:
    """One part into a state of one row, and no part at all."""
    outs, lses = _parts(rng, 2, 1, 1)
    outs, lses = (10 * outs).round(decimals=1), lses.round(decimals=1)
    text = " and ".join(f"out {o:g}, lse {x:g}" for o, x in zip(outs.flatten(), lses.flatten(), strict=True))
    cases = ((outs[0], lses[0], outs[n:], lses[n:]) for n in (1, 2))
    _folds(subject, zip(cases, (text, "no part at all"), strict=True))


def check_parts(subject: Subject, rng: np.random.Generator) -> None:
    """Several parts, into a state that has seen something, and into one that has not."""
    cases = []
    for N, L, D in ((1, 1, 2), (3, 2, 4), (8, 4, 8)):
        outs, lses = _parts(rng, N + 1, L, D)
        state = outs[0], lses[0], outs[1:], lses[1:]
        cases.append((state, f"{N} float32 parts, {L} rows, D={D}"))
        nothing = *_nothing(L, D), outs, lses
        cases.append((nothing, f"{N + 1} parts into a state that has seen nothing"))
    _folds(subject, cases)


def check_fold_empty(subject: Subject, rng: np.random.Generator) -> None:
    """Rows that have seen no key: in the state, in a part, in both."""
    outs, lses = _parts(rng, 2, 2, 2)
    for part in (slice(0, 1), slice(0, 2)):
        hidden_outs, hidden_lses = outs.clone(), lses.clone()
        hidden_outs[part, 1], hidden_lses[part, 1] = 0.0, -math.inf
        for state in ((outs[0] * 0, lses[0] * 0 - math.inf), (outs[1], lses[1])):
            _fold(subject, *state, hidden_outs, hidden_lses, "two parts in which row 1 may have seen no key")


def check_fold_large(subject: Subject, rng: np.random.Generator) -> None:
    """Lse of ±1000."""
    for shift in (-1000.0, 1000.0):
        outs, lses = _parts(rng, 3, 2, 4)
        _fold(subject, outs[0], lses[0] + shift, outs, lses + shift, f"three parts, lse near {shift:g}")


def check_fold_bf16(subject: Subject, rng: np.random.Generator) -> None:
    """Many bfloat16 parts into a float32 state."""
    for N in (2, 64):
        outs, lses = _parts(rng, N, 4, 16)
        outs = outs.bfloat16()
        state, case = _nothing(4, 16), f"{N} bfloat16 parts, lse in float32"
        answer = expect_tuple(subject.call(*state, outs, lses), NAMES)
        truth = _truth(*state, outs, lses)
        if N == 2:
            _roughly(answer, (*state, outs, lses), case)
        exact = [_close(part, right) for part, right in zip(answer, truth, strict=True)]
        narrow = [getattr(part, "dtype", None) is torch.bfloat16 for part in answer]
        rounded = _close(answer[0], truth[0].bfloat16().double()) if narrow[0] else False
        if not exact[1] or narrow[1]:
            raise mistakes.named(mistakes.FOLD, "lse_follows_the_parts", case)
        if not exact[0] or narrow[0]:
            name = "rounds_at_the_end" if rounded else "state_follows_the_parts"
            raise mistakes.named(mistakes.FOLD, name, case)


def check_resumable(subject: Subject, rng: np.random.Generator) -> None:
    """Two batches give the bits of one; so does the same call again."""
    outs, lses = _parts(rng, 12, 8, 16)
    outs = outs.bfloat16()
    state = _nothing(8, 16)
    answer = expect_tuple(subject.call(*state, outs, lses), NAMES)
    _roughly(answer, (*state, outs, lses), "12 bfloat16 parts")
    whole = _arrays(answer)
    for cut in (1, 5, 11):
        first = expect_tuple(subject.call(*state, outs[:cut], lses[:cut]), NAMES)
        second = _arrays(subject.call(*first, outs[cut:], lses[cut:]))
        if _same(whole, second):
            continue
        turned = _arrays(subject.call(*state, outs.flip(0), lses.flip(0)))
        exact = [part.float().numpy() for part in _truth(*state, outs, lses)]
        name = (
            "wider_inside"
            if _same(whole, exact)
            else "last_part_first"
            if _same(whole, _one_by_one(subject, state, outs.flip(0), lses.flip(0)))
            else "sorts_the_parts"
            if _same(whole, turned)
            else "divides_at_the_end"
            if _divides_once(subject, rng)
            else "not_resumable"
        )
        raise mistakes.named(mistakes.FOLD, name, f"12 parts at once, and {cut} and {12 - cut} of them")
    if not _same(whole, _arrays(subject.call(*state, outs, lses))):
        raise Failure("The same call gives other bits the second time.", "12 parts at once, twice")


def _one_by_one(subject: Subject, state: Any, outs: Tensor, lses: Tensor) -> list[np.ndarray]:
    """Return the state after these parts, each in a call of its own."""
    for i in range(len(outs)):
        state = expect_tuple(subject.call(*state, outs[i : i + 1], lses[i : i + 1]), NAMES)
    return _arrays(state)


def _divides_once(subject: Subject, rng: np.random.Generator) -> bool:
    """Whether N whole numbers of equal weight give their sum, divided by N once: every merge of two rounds besides."""
    for N in (3, 5, 6, 7, 11, 12):
        whole = torch.from_numpy(rng.integers(1, 1000, (N, 8, 16))).float()
        out, _ = _arrays(subject.call(*_nothing(8, 16), whole, torch.zeros(N, 8)))
        if not np.array_equal(out, (whole.sum(0) / N).numpy()):
            return False
    return True


def check_any_fold(subject: Subject, rng: np.random.Generator) -> None:
    """Many parts whose lse rise or fall by hundreds, some empty."""
    for slope in (40.0, -40.0, 300.0, -300.0):
        outs, lses = _parts(rng, 33, 5, 6)
        lses = lses + torch.linspace(-slope, slope, 33)[:, None]
        outs[7], lses[7] = 0.0, -math.inf
        outs[:, 4], lses[:, 4] = 0.0, -math.inf
        _fold(subject, *_nothing(5, 6), outs.bfloat16(), lses, f"33 parts, lse from {-slope:g} to {slope:g}")


def _parts(rng: np.random.Generator, N: int, L: int, D: int) -> tuple[Tensor, Tensor]:
    outs, lses = rng.standard_normal((N, L, D)), rng.standard_normal((N, L)) + 4
    return torch.from_numpy(outs).float(), torch.from_numpy(lses).float()


def _nothing(L: int, D: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(L, D), torch.full((L,), -math.inf)


def _truth(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The fold in float64, all parts at once."""
    every = torch.cat([lse[None], lses]).double()
    common = every.logsumexp(0)
    weights = torch.exp(every - common.masked_fill(common == -math.inf, 0.0))
    return (weights[..., None] * torch.cat([out[None].double(), outs.double()])).sum(0), common


def _fold(subject: Subject, out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor, case: str) -> None:
    """Check one case that only few mistakes can be made on, so that one case tells them apart."""
    one = _folded(subject, (out, lse, outs, lses), case)
    compare_with(
        one.answer,
        one.truth,
        bound=one.bound,
        misconceptions=mistakes.FOLD,
        inputs=one.inputs,
        names=NAMES,
        case=case,
    )


def _folds(subject: Subject, cases: Iterable[tuple[tuple[Tensor, ...], str]]) -> None:
    """Check several cases; a mistake is named if it explains all of them."""
    compare_all((_folded(subject, *case) for case in cases), mistakes.FOLD)


def _folded(subject: Subject, inputs: tuple[Tensor, ...], case: str) -> Answered:
    truth, lses = _truth(*inputs), inputs[3]
    size = max(8.0, float(lses[torch.isfinite(lses)].abs().max()) if len(lses) else 8.0)
    bound = max(bound_from(mistakes.fold(*inputs), truth), rounding(truth, 2 * size))
    return Answered(expect_tuple(subject.call(*inputs), NAMES), truth, bound, inputs, NAMES, case)


def _roughly(answer: Any, inputs: tuple[Tensor, ...], case: str) -> None:
    """Raise what is wrong with the formula, before anybody speaks of roundings and bits."""
    truth = _truth(*inputs)
    arrays = [expect_array(part, tuple(right.shape)) for part, right in zip(answer, truth, strict=True)]
    if not relative_error(arrays, list(truth)) <= ROUGH:
        compare_with(
            answer,
            truth,
            bound=ROUGH / 10,
            misconceptions=mistakes.FOLD,
            inputs=inputs,
            names=NAMES,
            case=case,
        )


def _close(part: Any, truth: Tensor) -> bool:
    """Whether a part is right to float32: bfloat16 is 100 times as far off."""
    try:
        got = expect_array(part, tuple(truth.shape)).astype(np.float64)
    except Failure:
        return False
    return float(np.abs(got - truth.numpy()).max()) <= 1e-5 * float(truth.abs().max())


def _arrays(answer: Any) -> list[np.ndarray]:
    parts = zip(expect_tuple(answer, NAMES), ((8, 16), (8,)), NAMES, strict=True)
    return [expect_array(part, shape, name=name) for part, shape, name in parts]


def _same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(a, b, strict=True))
