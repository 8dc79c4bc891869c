"""Checks of 07.makespan: when the last rank of a ring is done, and who waits how long for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ringlab import layout as layouts
from ringlab_course.checking.answers import expect_tuple
from ringlab_course.checking.contract import Check, Misconception, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.exercises.e07_causal_imbalance.work import token_fold
from ringlab_course.exercises.e07_causal_imbalance.work import truth as pairs

mistake = mistakes_of("07.makespan")

NAMES = ("makespan", "idle")
Answer = tuple[float, np.ndarray]
Ready = Callable[[np.ndarray, np.ndarray, float], np.ndarray]


def _neighbours(times: np.ndarray) -> np.ndarray:
    """The latest of a rank's own time and those of the previous and the next rank."""
    return np.maximum(times, np.maximum(np.roll(times, 1), np.roll(times, -1)))


def _posted_first(starts: np.ndarray, ends: np.ndarray, hop: float) -> np.ndarray:
    return np.maximum(ends, _neighbours(starts) + hop)


def _run(seconds: np.ndarray, hop: float, following: Ready, hops: int | None = None) -> np.ndarray:
    """When each rank has ended; following(starts, ends, hop) says when the next step begins."""
    seconds = np.asarray(seconds, dtype=np.float64)
    starts, P = np.zeros(len(seconds)), len(seconds)
    for step in range(P):
        ends = starts + seconds[:, step]
        starts = following(starts, ends, hop) if step < (P - 1 if hops is None else hops) else ends
    return starts


def _answer(seconds: np.ndarray, makespan: float) -> Answer:
    return makespan, makespan - np.asarray(seconds, dtype=np.float64).sum(axis=1)


def truth(seconds: np.ndarray, hop: float) -> Answer:
    """Return (makespan, idle) of a ring that posts every exchange before it computes."""
    return _answer(seconds, float(_run(seconds, hop, _posted_first).max()))


def _by(following: Ready, hops: int | None = None) -> Callable[..., Answer]:
    return lambda seconds, hop: _answer(seconds, float(_run(seconds, hop, following, hops).max()))


def _average(seconds: np.ndarray, hop: float) -> Answer:
    mean = np.asarray(seconds).mean(axis=0)
    return _answer(seconds, float(np.maximum(mean[:-1], hop).sum() + mean[-1]))


def _plain_average(seconds: np.ndarray, hop: float) -> Answer:
    return _answer(seconds, float(np.asarray(seconds).mean(axis=0).sum()))


def _lockstep(seconds: np.ndarray, hop: float) -> Answer:
    slowest = np.asarray(seconds).max(axis=0)
    return _answer(seconds, float(np.maximum(slowest[:-1], hop).sum() + slowest[-1]))


def _by_origin(seconds: np.ndarray, hop: float) -> Answer:
    P = len(seconds)
    return truth(np.array([[seconds[r, (r - t) % P] for t in range(P)] for r in range(P)]), hop)


def _busiest(seconds: np.ndarray, hop: float) -> Answer:
    return _answer(seconds, float(np.asarray(seconds).sum(axis=1).max()))


def _first_rank(seconds: np.ndarray, hop: float) -> Answer:
    return _answer(seconds, float(_run(seconds, hop, _posted_first)[0]))


def _until_own_end(seconds: np.ndarray, hop: float) -> Answer:
    ends = _run(seconds, hop, _posted_first)
    return float(ends.max()), ends - np.asarray(seconds, dtype=np.float64).sum(axis=1)


def _busy(seconds: np.ndarray, hop: float) -> Answer:
    return truth(seconds, hop)[0], np.asarray(seconds, dtype=np.float64).sum(axis=1)


MISTAKES = (
    mistake("averages_the_ranks", _average),
    mistake("busiest_rank_only", _busiest),
    mistake("everybody_waits", _lockstep),
    mistake("waits_for_all_posts", _by(lambda starts, ends, hop: np.maximum(ends, starts.max() + hop))),
    mistake("columns_by_origin", _by_origin),
    mistake(
        "waits_for_neighbours_ends",
        _by(lambda starts, ends, hop: np.maximum(_neighbours(ends), _neighbours(starts) + hop)),
    ),
    mistake("computes_then_sends", _by(lambda starts, ends, hop: _neighbours(ends) + hop)),
    mistake("waits_for_nobody", _by(lambda starts, ends, hop: np.maximum(ends, starts + hop))),
    mistake(
        "previous_rank_only",
        _by(lambda starts, ends, hop: np.maximum(ends, np.maximum(starts, np.roll(starts, 1)) + hop)),
    ),
    mistake(
        "next_rank_only",
        _by(lambda starts, ends, hop: np.maximum(ends, np.maximum(starts, np.roll(starts, -1)) + hop)),
    ),
    mistake("one_hop_too_many", lambda seconds, hop: _by(_posted_first, len(seconds))(seconds, hop)),
    mistake("looks_at_one_rank", _first_rank),
    mistake("idle_until_own_end", _until_own_end),
    mistake("busy_for_idle", _busy),
)
NAMED = {each.name: each for each in MISTAKES}
COMPARED = (*MISTAKES, replace(NAMED["averages_the_ranks"], imitate=_plain_average))
"""What wrong answers are compared with: an average may ignore the hops."""
FREE = tuple(
    m for m in COMPARED if m.name not in ("waits_for_nobody", "computes_then_sends", "one_hop_too_many")
)
"""The mistakes that hops of no time can tell: the others differ from these, or from the truth, by hops."""


