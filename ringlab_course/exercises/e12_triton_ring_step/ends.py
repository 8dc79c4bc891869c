"""Checks of 12.tile and 12.ends: one tile's arithmetic; the first and the last step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ringlab_course.checking.answers import expect_array, expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.numbers import rounding_bound
from ringlab_course.exercises.e12_triton_ring_step import mistakes
from ringlab_course.exercises.e12_triton_ring_step.cases import (
    RESULT,
    SAYS,
    STATE,
    Ends,
    Tiles,
    compare,
    expect_same,
    expect_state,
    expect_state_not_read,
    expect_written,
    garbage,
    memory,
    poisoned,
    random,
    rounded,
    unnamed,
)
from ringlab_course.exercises.e12_triton_ring_step.emulate import BLOCK, State, nothing_seen

D = 16


def _tiles(
    rng: np.random.Generator, count: int, text: str, *, size: float = 1.0, rising: bool = False
) -> Tiles:
    """`count` tiles that every row sees whole; with `rising` each has larger scores than those before."""
    q = random(rng, BLOCK, D, size=size)
    tiles = []
    for number in range(count):
        k = random(rng, BLOCK, D, size=1.0 + 2 * number if rising else 1.0)
        tiles.append((k, random(rng, BLOCK, D), torch.ones(BLOCK, BLOCK, dtype=torch.int32)))
    return Tiles(q, tiles, text)


def _run(subject: Any, case: Tiles) -> tuple[Any, ...]:
    state = memory(nothing_seen(case.q.shape))
    for k, v, visible in case.tiles:
        parts = expect_tuple(subject.call(case.q, k, v, visible, *state), STATE)
        state = expect_state(parts, state, case.text)
    return state


def _says(state: Any) -> tuple[Any, ...]:
    """The state in the terms it is compared in; float64, NaN where it says nothing sensible."""
    acc, m, total = (expect_array(part, part.shape).astype(np.float64) for part in state)
    with np.errstate(all="ignore"):
        empty = total == 0
        return acc / np.where(empty, 1.0, total)[..., None], np.where(empty, m, m + np.log2(total))


def _verify(subject: Any, case: Tiles, known: Any = mistakes.TILE) -> None:
    keys = torch.cat([k for k, _, _ in case.tiles])[None, None]
    values = torch.cat([v for _, v, _ in case.tiles])[None, None]
    bound = 2 * rounding_bound(case.q[None, None], keys, values, case.answer())
    compare(_says(_run(subject, case)), case, bound, SAYS, known)


def _check_one(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, _tiles(rng, 1, f"one tile, {BLOCK} rows, {BLOCK} keys, D={D}, nothing seen before"))


def _check_rising(subject: Any, rng: np.random.Generator) -> None:
    for count in (2, 3):
        _verify(
            subject, _tiles(rng, count, f"{count} tiles, each with larger scores than before", rising=True)
        )


def _check_hidden(subject: Any, rng: np.random.Generator) -> None:
    for first in ("half of the tile", "none of it", "the lower triangle"):
        case = _tiles(rng, 2, f"rows see {first}, then another whole tile")
        rows, keys = torch.arange(BLOCK)[:, None], torch.arange(BLOCK)[None, :]
        shown = {
            "half of the tile": keys < BLOCK // 2,
            "none of it": keys < 0,
            "the lower triangle": keys <= rows,
        }
        k, v, visible = case.tiles[0]
        masked = (k, v, (shown[first].expand_as(visible)).to(torch.int32))
        _verify(subject, Tiles(case.q, [masked], f"rows see {first}"))
        _verify(subject, Tiles(case.q, [masked, case.tiles[1]], case.text))


def _check_large(subject: Any, rng: np.random.Generator) -> None:
    for size in (100.0, 1000.0):
        case = _tiles(rng, 2, f"scores of about {size:g}", size=size)
        try:
            _verify(subject, case)
        except Failure as failure:
            broken = not all(np.isfinite(part).all() for part in _says(_run(subject, case)))
            raise (unnamed(failure, mistakes.OVERFLOWS) if broken else failure) from None


def _check_state(subject: Any, rng: np.random.Generator) -> None:
    case = _tiles(rng, 1, "17 tiles of bfloat16 values, all keys equal")
    q, k = (random(rng, 1, D).bfloat16().expand(BLOCK, D).contiguous() for _ in range(2))
    tiles = [(k, random(rng, BLOCK, D).bfloat16(), case.tiles[0][2]) for _ in range(17)]
    case = Tiles(q, tiles, case.text)
    try:
        _verify(subject, case)
    except Failure as failure:
        lost = failure.misconception is None and rounded(_run(subject, case), case)
        raise (unnamed(failure, mistakes.LOW_PRECISION_STATE) if lost else failure) from None


def _states(rng: np.random.Generator, rows: int) -> State:
    """What a program may know of `rows` rows, those divisible by five having seen nothing."""
    total = np.exp2(rng.uniform(0, 6, (1, 1, rows)))
    m, acc = 3 * rng.standard_normal((1, 1, rows)), rng.standard_normal((1, 1, rows, D)) * total[..., None]
    blind = np.arange(rows) % 5 == 4
    total[..., blind], m[..., blind], acc[..., blind, :] = 0.0, -np.inf, 0.0
    return State(*(part.astype(np.float32).astype(np.float64) for part in (acc, m, total)))


def _ends(subject: Any, state: Any, shape: Any, first: bool, last: bool) -> tuple[Any, Any]:
    recorded = subject.record(*state, *poisoned(shape), first=first, last=last)
    if first:
        expect_state_not_read(recorded, f"{shape[-2]} rows, first={first}, last={last}")
    answer = expect_tuple(recorded.answer, (*STATE, *RESULT))
    return expect_state(answer[:3], state, f"first={first}, last={last}"), answer[3:]


def _expect_equal(part: Any, wanted: torch.Tensor, name: str, message: str, text: str) -> None:
    """Raise a Failure with the first element that differs."""
    got = torch.as_tensor(part)
    if (wrong := torch.nonzero(got != wanted)).numel():
        at = tuple(wrong[0].tolist())
        where = ", ".join(map(str, at))
        raise Failure(message, f"{text}: {name}[{where}]: got {got[at]:.4g}, expected {wanted[at]:.4g}")


def _check_first(subject: Any, rng: np.random.Generator) -> None:
    for rows in (BLOCK, BLOCK + 4):
        shape, text = (1, 1, rows, D), f"{rows} rows, first step, NaN in ACC, M and TOTAL"
        state, result = _ends(subject, garbage(shape), shape, True, False)
        expect_same(result, poisoned(shape), mistakes.TOO_EARLY, text)
        for part, wanted, name in zip(state, memory(nothing_seen(shape)), STATE, strict=True):
            _expect_equal(
                part, wanted, name, "A first step that sees no key leaves acc = 0, m = −∞, total = 0.", text
            )


def _check_last(subject: Any, rng: np.random.Generator) -> None:
    for rows in (1, BLOCK, 2 * BLOCK + 3):
        state, text = _states(rng, rows), f"{rows} rows, last step"
        after, result = _ends(subject, memory(state), state.acc.shape, False, True)
        expect_written(*result, text)
        case = Ends(state, text)
        compare(result, case, case.bound(), RESULT, mistakes.ENDS)
        expect_same(after, memory(state), mistakes.LAST_WRITES_STATE, text)


def _check_both(subject: Any, rng: np.random.Generator) -> None:
    for rows in (BLOCK, BLOCK + 4):
        shape, text = (1, 1, rows, D), f"{rows} rows, the only step: first and last"
        after, result = _ends(subject, garbage(shape), shape, True, True)
        expect_written(*result, text)
        out, lse = (expect_array(part, part.shape) for part in result)
        if np.isnan(out).any() or np.isnan(lse).any():
            raise mistakes.DIVIDES_BY_ZERO.failure(text)
        compare(result, Ends(nothing_seen(shape), text), 1e-6, RESULT, mistakes.ENDS)
        expect_same(after, garbage(shape), mistakes.LAST_WRITES_STATE, text)


def _check_middle(subject: Any, rng: np.random.Generator) -> None:
    state, text = _states(rng, BLOCK + 4), "a step between first and last"
    after, result = _ends(subject, memory(state), state.acc.shape, False, False)
    expect_same(result, poisoned(state.acc.shape), mistakes.TOO_EARLY, text)
    for part, wanted, name in zip(after, memory(state), STATE, strict=True):
        message = f"{name} changed in a step that sees no key: it is to come out as it went in."
        _expect_equal(part, wanted, name, message, text)


TILE = Stage(
    id="12.tile",
    function="tile_step",
    title="One tile: rescale, add",
    kind="kernel",
    hints=(
        "A tile brings a score that is larger than all before. acc and total were added up relative to the old maximum: what "
        "are they worth now?",
        "Scores first, −∞ where a row does not see the key. Then the new maximum of what was known and the tile, the "
        "weights relative to it, and the factor for what was known. Look after rows whose new maximum is −∞.",
        r"$m' = \max(m, \max_j s_j)$, $\;a' = a\,2^{m-m'} + \sum_j 2^{s_j-m'} v_j$, $\;t' = t\,2^{m-m'} + \sum_j 2^{s_j-m'}$",
    ),
    misconceptions=mistakes.TILE,
    checks=(
        Check("one", 1, "visible", "a first tile", _check_one),
        Check("rising", 2, "visible", "a second tile with larger scores", _check_rising),
        Check("hidden", 2, "visible", "hidden keys, and rows that see none", _check_hidden),
        Check("large", 1, "stress", "scores in the hundreds and thousands", _check_large),
        Check("state", 1, "held-out", "bfloat16 tiles, float32 state", _check_state),
    ),
)

ENDS = Stage(
    id="12.ends",
    function="ends_step",
    title="The first and the last step",
    kind="kernel",
    hints=(
        "Who wrote what lies in ACC before the first step? Who reads it after the last?",
        "FIRST and LAST are constants when the kernel is made: a plain `if` chooses which loads and stores exist. In the last "
        "step look after rows with total = 0, in the division and in the logarithm.",
        r"$o = a / t$, $\;\mathrm{lse} = (m + \log_2 t)\,\ln 2$; with $t = 0$: $o = 0$, $\mathrm{lse} = -\infty$",
    ),
    misconceptions=mistakes.ENDS,
    checks=(
        Check("first", 1, "visible", "the first step reads no state", _check_first),
        Check("last", 2, "visible", "the last step writes OUT and LSE, and nothing else", _check_last),
        Check("both", 1, "stress", "one step that is both, for rows that see nothing", _check_both),
        Check("middle", 1, "stress", "a step between writes the state alone", _check_middle),
    ),
)
