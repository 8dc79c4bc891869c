"""Checks of 10.fold: many parts, merged one after the other into a float32 state."""

from __future__ import annotations

import math
from collections.abc import Iterable
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
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.numbers import NAMES, rounding
from ringlab_course.checking.wrong_answers import misconceptions_of, mistakes_of

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Subject

mistake = mistakes_of("10.fold")

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""The state (out, lse), and the parts (outs, lses)."""
ROUGH = 0.1
"""Folding two parts in bfloat16 leaves a relative error far below this; a wrong formula leaves a larger one."""


def fold(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state (out, lse), float32, after the parts (outs[i], lses[i]) in their order."""
    for part_out, part_lse in zip(outs.float(), lses, strict=True):
        total = torch.logaddexp(lse, part_lse)
        safe = torch.where(total == -math.inf, 0.0, total)
        old, new = torch.exp(lse - safe)[..., None], torch.exp(part_lse - safe)[..., None]
        out, lse = out * old + part_out * new, total
    return out, lse


def check_worked(subject: Subject, rng: np.random.Generator) -> None:
    """Fold one part, and no part, into a state of one row."""
    outs, lses = _parts(rng, 2, 1, 1)
    outs, lses = (10 * outs).round(decimals=1), lses.round(decimals=1)
    text = " and ".join(f"out {o:g}, lse {x:g}" for o, x in zip(outs.flatten(), lses.flatten(), strict=True))
    cases = ((outs[0], lses[0], outs[n:], lses[n:]) for n in (1, 2))
    _folds(subject, zip(cases, (text, "no part at all"), strict=True))


def check_parts(subject: Subject, rng: np.random.Generator) -> None:
    """Fold several parts into a state with and without earlier parts."""
    cases = []
    for N, L, D in ((1, 1, 2), (3, 2, 4), (8, 4, 8)):
        outs, lses = _parts(rng, N + 1, L, D)
        state = outs[0], lses[0], outs[1:], lses[1:]
        cases.append((state, f"{N} float32 parts, {L} rows, D={D}"))
        nothing = *_nothing(L, D), outs, lses
        cases.append((nothing, f"{N + 1} parts into a state that has seen nothing"))
    _folds(subject, cases)


def check_empty(subject: Subject, rng: np.random.Generator) -> None:
    """Try a row that has seen no key in the state, in a part, or in both."""
    outs, lses = _parts(rng, 2, 2, 2)
    cases = []
    for part in (slice(0, 1), slice(0, 2)):
        hidden_outs, hidden_lses = outs.clone(), lses.clone()
        hidden_outs[part, 1], hidden_lses[part, 1] = 0.0, -math.inf
        for state in (_nothing(2, 2), (outs[1], lses[1])):
            cases.append(
                ((*state, hidden_outs, hidden_lses), "two parts in which row 1 may have seen no key")
            )
    _folds(subject, cases)


def check_large(subject: Subject, rng: np.random.Generator) -> None:
    """Try lse of ±1000."""
    cases = []
    for shift in (-1000.0, 1000.0):
        outs, lses = _parts(rng, 3, 2, 4)
        cases.append(((outs[0], lses[0] + shift, outs, lses + shift), f"three parts, lse near {shift:g}"))
    _folds(subject, cases)


def check_bf16(subject: Subject, rng: np.random.Generator) -> None:
    """Fold bfloat16 parts into a float32 state, and expect float32 precision."""
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
            raise mistake("lse_follows_the_parts").failure(case)
        if not exact[0] or narrow[0]:
            name = "rounds_at_the_end" if rounded else "state_follows_the_parts"
            raise mistake(name).failure(case)


def check_resumable(subject: Subject, rng: np.random.Generator) -> None:
    """Expect the same bits from two batches as from one batch, and from the same call again."""
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
        raise mistake(name).failure(f"12 parts at once, and {cut} and {12 - cut} of them")
    if not _same(whole, _arrays(subject.call(*state, outs, lses))):
        raise Failure("The same call gives other bits the second time.", "12 parts at once, twice")


def _one_by_one(subject: Subject, state: Any, outs: Tensor, lses: Tensor) -> list[np.ndarray]:
    """Return the state after these parts, each in a call of its own."""
    for i in range(len(outs)):
        state = expect_tuple(subject.call(*state, outs[i : i + 1], lses[i : i + 1]), NAMES)
    return _arrays(state)


