"""Checks of 12.tile and 12.ends: one int8 tile of a block, and the start and end of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ringlab.errors import apart
from ringlab_course.checking.answers import expect_array, expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.emulated import Emulated, compare_emulated
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.numbers import EPS, largest, rounding_bound
from ringlab_course.exercises.e12_triton_ring_step import mistakes
from ringlab_course.exercises.e12_triton_ring_step.cases import (
    BEGINS,
    RESULT_NAMES,
    RESULT_POINTERS,
    SAYS,
    STATE_NAMES,
    STATE_POINTERS,
    Ends,
    Tiles,
    answered,
    block,
    expect_not_stored,
    expect_same,
    expect_state,
    expect_state_not_read,
    expect_written,
    garbage,
    memory,
    poisoned,
    random,
    rounded,
    scale2,
    unnamed,
    widened,
    with_key,
)
from ringlab_course.exercises.e12_triton_ring_step.emulate import (
    KEYS,
    NOTHING,
    RESULT,
    ROWS,
    STATE,
    State,
    finished,
    nothing_seen,
)

D = 16


def _tiles(
    rng: np.random.Generator, count: int, text: str, *, size: float = 1.0, rising: bool = False
) -> Tiles:
    """Return `count` tiles that every row sees whole.

    With `rising`, each tile has larger scores than the tiles before.
    """
    q = random(rng, ROWS, D, size=size)
    blocks = [block(rng, KEYS, D, size=1.0 + 2 * number if rising else 1.0) for number in range(count)]
    return Tiles(q, [(each, torch.ones(ROWS, KEYS, dtype=torch.int32)) for each in blocks], text)


def _run(subject: Any, case: Tiles) -> tuple[Any, ...]:
    state = memory(nothing_seen(case.q.shape))
    for parts, visible in case.tiles:
        answer = expect_tuple(subject.call(case.q, *parts, visible, *state), STATE_NAMES)
        state = expect_state(answer, state, case.text)
    return state


def _says(state: Any) -> tuple[Any, ...]:
    """Return the state as (acc / total, m + log2(total)) in float64, for comparison.

    An invalid state gives NaN.
    """
    acc, m, total = (expect_array(part, part.shape).astype(np.float64) for part in state)
    with np.errstate(all="ignore"):
        empty = total == 0
        return acc / np.where(empty, 1.0, total)[..., None], np.where(empty, m, m + np.log2(total))


def _verify(subject: Any, *cases: Tiles) -> None:
    compare_emulated((_answered(subject, case) for case in cases), mistakes.TILE)


def _answered(subject: Any, case: Tiles) -> Emulated:
    keys, values = (
        torch.cat([widened(*parts[at : at + 2]) for parts, _ in case.tiles])[None, None] for at in (0, 2)
    )
    bound = 2 * rounding_bound(case.q[None, None].float(), keys, values, case.answer())
    return answered(_says(_run(subject, case)), case, bound, SAYS)


def _check_one(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, _tiles(rng, 1, f"one tile, {ROWS} rows, {KEYS} keys, D={D}, nothing seen before"))


def _check_rising(subject: Any, rng: np.random.Generator) -> None:
    text = "tiles, each with larger scores than before"
    _verify(subject, *(_tiles(rng, count, f"{count} {text}", rising=True) for count in (2, 3)))


def _check_hidden(subject: Any, rng: np.random.Generator) -> None:
    rows, keys = torch.arange(ROWS)[:, None], torch.arange(KEYS)[None, :]
    shown = {
        "half of the tile": keys < KEYS // 2,
        "none of it": keys < 0,
        "the lower triangle": keys <= rows - KEYS,
    }
    cases = []
    for first, seen in shown.items():
        case = _tiles(rng, 2, f"rows see {first}, then another whole tile")
        parts, visible = case.tiles[0]
        masked = (parts, seen.expand_as(visible).to(torch.int32))
        cases.append(Tiles(case.q, [masked], f"rows see {first}"))
        cases.append(Tiles(case.q, [masked, case.tiles[1]], case.text))
    _verify(subject, *cases)


def _check_large(subject: Any, rng: np.random.Generator) -> None:
    for size in (100.0, 1000.0):
        case = _tiles(rng, 2, f"scores of about {size:g}", size=size)
        try:
            _verify(subject, case)
        except Failure as failure:
            broken = not all(np.isfinite(part).all() for part in _says(_run(subject, case)))
            raise (unnamed(failure, mistakes.OVERFLOWS) if broken else failure) from None


def _check_state(subject: Any, rng: np.random.Generator) -> None:
    """Check the state for q in bfloat16.

    All weights are 1 and all scales powers of two, so that float32 sums are exact.
    """
    q = random(rng, 1, D).bfloat16().expand(ROWS, D).contiguous()
    k = torch.from_numpy(rng.integers(-127, 128, (1, D)).astype(np.int8)).expand(KEYS, D).contiguous()
    ks, visible = torch.full((KEYS,), 2.0**-6), torch.ones(ROWS, KEYS, dtype=torch.int32)
    tiles = []
    for _ in range(17):
        v = torch.from_numpy(rng.integers(-127, 128, (KEYS, D)).astype(np.int8))
        vs = torch.from_numpy(np.exp2(rng.integers(-8, -5, KEYS)).astype(np.float32))
        tiles.append(((k, ks, v, vs), visible))
    case = Tiles(q, tiles, "17 tiles with q in bfloat16, all keys equal")
    # the sum in a score is the only sum that is rounded
    products = (q[0].float() * k[0].float()).abs().sum() * 2.0**-6 * scale2(D)
    bound = 4 * EPS * max(2.0, float(products) / largest(case.answer()[1]))
    try:
        compare_emulated([answered(_says(_run(subject, case)), case, bound, SAYS)], mistakes.TILE)
    except Failure as failure:
        lost = failure.misconception is None and rounded(_run(subject, case), case)
        raise (unnamed(failure, mistakes.LOW_PRECISION_STATE) if lost else failure) from None


def _states(rng: np.random.Generator, rows: int) -> State:
    """Return a random state of `rows` rows. Every fifth row has seen no key."""
    total = np.exp2(rng.uniform(0, 6, (1, 1, rows)))
    m, acc = 3 * rng.standard_normal((1, 1, rows)), rng.standard_normal((1, 1, rows, D)) * total[..., None]
    blind = np.arange(rows) % 5 == 4
    total[..., blind], m[..., blind], acc[..., blind, :] = 0.0, -np.inf, 0.0
    return State(*(part.astype(np.float32).astype(np.float64) for part in (acc, m, total)))


def _results(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a random (out, lse) of an earlier run, rounded to float32."""
    out, lse = finished(_states(rng, rows))
    return out.astype(np.float32).astype(np.float64), lse.astype(np.float32).astype(np.float64)


