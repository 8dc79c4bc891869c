"""Checks of 13.lanes: a rank's computing, copying and exposed seconds within its steps, and the overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ringlab_course.checking.answers import expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.numbers import expect_number
from ringlab_course.checking.wrong_answers import misconceptions_of

NAMES = ("computing", "copying", "exposed", "overlap")
BOUND = 1e-9
MICRO = 1e-6
COMPUTE, COPY, STEP = 0, 1, 2
Array = np.ndarray
Answer = tuple[float, float, float, float]


def seconds(spans: Array) -> float:
    """Return the seconds that spans cover together.

    spans: the start and the duration of each span in µs, (n, 2).
    """
    total, reached = 0.0, -np.inf
    for start, length in sorted(spans.tolist()):
        total += max(0.0, start + length - max(start, reached))
        reached = max(reached, start + length)
    return total * MICRO


def _lane(events: Array, rank: int, *numbers: int) -> Array:
    return events[(events[:, 0] == rank) & np.isin(events[:, 1], numbers)][:, 2:]


def _answer(computing: float, copying: float, exposed: float) -> Answer:
    return computing, copying, exposed, 1 - exposed / copying if copying else 1.0


def _settled(answer: Answer, right: Answer, reach: float) -> Answer:
    """Return the answer, with each part that differs from the truth only by rounding replaced by the truth.

    Unions are subtracted, so a part that should be 0 may differ from 0 by rounding. Therefore seconds are
    compared relative to the length that the spans reach over, and overlap is compared relative to 1.
    """
    near = [
        abs(a - b) <= BOUND * s for a, b, s in zip(answer, right, (reach, reach, reach, 1.0), strict=True)
    ]
    if right[1] == 0 != answer[1] and near[1]:
        near[3] = True  # the copying is a rounding error, so its overlap means nothing
    first, second, third, fourth = (b if same else a for a, b, same in zip(answer, right, near, strict=True))
    return first, second, third, fourth


def truth(events: Array, rank: int) -> Answer:
    """Return (computing, copying, exposed, overlap) of a rank within its steps, this stage's right answer."""
    steps = _lane(events, rank, STEP)
    either, computing, copying = (
        seconds(_clipped(_lane(events, rank, *lanes), steps))
        for lanes in ((COMPUTE, COPY), (COMPUTE,), (COPY,))
    )
    return _answer(computing, copying, either - computing)


def _clipped(spans: Array, steps: Array) -> Array:
    """Return the parts of the spans that are inside the steps."""
    parts = [
        (max(start, begin), min(start + length, begin + long) - max(start, begin))
        for start, length in spans.tolist()
        for begin, long in steps.tolist()
        if min(start + length, begin + long) > max(start, begin)
    ]
    return np.array(parts, dtype=np.float64).reshape(-1, 2)


def _reach(events: Array) -> float:
    """Return the seconds from the start of the first span to the end of the last."""
    return float((events[:, 2:].sum(axis=1).max() - events[:, 2].min()) * MICRO)


def _read(answer: Any) -> tuple[Array, float]:
    """Return the seconds as one array, which is compared relative to its largest entry, and 1 + overlap."""
    computing, copying, exposed, overlap = map(expect_number, expect_tuple(answer, NAMES))
    return np.array([computing, copying, exposed]), 1.0 + overlap


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
                raise STAGE.misconception("nothing_copied").failure(text)
            answer = _settled((computing, copying, exposed, overlap), right, _reach(events))
            yield Answered(
                tuple(map(np.asarray, answer)), tuple(map(np.asarray, right)), BOUND, names=NAMES, text=text
            )

    compare_all(asked(), read=_read)


def _events(rng: np.random.Generator, *rows: tuple[float, ...]) -> Array:
    """Return these rows as events, with all times multiplied by one random factor and shifted."""
    events = np.array(rows, dtype=np.float64).reshape(-1, 4)
    events[:, 2:] *= rng.integers(2, 50)
    events[:, 2] += rng.integers(10_000)
    return events


def drawn(rng: np.random.Generator, ranks: int, count: int) -> Array:
    """Return random events of all ranks, in any order, that overlap and are nested.

    Each rank has two steps. Times begin at about 10⁶ µs.
    """
    lanes = [(rank, lane) for rank in range(ranks) for lane in (COMPUTE, COPY) for _ in range(count)]
    starts = 1e6 + np.round(rng.uniform(0, 100 * count, len(lanes)), 3)
    lengths = np.round(rng.exponential(60.0, len(lanes)), 3)
    steps = [
        (rank, STEP, 1e6 + round(float(at + rng.uniform(0, 10)), 3), round(float(rng.uniform(30, 40)) * count, 3))
        for rank in range(ranks)
        for at in (10 * count, 60 * count)
    ]  # fmt: skip
    return rng.permutation(np.concatenate([np.column_stack([np.array(lanes), starts, lengths]), steps]))


