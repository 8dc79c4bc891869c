"""Checks of 13.lanes: seconds of computing and copying, what of the copying is exposed, and the share that overlaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ringlab_course.checking.answers import expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.numbers import expect_number
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("13.lanes")

NAMES = ("computing", "copying", "exposed", "overlap")
BOUND = 1e-9
MICRO = 1e-6
COMPUTE, COPY = 0, 1
Array = np.ndarray
Answer = tuple[float, float, float, float]


def seconds(spans: Array) -> float:
    """Return the seconds that spans (n, 2) of begin and duration in µs cover together."""
    total, reached = 0.0, -np.inf
    for start, length in sorted(spans.tolist()):
        total += max(0.0, start + length - max(start, reached))
        reached = max(reached, start + length)
    return total * MICRO


def _lane(events: Array, rank: int, number: int) -> Array:
    return events[(events[:, 0] == rank) & (events[:, 1] == number)][:, 2:]


def _answer(computing: float, copying: float, exposed: float) -> Answer:
    return computing, copying, exposed, 1 - exposed / copying if copying else 1.0


def _settled(answer: Answer, right: Answer, reach: float) -> Answer:
    """Return the answer with what differs from the truth by rounding alone put to the truth.

    Differences of unions that should be 0 are not: seconds are held against how far the spans reach, and overlap against 1.
    """
    near = [
        abs(a - b) <= BOUND * s for a, b, s in zip(answer, right, (reach, reach, reach, 1.0), strict=True)
    ]
    first, second, third, fourth = (b if same else a for a, b, same in zip(answer, right, near, strict=True))
    return first, second, third, fourth


def truth(events: Array, rank: int) -> Answer:
    """Return (computing, copying, exposed, overlap) of a rank: the truth of this stage."""
    return _counted(seconds)(events, rank)


def _counted(length: Callable[[Array], float]) -> Callable[[Array, int], Answer]:
    def counted(events: Array, rank: int) -> Answer:
        computing, copying = _lane(events, rank, COMPUTE), _lane(events, rank, COPY)
        together = length(events[(events[:, 0] == rank)][:, 2:])
        return _answer(length(computing), length(copying), together - length(computing))

    return counted


def _last_end(spans: Array) -> float:
    """Sorted, but what has been reached is the end of the last span, not the furthest end."""
    total, reached = 0.0, -np.inf
    for start, length in sorted(spans.tolist()):
        total += max(0.0, start + length - max(start, reached))
        reached = start + length
    return total * MICRO


def _in_order(spans: Array) -> float:
    total, reached = 0.0, -np.inf
    for start, length in spans.tolist():
        total += max(0.0, start + length - max(start, reached))
        reached = max(reached, start + length)
    return total * MICRO


def _stretch(spans: Array) -> float:
    return float((spans.sum(axis=1).max() - spans[:, 0].min()) * MICRO) if len(spans) else 0.0


def _adds(spans: Array) -> float:
    return float(spans[:, 1].sum() * MICRO)


def _each_lane(length: Callable[[Array], float]) -> Callable[[Array, int], Answer]:
    """Lanes measured in another way, and what is exposed out of right unions."""

    def counted(events: Array, rank: int) -> Answer:
        exposed = truth(events, rank)[2]
        computing, copying = (length(_lane(events, rank, number)) for number in (COMPUTE, COPY))
        return _answer(computing, copying, exposed)

    return counted


def _difference(events: Array, rank: int) -> Answer:
    computing, copying, _, _ = truth(events, rank)
    return _answer(computing, copying, max(0.0, copying - computing))


def _others_hide(events: Array, rank: int) -> Answer:
    computing, copying, _, _ = truth(events, rank)
    others = events[events[:, 1] == COMPUTE][:, 2:]
    together = seconds(np.concatenate([others, _lane(events, rank, COPY)]))
    return _answer(computing, copying, together - seconds(others))


def _all_ranks(events: Array, rank: int) -> Answer:
    return truth(np.column_stack([np.full(len(events), rank), events[:, 1:]]), rank)


def _as_end(events: Array, rank: int) -> Answer:
    lengths = np.maximum(events[:, 3] - events[:, 2], 0.0)
    return truth(np.column_stack([events[:, :3], lengths]), rank)


def _with_overlap(overlap: Callable[[Answer], float]) -> Callable[[Array, int], Answer]:
    def imitate(events: Array, rank: int) -> Answer:
        found = truth(events, rank)
        return (*found[:3], overlap(found))

    return imitate


LANES = (
    mistake("adds_durations", _each_lane(_adds)),
    mistake("from_first_to_last", _each_lane(_stretch)),
    mistake("last_end", _counted(_last_end)),
    mistake("assumes_order", _counted(_in_order)),
    mistake("microseconds", lambda events, rank: (*(x / MICRO for x in truth(events, rank)[:3]), truth(events, rank)[3])),
    mistake("duration_as_end", _as_end),
)  # fmt: skip
EXPOSED = (
    mistake("difference_of_totals", _difference),
    mistake("exposed_share", _with_overlap(lambda found: found[2] / found[1] if found[1] else 0.0)),
    mistake("share_of_computing", _with_overlap(lambda found: (found[1] - found[2]) / found[0] if found[0] else 1.0)),
)  # fmt: skip
RANKS = (
    mistake("all_ranks", _all_ranks),
    mistake("others_hide", _others_hide),
)  # fmt: skip
NOTHING = mistake("nothing_copied")
MISTAKES = (*LANES, *EXPOSED, *RANKS, NOTHING)


def _compare(subject: Any, cases: Iterable[tuple[Array, int]]) -> None:
    def asked() -> Iterator[Answered]:
        for events, rank in cases:
            text = f"rank {rank}, {len(events)} events"
            if len(events) <= 6:
                text += f" (rank, lane, begin µs, duration µs): {events.tolist()}"
            parts = expect_tuple(subject.call(events, rank), NAMES)
            computing, copying, exposed, overlap = map(expect_number, parts)
            right = truth(events, rank)
            if right[1] == 0 and np.isnan(overlap):
                raise NOTHING.failure(text)
            reach = _stretch(events[:, 2:])
            answer = tuple(map(np.asarray, _settled((computing, copying, exposed, overlap), right, reach)))
            yield Answered(answer, tuple(map(np.asarray, right)), BOUND, (events, rank), NAMES, text)

    compare_all(asked(), MISTAKES)


def _events(*rows: tuple[float, ...]) -> Array:
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def drawn(rng: np.random.Generator, ranks: int, count: int) -> Array:
    """Return events of both lanes of all ranks, overlapping and nested, in any order, µs from some 10⁶ on."""
    lanes = [(rank, lane) for rank in range(ranks) for lane in (COMPUTE, COPY) for _ in range(count)]
    starts = 1e6 + np.round(rng.uniform(0, 100 * count, len(lanes)), 3)
    lengths = np.round(rng.exponential(60.0, len(lanes)), 3)
    return rng.permutation(np.column_stack([np.array(lanes, dtype=np.float64), starts, lengths]))


def _check_lanes(subject: Any, rng: np.random.Generator) -> None:
    """Spans that overlap, nest and leave gaps; nothing is computed, so that all copying is exposed."""
    nested = _events((0, 1, 100, 60), (0, 1, 110, 10), (0, 1, 130, 50), (0, 1, 260, 20))
    gaps = _events((0, 1, 500, 30), (0, 1, 300, 40), (0, 1, 520, 25), (0, 1, 330, 5))
    alone = drawn(rng, 1, 6)
    _compare(subject, [(nested, 0), (gaps, 0), (alone[alone[:, 1] == COPY], 0)])


def _check_exposed(subject: Any, rng: np.random.Generator) -> None:
    """Each lane's spans apart from one another, so that only the two lanes together matter."""
    before = _events((0, 0, 0, 100), (0, 1, 100, 50), (0, 0, 200, 100), (0, 1, 250, 80))
    beside = _events((0, 0, 0, 100), (0, 1, 20, 60), (0, 0, 110, 40), (0, 1, 90, 30))
    _compare(subject, [(before, 0), (beside, 0)])