def _divides_once(subject: Subject, rng: np.random.Generator) -> bool:
    """Return whether N whole numbers of equal weight give exactly their sum divided by N.

    Only an answer that divides once, at the end, does so, because a merge of two parts at a time rounds in
    every merge.
    """
    for N in (3, 5, 6, 7, 11, 12):
        whole = torch.from_numpy(rng.integers(1, 1000, (N, 8, 16))).float()
        out, _ = _arrays(subject.call(*_nothing(8, 16), whole, torch.zeros(N, 8)))
        if not np.array_equal(out, (whole.sum(0) / N).numpy()):
            return False
    return True


def check_any(subject: Subject, rng: np.random.Generator) -> None:
    """Fold many parts, some of them empty, whose lse rise or fall by hundreds."""
    cases = []
    for slope in (40.0, -40.0, 300.0, -300.0):
        outs, lses = _parts(rng, 33, 5, 6)
        lses = lses + torch.linspace(-slope, slope, 33)[:, None]
        outs[7], lses[7] = 0.0, -math.inf
        outs[:, 4], lses[:, 4] = 0.0, -math.inf
        inputs = *_nothing(5, 6), outs.bfloat16(), lses
        cases.append((inputs, f"33 parts, lse from {-slope:g} to {slope:g}"))
    _folds(subject, cases)


def _parts(rng: np.random.Generator, N: int, L: int, D: int) -> tuple[Tensor, Tensor]:
    outs, lses = rng.standard_normal((N, L, D)), rng.standard_normal((N, L)) + 4
    return torch.from_numpy(outs).float(), torch.from_numpy(lses).float()


def _nothing(L: int, D: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(L, D), torch.full((L,), -math.inf)


def _truth(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state after all parts, computed in float64 at once."""
    every = torch.cat([lse[None], lses]).double()
    common = every.logsumexp(0)
    weights = torch.exp(every - common.masked_fill(common == -math.inf, 0.0))
    return (weights[..., None] * torch.cat([out[None].double(), outs.double()])).sum(0), common


def _folds(subject: Subject, cases: Iterable[tuple[Inputs, str]]) -> None:
    """Compare the state in every case (inputs, description) with the right one."""
    compare_all(_folded(subject, *case) for case in cases)


def _folded(subject: Subject, inputs: Inputs, case: str) -> Answered:
    truth, lses = _truth(*inputs), inputs[3]
    size = max(8.0, float(lses[torch.isfinite(lses)].abs().max()) if len(lses) else 8.0)
    bound = max(bound_from(fold(*inputs), truth), rounding(truth, 2 * size))
    return Answered(expect_tuple(subject.call(*inputs), NAMES), truth, bound, names=NAMES, text=case)


def _roughly(answer: Any, inputs: tuple[Tensor, ...], case: str) -> None:
    """Raise Failure if an error is too large for rounding, so that the formula must be wrong."""
    truth = _truth(*inputs)
    arrays = [expect_array(part, tuple(right.shape)) for part, right in zip(answer, truth, strict=True)]
    if not relative_error(arrays, list(truth)) <= ROUGH:
        compare_with(answer, truth, bound=ROUGH / 10, names=NAMES, case=case)


def _close(part: Any, truth: Tensor) -> bool:
    """Return whether a part is right to the precision of float32; bfloat16 has errors about 100 times larger."""
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


STAGE = Stage(
    id="10.fold",
    function="fold",
    title="Fold many parts into a float32 state",
    hints=(
        "The parts come in bfloat16. In which dtype is the sum of the first two? And the sum of the first hundred?",
        "Loop over the parts in their order: convert a part, merge it into (out, lse) with logaddexp, go on. Nothing may depend on "
        "later parts, and nothing but (out, lse) may be carried from one part to the next.",
        "$L' = \\mathrm{logaddexp}(L, L_i),\\quad o' = o\\,e^{L - L'} + o_i\\,e^{L_i - L'}$, and weight 0 where $L = -\\infty$",
    ),
    misconceptions=misconceptions_of("10.fold"),
    checks=(
        Check("worked", 1, "visible", "one part into one row, and no part at all", check_worked),
        Check("parts", 2, "visible", "several parts, into a state", check_parts),
        Check("empty", 1, "visible", "rows that have seen no key, in the state or in a part", check_empty),
        Check("bf16", 2, "visible", "many bfloat16 parts, a float32 state", check_bf16),
        Check("resumable", 2, "visible", "two batches give the same bits as one", check_resumable),
        Check("large", 1, "visible", "lse of ±1000", check_large),
        Check("any", 1, "held-out", "many parts, rising and falling, some empty", check_any),
    ),
)  # fmt: skip