def _floats(parts: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(part.astype(np.float32)) for part in parts)


def _ends(subject: Any, state: Any, result: Any, start: int, last: bool, text: str) -> tuple[Any, Any]:
    """Return state and result after a step that sees no key.

    Raises: Failure if the step touches other memory.
    """
    recorded = subject.record(*state, *result, start=start, last=last)
    if start != STATE:
        expect_state_not_read(recorded, text)
    answer = expect_tuple(recorded.answer, (*STATE_NAMES, *RESULT_NAMES))
    after = expect_state(answer[:3], state, text)
    if last:
        expect_same(after, state, mistakes.LAST_WRITES_STATE, text)
        expect_not_stored(recorded, STATE_POINTERS, mistakes.LAST_WRITES_STATE, text)
    else:
        expect_same(answer[3:], result, mistakes.TOO_EARLY, text)
        expect_not_stored(recorded, RESULT_POINTERS, mistakes.TOO_EARLY, text)
    return after, answer[3:]


def _expect_equal(part: Any, wanted: torch.Tensor, name: str, message: str, text: str) -> None:
    """Raise a Failure that shows the first element that differs."""
    got = torch.as_tensor(part)
    if (wrong := torch.nonzero(got != wanted)).numel():
        at = tuple(wrong[0].tolist())
        where = ", ".join(map(str, at))
        found, right = apart(float(got[at]), float(wanted[at]), digits=4)
        raise Failure(message, f"{text}: {name}[{where}]: got {found}, expected {right}")


def _text(rows: int, start: int, last: bool) -> str:
    return f"{rows} rows, a step that begins {BEGINS[start]}, last={last}"