def _check_lanes(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on spans that overlap, are nested and leave gaps inside one step.

    Without computing, all copying is exposed.
    """
    step = (0, STEP, 100, 900)
    nested = _events(rng, (0, 1, 100, 60), (0, 1, 110, 10), (0, 1, 130, 50), (0, 1, 260, 20), step)
    gaps = _events(rng, (0, 1, 500, 30), (0, 1, 300, 40), step, (0, 1, 520, 25), (0, 1, 330, 5))
    alone = drawn(rng, 1, 6)
    copies = np.concatenate([alone[alone[:, 1] == COPY], [[0, STEP, 1e6, 1e4]]])
    _compare(subject, [(nested, 0), (gaps, 0), (copies, 0)])


def _check_exposed(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on lanes whose own spans do not overlap.

    So only the relation of the two lanes matters.
    """
    step = (0, STEP, 0, 400)
    before = _events(rng, (0, 0, 0, 100), (0, 1, 100, 50), (0, 0, 200, 100), (0, 1, 250, 80), step)
    beside = _events(rng, (0, 0, 0, 100), (0, 1, 20, 60), (0, 0, 110, 40), (0, 1, 90, 30), step)
    _compare(subject, [(before, 0), (beside, 0)])


def _check_steps(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on spans before, after and between steps, and spans that cross an edge of a step."""
    warm_up = _events(
        rng, (0, 0, 0, 90), (0, 1, 60, 80), (0, STEP, 100, 100), (0, 0, 120, 60), (0, 1, 170, 20)
    )
    two = _events(
        rng,
        (0, STEP, 10, 40),
        (0, STEP, 70, 30),
        (0, 0, 0, 20),
        (0, 0, 35, 10),
        (0, 1, 30, 55),
        (0, 0, 95, 20),
    )
    _compare(subject, [(warm_up, 0), (two, 0)])  # fmt: skip


def _check_ranks(subject: Any, rng: np.random.Generator) -> None:
    two = _events(
        rng, (0, 0, 0, 100), (0, 1, 100, 50), (1, 0, 100, 60), (1, 1, 20, 40),
        (0, STEP, 0, 200), (1, STEP, 10, 170),
    )  # fmt: skip
    events = drawn(rng, 3, 5)
    idle = _events(rng, (0, 0, 10, 20), (1, 1, 15, 20), (0, STEP, 0, 40), (1, STEP, 5, 40))
    _compare(subject, [(two, 0), (two, 1), *((events, rank) for rank in range(3)), (idle, 0)])


def _check_edges(subject: Any, rng: np.random.Generator) -> None:
    """Check answers in edge cases.

    Some ranks have no copies, no computing, neither of the two, or no step. Two steps touch, and one span
    has length 0.
    """
    some = _events(
        rng, (0, 0, 10, 20), (0, 0, 30, 0), (1, 1, 5, 10), (0, 0, 25, 30), (3, 0, 10, 20), (3, 1, 15, 20),
        (0, STEP, 0, 20), (0, STEP, 20, 40), (1, STEP, 0, 10), (2, STEP, 0, 10),
    )  # fmt: skip
    _compare(subject, [(some, 0), (some, 1), (some, 2), (some, 3)])


STAGE = Stage(
    id="13.lanes",
    function="lanes",
    title="Lanes of a profile",
    hints=(
        "How much time do two spans of one lane cover together if they overlap? And how much of that is inside a step?",
        "The lesson's union is enough. The time that two lanes share follows from three unions: of the first, of the second, "
        "and of both together. Or cut each span to the steps first.",
        r"$|A \cap F| = |A| + |F| - |A \cup F|$ with $F$ the steps; exposed: $|(A \cup B) \cap F| - |A \cap F|$ with $A$ "
        r"computing, $B$ copying",
    ),
    misconceptions=misconceptions_of("13.lanes"),
    checks=(
        Check("lanes", 1, "visible", "spans that overlap, nest, leave gaps, in any order", _check_lanes),
        Check("exposed", 1, "visible", "copying with and without a computation at that moment", _check_exposed),
        Check("steps", 2, "visible", "spans outside a step, and over its edges", _check_steps),
        Check("ranks", 1, "visible", "several ranks in one trace, one of which copies nothing", _check_ranks),
        Check("edges", 1, "stress", "ranks that copy nothing, compute nothing, have no step", _check_edges),
    ),
)  # fmt: skip
