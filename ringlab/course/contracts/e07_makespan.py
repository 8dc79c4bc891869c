"""Checks of 07.makespan: when the last rank of a ring is done, and who waits how long for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ringlab import layout as layouts
from ringlab.course.answers import expect_tuple
from ringlab.course.contract import Check, Misconception, Stage
from ringlab.course.contracts.e07_explain import Answered, compare_all
from ringlab.course.contracts.e07_runs import token_fold
from ringlab.course.contracts.e07_work import truth as pairs

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
    Misconception(
        "averages_the_ranks",
        "You averaged over the ranks. Work that is dealt unevenly is not shared while the ring runs: a rank that is done early "
        "waits, it does not help.",
        _average,
    ),
    Misconception(
        "busiest_rank_only",
        "No rank waits for another here, so the busiest one is done last, when its own work is. But its next block may not be here yet: "
        "the neighbours it exchanges with must have begun the step too.",
        _busiest,
    ),
    Misconception(
        "everybody_waits",
        "You let all ranks wait for the slowest one in each step. That is an upper bound: only neighbours exchange, and a "
        "delay travels one rank a step, so slow steps of different ranks can overlap.",
        _lockstep,
    ),
    Misconception(
        "waits_for_all_posts",
        "A rank was made to wait until all ranks had posted. It exchanges with its neighbours only: what counts is when the previous, "
        "the next and it itself began the step.",
        _by(lambda starts, ends, hop: np.maximum(ends, starts.max() + hop)),
    ),
    Misconception(
        "columns_by_origin",
        "The columns were read as owners. They are steps: seconds[r, t] is what rank r computes in step t, whatever block that is.",
        _by_origin,
    ),
    Misconception(
        "waits_for_neighbours_ends",
        "A rank was made to wait until its neighbours had computed. They send before they compute: what counts is when they "
        "began the step.",
        _by(lambda starts, ends, hop: np.maximum(_neighbours(ends), _neighbours(starts) + hop)),
    ),
    Misconception(
        "computes_then_sends",
        "Every hop was added to the computation. The exchange is posted before the step computes, so a hop "
        "costs time only where it takes longer than the computation beside it.",
        _by(lambda starts, ends, hop: _neighbours(ends) + hop),
    ),
    Misconception(
        "waits_for_nobody",
        "Nobody waits for anybody here: each rank computes, adds a hop, goes on. A block comes from the previous rank; it cannot "
        "arrive before that rank has posted it.",
        _by(lambda starts, ends, hop: np.maximum(ends, starts + hop)),
    ),
    Misconception(
        "previous_rank_only",
        "A rank waited for the previous rank, of whom it receives, and not for the next one. A send is over only when it is being "
        "received: the next rank must have begun the step as well.",
        _by(lambda starts, ends, hop: np.maximum(ends, np.maximum(starts, np.roll(starts, 1)) + hop)),
    ),
    Misconception(
        "next_rank_only",
        "A rank waited for the next rank and not for the previous one, of whom it receives its block.",
        _by(lambda starts, ends, hop: np.maximum(ends, np.maximum(starts, np.roll(starts, -1)) + hop)),
    ),
    Misconception(
        "one_hop_too_many",
        "There is a hop after the last step. P blocks need P − 1 hops; in the last step nothing is posted.",
        lambda seconds, hop: _by(_posted_first, len(seconds))(seconds, hop),
    ),
    Misconception(
        "looks_at_one_rank",
        "This is when rank 0 is done. The makespan is over when the last rank is.",
        _first_rank,
    ),
    Misconception(
        "idle_until_own_end",
        "The makespan is right; idle stops at each rank's own end. Who is done first cannot go on either: the "
        "layer's result is there when the last rank's is. Idle is the makespan less what the rank computed.",
        _until_own_end,
    ),
    Misconception(
        "busy_for_idle",
        "The makespan is right; what should be idle time is busy time. Idle is the makespan less that.",
        _busy,
    ),
)
NAMED = {mistake.name: mistake for mistake in MISTAKES}
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
        Check(
            "free",
            2,
            "visible",
            "hops that cost nothing",
            _check_free,
            (
                "averages_the_ranks",
                "busiest_rank_only",
                "everybody_waits",
                "waits_for_all_posts",
                "columns_by_origin",
                "waits_for_neighbours_ends",
                "previous_rank_only",
                "next_rank_only",
                "looks_at_one_rank",
                "idle_until_own_end",
                "busy_for_idle",
            ),
        ),
        Check(
            "hops",
            2,
            "visible",
            "hops that take time",
            _check_hops,
            ("computes_then_sends", "waits_for_nobody", "one_hop_too_many"),
        ),
        Check(
            "layouts",
            1,
            "visible",
            "the work of real layouts",
            _check_layouts,
            ("waits_for_neighbours_ends",),
        ),
        Check(
            "chance",
            1,
            "held-out",
            "any seconds, many ranks",
            _check_chance,
            ("makespan_eight_ranks_at_most",),
        ),
    ),
)