def _check_first(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on a first step.

    The garbage in memory is random, so that no two gradings have the same inputs.
    """
    for rows in (ROWS, ROWS + 4):
        shape, text = (1, 1, rows, D), _text(rows, NOTHING, False)
        result = tuple(part * float(rng.uniform(1, 2)) for part in poisoned(shape))
        state, _ = _ends(subject, garbage(shape), result, NOTHING, False, text)
        for part, wanted, name in zip(state, memory(nothing_seen(shape)), STATE_NAMES, strict=True):
            message = "A step that begins with nothing and sees no key leaves acc = 0, m = −∞, total = 0."
            _expect_equal(part, wanted, name, message, text)


def _check_last(subject: Any, rng: np.random.Generator) -> None:
    def results() -> Iterator[Emulated]:
        for rows in (1, ROWS, 2 * ROWS + 3):
            state, text = _states(rng, rows), _text(rows, STATE, True)
            _, result = _ends(subject, memory(state), poisoned(state.acc.shape), STATE, True, text)
            expect_written(*result, text)
            case = Ends(state, text)
            yield answered(result, case, case.bound(), RESULT_NAMES)

    compare_emulated(results(), mistakes.ENDS)


def _check_resumed(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on steps that begin from a result.

    If the step is also the last, it returns the result unchanged. Otherwise the state is compared after one
    more key.
    """

    def results() -> Iterator[Emulated]:
        for rows in (1, ROWS, ROWS + 5):
            result, more = _results(rng, rows), rng.standard_normal(D)
            for last in (True, False):
                text = _text(rows, RESULT, last)
                given = garbage(result[0].shape), _floats(result)
                state, after = _ends(subject, *given, RESULT, last, text)
                case = Ends(result, text) if last else Ends(result, f"{text}, then one more key", more)
                if not last:
                    parts = (expect_array(part, part.shape).astype(np.float64) for part in state)
                    after = finished(with_key(State(*parts), more))
                yield answered(after, case, case.bound(), RESULT_NAMES)

    compare_emulated(results(), mistakes.ENDS)


def _check_both(subject: Any, rng: np.random.Generator) -> None:
    for rows in (ROWS, ROWS + 4):
        shape, text = (1, 1, rows, D), _text(rows, NOTHING, True)
        before = tuple(part * float(rng.uniform(1, 2)) for part in poisoned(shape))
        _, result = _ends(subject, garbage(shape), before, NOTHING, True, text)
        out, lse = (expect_array(part, part.shape) for part in result)
        if np.isnan(out).any() or np.isnan(lse).any():
            raise mistakes.DIVIDES_BY_ZERO.failure(text)
        for part, old in zip((out, lse), before, strict=True):
            if (part == old.numpy()).any():
                raise mistakes.UNWRITTEN.failure(text)
        compare_emulated(
            [answered(result, Ends(nothing_seen(shape), text), 1e-6, RESULT_NAMES)], mistakes.ENDS
        )


def _check_middle(subject: Any, rng: np.random.Generator) -> None:
    state, text = _states(rng, ROWS + 4), _text(ROWS + 4, STATE, False)
    after, _ = _ends(subject, memory(state), poisoned(state.acc.shape), STATE, False, text)
    for part, wanted, name in zip(after, memory(state), STATE_NAMES, strict=True):
        message = f"{name} changed in a step that sees no key: it should come out as it went in."
        _expect_equal(part, wanted, name, message, text)


TILE = Stage(
    id="12.tile",
    function="tile_step",
    title="One tile of int8 keys and values",
    kind="kernel",
    hints=(
        "Write a score and an entry of acc as sums over d and over j. Which scale depends on the summation index, and which can "
        "be taken out of the sum?",
        "A key's scale multiplies a column of scores. A value's scale multiplies a column of weights, but only on their way "
        "to v: total is the sum of the weights themselves. The rest is as for tiles without scales, and so are rows that "
        "see nothing.",
        r"$s_j = \mathrm{scale2}\, c_j\, q \cdot k_j$, $\;m' = \max(m, \max_j s_j)$, "
        r"$\;a' = a\,2^{m-m'} + \sum_j (2^{s_j-m'} d_j)\, v_j$, $\;t' = t\,2^{m-m'} + \sum_j 2^{s_j-m'}$ "
        "with the scales $c_j$ of the keys and $d_j$ of the values",
    ),
    misconceptions=mistakes.TILE,
    checks=(
        Check("one", 1, "visible", "a first tile", _check_one),
        Check("rising", 2, "visible", "a second tile with larger scores", _check_rising),
        Check("hidden", 2, "visible", "hidden keys, and rows that see none", _check_hidden),
        Check("large", 1, "stress", "scores in the hundreds and thousands", _check_large),
        Check("state", 1, "visible", "q in bfloat16, the state still in float32", _check_state),
    ),
)

ENDS = Stage(
    id="12.ends",
    function="ends_step",
    title="Where a step begins, and what it leaves",
    kind="kernel",
    hints=(
        "OUT is a mean. How many weights does it stand for, and relative to which maximum? You may choose the maximum: which "
        "one makes the sum of the weights a number that you know?",
        "START and LAST are constants when the kernel is made: a plain `if` chooses which loads and stores exist. From a result, "
        "take its lse, in base 2, for the maximum; the sum of the weights is then 1. In the last step treat rows with "
        "total = 0 apart, in the division and in the logarithm.",
        r"$o = a / t$, $\;\mathrm{lse} = (m + \log_2 t)\,\ln 2$; back: $m = \mathrm{lse} \cdot \log_2 e$, $\;t = 1$, $\;a = o$",
    ),
    misconceptions=mistakes.ENDS,
    checks=(
        Check("first", 1, "visible", "from nothing: no state is read", _check_first),
        Check("last", 1, "visible", "the last step stores OUT and LSE, and nothing else", _check_last),
        Check("resumed", 1, "visible", "from OUT and LSE of an earlier run", _check_resumed),
        Check("both", 1, "stress", "one step that is both, for rows that see nothing", _check_both),
        Check("middle", 1, "stress", "a step in the middle stores the state alone", _check_middle),
    ),
)