def _verify(
    subject: Any, cases: Iterable[tuple[np.ndarray, float, str]], mistakes: Sequence[Misconception] = COMPARED
) -> None:
    compare_all((_answered(subject, *case) for case in cases), mistakes)


def _answered(subject: Any, seconds: np.ndarray, hop: float, text: str) -> Answered:
    makespan, idle = expect_tuple(subject.call(seconds, hop), NAMES)
    if isinstance(makespan, (int, float)):
        makespan = np.array(float(makespan))
    rows = "; ".join(" ".join(f"{x:g}" for x in row) for row in seconds) if len(seconds) <= 4 else "…"
    case = f"{text}hop {hop:g} s, seconds of the ranks' steps: {rows}"
    return Answered((makespan, idle), truth(seconds, hop), 1e-9, (seconds, hop), NAMES, case)


def _table(*rows: tuple[float, ...]) -> np.ndarray:
    return np.array(rows, dtype=np.float64)


def _check_free(subject: Any, rng: np.random.Generator) -> None:
    """Hops that cost nothing: who waits does so for a neighbour that has not begun."""
    tables = (
        _table((2,)),
        _table((1, 1), (1, 2)),
        _table((1, 0, 0), (1, 2, 0), (1, 2, 2)),
        _table((0, 0, 5), (5, 0, 0), (0, 1, 0)),
        _table((0, 0, 0, 5), (5, 0, 0, 0), (0, 0, 0, 0), (0, 0, 4, 0)),
        _table((5, 0, 0, 0), (0, 0, 0, 0), (0, 5, 0, 0), (0, 0, 0, 0)),
        _table((5, 0, 0, 0), (0, 0, 0, 0), (0, 0, 5, 0), (0, 0, 0, 0)),
        _table((0, 0, 0, 0), (0, 2, 0, 0), (0, 0, 0, 4), (1, 0, 3, 0)),
        _table((4, 0, 0, 0), (0, 4, 0, 0), (0, 0, 4, 0), (0, 0, 0, 4)),
        _table((0, 0, 0, 4), (0, 0, 4, 0), (0, 4, 0, 0), (4, 0, 0, 0)),
    )
    _verify(subject, [(table, 0.0, "") for table in tables], FREE)


def _check_hops(subject: Any, rng: np.random.Generator) -> None:
    """Hops shorter than a step, longer, and between the two."""
    uniform, uneven = np.ones((3, 3)), _table((1, 0, 0), (1, 2, 0), (1, 2, 2))
    cases = [(_table((2,)), 1.0, ""), (_table((1, 1), (1, 1)), 0.5, ""), (_table((1, 1), (1, 2)), 3.0, "")]
    cases += [(uniform, 0.5, ""), (uniform, 1.5, ""), (uneven, 0.5, ""), (uneven, 3.0, "")]
    cases += [(_table((0, 0, 0, 0), (4, 0, 0, 0), (0, 0, 5, 0), (1, 0, 0, 3)), 1.0, "")]
    _verify(subject, [*cases, (_table((3, 0, 0, 1), (0, 0, 2, 0), (0, 1, 0, 0), (1, 0, 0, 2)), 1.0, "")])


def _check_layouts(subject: Any, rng: np.random.Generator) -> None:
    """One second for every visible pair of a real layout."""
    makes = (layouts.contiguous, layouts.striped, layouts.zigzag, token_fold)
    cases = [(pairs(make(32, 4)).astype(np.float64), 0.0, f"{make.__name__}, S=32, P=4: ") for make in makes]
    cases += [(pairs(layouts.zigzag(61, 8)).astype(np.float64), 5.0, "zigzag, S=61, P=8: ")]
    _verify(subject, cases)


def _check_chance(subject: Any, rng: np.random.Generator) -> None:
    for P in (2, 3, 5, 8, 32):
        seconds = rng.exponential(1.0, (P, P))
        _verify(subject, [(seconds, float(rng.uniform(0.0, 2.0)), f"P={P}: ")])


HINTS = (
    "Draw the time axes of three neighbouring ranks, one of them slow in step 0. A rank can begin step t + 1 when two things have "
    "happened: one is its own doing, the other takes three ranks. Which two, and when is each over?",
    "Keep one number per rank: when it began the step. Both times follow from these numbers, the row of `seconds` and `hop`. Mind "
    "which of a neighbour's times matters, that it posts before it computes. The ranks stand in a circle.",
    r"$b_{r,t+1} = \max\bigl(b_{r,t} + s_{r,t},\; \max(b_{r-1,t},\, b_{r,t},\, b_{r+1,t}) + h\bigr)$, makespan "
    r"$= \max_r\,(b_{r,P-1} + s_{r,P-1})$",
)

STAGE = Stage(
    id="07.makespan",
    function="who_waits",
    title="Who waits",
    hints=HINTS,
    misconceptions=MISTAKES,
    checks=(
        Check("free", 2, "visible", "hops that cost nothing", _check_free),
        Check("hops", 2, "visible", "hops that take time", _check_hops),
        Check("layouts", 1, "visible", "the work of real layouts", _check_layouts),
        Check("chance", 1, "held-out", "any seconds, many ranks", _check_chance),
    ),
)