def _check_ranks(subject: Any, rng: np.random.Generator) -> None:
    two = _events((0, 0, 0, 100), (0, 1, 100, 50), (1, 0, 100, 60), (1, 1, 20, 40))
    events = drawn(rng, 3, 5)
    apart = _events((0, 0, 0.1, 33.3), (0, 1, 77.7, 12.34), (0, 0, 100.9, 1.7), (0, 1, 110.3, 3.3))
    _compare(subject, [(two, 0), (two, 1), (apart, 0), *((events, rank) for rank in range(3))])


def _check_edges(subject: Any, rng: np.random.Generator) -> None:
    """A rank that copies nothing, one that computes nothing, one that does neither; a span of no length."""
    some = _events((0, 0, 10, 20), (0, 0, 30, 0), (1, 1, 5, 10), (0, 0, 25, 30))
    _compare(subject, [(some, 0), (some, 1), (some, 2)])


STAGE = Stage(
    id="13.lanes",
    function="lanes",
    title="Lanes of a profile",
    hints=(
        "Two spans of one lane overlap. How much time do they cover together? And three, one of them inside another?",
        "Sort by beginning and walk, with a mark at the furthest end so far: that is the time covered, the union. For what is exposed, three unions "
        "are enough: of computing, of copying, and of both together.",
        r"$\text{exposed} = |A \cup B| - |A|$ with $A$ computing and $B$ copying; $\text{overlap} = 1 - \text{exposed}/|B|$",
    ),
    misconceptions=MISTAKES,
    checks=(
        Check("lanes", 2, "visible", "spans that overlap, nest, leave gaps, in any order", _check_lanes),
        Check("exposed", 2, "visible", "what is computed at the same moment, and what is not", _check_exposed),
        Check("ranks", 1, "visible", "several ranks in one trace", _check_ranks),
        Check("edges", 1, "stress", "ranks that copy nothing, compute nothing, do nothing", _check_edges),
    ),
)  # fmt: skip
