"""Checks of 07.makespan: when the last rank of a ring is done, and who waits how long for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from ringlab import layout as layouts
from ringlab_course.checking.answers import expect_tuple, relative_error
from ringlab_course.checking.contract import Check, Misconception, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.exercises.e07_causal_imbalance.work import token_fold
from ringlab_course.exercises.e07_causal_imbalance.work import truth as pairs

mistake = mistakes_of("07.makespan")

NAMES = ("makespan", "idle")
Answer = tuple[float, np.ndarray]
Case = tuple[np.ndarray, float]
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


def _rows_are_steps(seconds: np.ndarray, hop: float) -> Answer:
    return _answer(seconds, truth(np.transpose(seconds), hop)[0])


def _open_ring(starts: np.ndarray, ends: np.ndarray, hop: float) -> np.ndarray:
    padded = np.pad(starts, 1)
    return np.maximum(ends, np.maximum(starts, np.maximum(padded[:-2], padded[2:])) + hop)


def _idle_share(seconds: np.ndarray, hop: float) -> Answer:
    makespan, idle = truth(seconds, hop)
    return makespan, idle / makespan


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
    mistake("ignores_hop", lambda seconds, hop: truth(seconds, 0.0)),
    mistake("rows_are_steps", _rows_are_steps),
    mistake("open_ring", _by(_open_ring)),
    mistake("idle_as_share", _idle_share),
)
NAMED = {each.name: each for each in MISTAKES}
COMPARED = (*MISTAKES, replace(NAMED["averages_the_ranks"], imitate=_plain_average))
"""What wrong answers are compared with: an average may ignore the hops."""
HOPS = ("waits_for_nobody", "computes_then_sends", "one_hop_too_many", "ignores_hop")
FREE = tuple(m for m in COMPARED if m.name not in HOPS)
"""The mistakes that show where hops take no time: the others differ from these, or from the truth, by hops."""


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


def _sparse(rng: np.random.Generator, P: int) -> np.ndarray:
    """Return seconds of P ranks, whole and mostly small; in about half of the steps a rank computes nothing."""
    return rng.integers(1, 10, (P, P)) * rng.integers(0, 2, (P, P)).astype(np.float64)


def _check_free(subject: Any, rng: np.random.Generator) -> None:
    """Hops that cost nothing: a rank waits only for neighbours that have not begun the step."""
    delayed = (  # one or two ranks are late, and the delay reaches some ranks and not others
        _table((1, 1), (1, 2)),
        _table((1, 0, 0), (1, 2, 0), (1, 2, 2)),
        _table((0, 0, 0, 1), (1, 0, 0, 0), (0, 0, 0, 0), (0, 0, 1, 0)),
        _table((1, 0, 0, 0), (0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 0)),
        _table((1, 0, 0, 0), (0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 0)),
        _table((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)),
    )
    cases = [
        (table * int(rng.integers(20, 100)) + rng.integers(0, 10, table.shape), 0.0) for table in delayed
    ]
    cases += _telling(lambda: (_sparse(rng, int(rng.integers(4, 7))), 0.0), FREE)
    _verify(subject, [(*case, "") for case in ((_single(rng), 0.0), *cases)], FREE)


def _telling(draw: Callable[[], Case], mistakes: Sequence[Misconception]) -> list[Case]:
    """Draw cases until any two mistakes, and any mistake and the truth, differ in two of them; keep those that help."""
    known = [("", truth), *((mistake.name, mistake.imitate) for mistake in mistakes if mistake.imitate)]
    lacking = {(a, b): 2 for a, b in combinations(range(len(known)), 2) if known[a][0] != known[b][0]}
    cases = []
    while lacking:
        case = draw()
        answers = [answer(*case) for _, answer in known]
        told = [pair for pair in lacking if relative_error(*(answers[i] for i in pair)) > 1e-6]
        cases += [case] if told else []
        lacking = {pair: times - (pair in told) for pair, times in lacking.items() if times > (pair in told)}
    return cases


def _single(rng: np.random.Generator) -> np.ndarray:
    """Return the seconds of one rank alone."""
    return _table((int(rng.integers(100, 10_000)) / 100,))


def _check_hops(subject: Any, rng: np.random.Generator) -> None:
    """Hops shorter than a step, longer, and in between."""
    uniform, uneven = np.ones((3, 3)), _table((1, 0, 0), (1, 2, 0), (1, 2, 2))
    cases = [(_table((1, 1), (1, 1)), 0.5), (_table((1, 1), (1, 2)), 3.0), (uniform, 0.5), (uniform, 1.5)]
    cases += [(uneven, 0.5), (uneven, 3.0)]
    scales = rng.integers(101, 1000, len(cases)) / 100
    drawn = [(table * scale, hop * scale) for (table, hop), scale in zip(cases, scales, strict=True)]
    drawn += _telling(lambda: (_sparse(rng, int(rng.integers(3, 6))), rng.integers(1, 40) / 10), COMPARED)
    _verify(subject, [(table, float(hop), "") for table, hop in ((_single(rng), 1.0), *drawn)])


def _check_layouts(subject: Any, rng: np.random.Generator) -> None:
    """So many seconds for every visible pair of a real layout."""
    makes, pace = (
        (layouts.contiguous, layouts.striped, layouts.zigzag, token_fold),
        int(rng.integers(2, 100)) / 8,
    )
    S = 8 * int(rng.integers(3, 30))
    cases = [(pairs(make(S, 4)) * pace, 0.0, f"{make.__name__}, S={S}, P=4: ") for make in makes]
    S = int(rng.integers(50, 300))
    cases += [(pairs(layouts.zigzag(S, 8)) * pace, 5.0, f"zigzag, S={S}, P=8: ")]
    _verify(subject, cases)


def _check_chance(subject: Any, rng: np.random.Generator) -> None:
    for P in (2, 3, 5, 8, 32):
        seconds = rng.exponential(1.0, (P, P))
        _verify(subject, [(seconds, float(rng.uniform(0.0, 2.0)), f"P={P}: ")])


HINTS = (
    "Draw the time axes of three neighbouring ranks, one of them slow in step 0. A rank can begin step t + 1 once two things "
    "are over: one that it does alone, and one that takes three ranks. Which two, and when is each over?",
    "Keep one number per rank: the time at which it began the step. Both times follow from these numbers, from the row of "
    "`seconds` and from `hop`. A rank posts before it computes: so which of a neighbour's times matters? Rank 0 is a "
    "neighbour of rank P − 1.",
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
        Check("chance", 1, "held-out", "any seconds, up to 32 ranks", _check_chance),
    ),
)
