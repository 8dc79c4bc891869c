"""Checks of 08.packed: several documents in one sequence, each causal by itself, shared out evenly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.positions import (
    Question,
    expect_owned_once,
    expect_shares,
    judge,
    mistake_in,
    same_sets,
)
from ringlab_course.exercises.e08_striped_and_zigzag.packed_mistakes import MEASURED, PACKED, begins

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Subject

EVEN = 1.01
"""What the exercise allows: the busiest rank against the mean, in tokens and in the work of each step."""
FEWEST = 4096
"""From how many tokens a rank on, on the mean, this must hold whatever the documents; below, where 2P divides them."""
SHORT = 64
"""Documents of fewer tokens than this times 2P count as short in a message."""
NAMED = {mistake.name: mistake for mistake in MEASURED}


def step_work(shares: Sequence[np.ndarray], lengths: Sequence[int]) -> np.ndarray:
    """Return the visible pairs of every rank (rows) in every step (columns), each document causal by itself."""
    P, starts = len(shares), np.array(begins(lengths), dtype=np.int64)
    owned = [np.sort(share) for share in shares]
    work = np.zeros((P, P), dtype=np.int64)
    for rank, queries in enumerate(owned):
        first = starts[np.searchsorted(starts, queries, side="right") - 1] if len(queries) else queries
        for step in range(P):
            keys = owned[(rank - step) % P]
            seen = np.searchsorted(keys, queries, side="right") - np.searchsorted(keys, first)
            work[rank, step] = seen.sum()
    return work


def stretches(share: np.ndarray, lengths: Sequence[int]) -> int:
    """Return the largest number of stretches of neighbours that this share has in one document."""
    share = np.sort(share)
    if len(share) == 0:
        return 0
    document = np.searchsorted(begins(lengths), share, side="right") - 1
    opens = (np.diff(share, prepend=-2) > 1) | (np.diff(document, prepend=-1) > 0)
    return int(np.bincount(document[opens]).max())


def _judge_packed(subject: Subject, cases: Sequence[tuple[list[int], int]]) -> None:
    """Judge cases (lengths, P). What is right is measured, so an answer's `truth` is what is wrong with it, or None."""

    def ask(lengths: list[int], P: int) -> Question:
        case = f"lengths={_told(lengths)}, P={P}"
        shares = expect_shares(subject.call(lengths, P), P)
        wrong = _what_is_wrong(shares, lengths, case)
        return Question((lengths, P), shares, wrong, case)

    judge(cases, ask, lambda _, wrong: wrong is None, _explain)


def _explain(answered: list[Question], first: Question) -> Failure:
    failure: Failure = first.truth
    # No one answer is right, so an imitation errs where it is this very answer.
    few_first = sorted(
        answered, key=lambda a: len(a.inputs[0])
    )  # to rule out an imitation takes one short case
    alike = [Question(a.inputs, a.got, None if a.truth else a.got, a.example) for a in few_first]
    mistake = mistake_in(alike, PACKED, lambda a, b: b is not None and same_sets(a, b))
    return mistake.failure(failure.counterexample) if mistake else failure


def _what_is_wrong(shares: list[np.ndarray], lengths: list[int], case: str) -> Failure | None:
    try:
        expect_owned_once(shares, sum(lengths), case)
    except Failure as failure:
        return failure
    work = step_work(shares, lengths)
    mean = work.sum() / len(shares)
    busiest, total = work.max(0).sum() / mean, work.sum(1).max() / mean
    tokens = max(map(len, shares)) * len(shares) / sum(lengths)
    most = max(stretches(share, lengths) for share in shares)
    if most > 2:
        return NAMED["stripes_documents"].failure(f"{case}: a rank owns {most} stretches of one document")
    if busiest > EVEN:
        example = (
            f"{case}: busiest rank of each step {busiest:.3f} of the mean, of all steps together {total:.3f}"
        )
        return _uneven(shares, lengths, total, example)
    if tokens > EVEN:
        return NAMED["uneven_tokens"].failure(f"{case}: most tokens {tokens:.3f} of the mean")
    return None


def _uneven(shares: list[np.ndarray], lengths: list[int], total: float, example: str) -> Failure:
    owners = np.zeros(sum(lengths), dtype=np.int64)
    for rank, share in enumerate(shares):
        owners[share] = rank
    if all(np.ptp(part) == 0 for part in np.split(owners, begins(lengths)[1:])):
        return NAMED["whole_documents"].failure(example)
    if total <= EVEN:
        return NAMED["totals_only"].failure(example)
    if max(lengths) < SHORT * 2 * len(shares):
        return NAMED["remainders_add_up"].failure(example)
    return Failure(
        "The work is not even: the busiest rank of each step has more than 1.01 of the mean.", example
    )


def _told(lengths: list[int]) -> str:
    return str(lengths) if len(lengths) <= 8 else f"[{', '.join(map(str, lengths[:8]))}, …]"


def _check_small(subject: Subject, rng: np.random.Generator) -> None:
    _judge_packed(subject, [([4], 1), ([12, 4], 2), ([12, 6, 18], 3), ([16, 64, 32, 16], 8)])


def _check_mixes(subject: Subject, rng: np.random.Generator) -> None:
    _judge_packed(subject, [([5001, 4003], 2), ([8007, 2501, 3999], 3), (_mix(rng, 4), 4)])


def _check_short(subject: Subject, rng: np.random.Generator) -> None:
    _judge_packed(subject, [([9000, 1], 2), ([3, 9000, 2], 2), ([1, 5, 40_000, 11, 2], 8)])


def _check_many(subject: Subject, rng: np.random.Generator) -> None:
    cases: tuple[tuple[list[int], int], ...] = (
        ([9000, *[3] * 1500], 2),
        ([20] * 1700, 8),
        ([3] * 3000, 2),
        ([13, 7, 5] * 700, 4),
        ([20, 3] * 900, 4),
    )
    _judge_packed(subject, cases)


def _check_ranks(subject: Subject, rng: np.random.Generator) -> None:
    cases = []
    for P in (1, 2, 3, 8):
        short = rng.lognormal(np.log(300), 1.0, 40 * P).astype(int) + 1
        cases += [
            (_mix(rng, P), P),
            ([*rng.integers(900, 1500, 6).tolist(), int(rng.integers(33_000, 36_000))], P),
            ([*short.tolist(), FEWEST * P], P),
            (rng.integers(1, 41, FEWEST * P * 11 // 200).tolist(), P),
        ]
    _judge_packed(subject, cases)


def _mix(rng: np.random.Generator, P: int) -> list[int]:
    """Return lengths as documents have them: most a few thousand tokens, some many times longer."""
    lengths: list[int] = []
    while sum(lengths) < FEWEST * P:
        lengths += np.clip(rng.lognormal(np.log(3000), 1.0, 12), 1000, 20_000).astype(int).tolist()
    return lengths


STAGE = Stage(
    id="08.packed",
    function="pack",
    title="packed documents",
    hints=(
        "A query sees its own document only. How many triangles of work are there, and which part of each should a rank get?",
        "Treat every document as a sequence of its own: cut it into 2P pieces, and give rank r an early piece and the late "
        "one that makes up for it. Collect what each rank gets of all documents, in positions of the packed sequence. In short documents some pieces "
        "are a token longer: see to it that these go round among the ranks.",
        r"document of $n$ tokens from $b$: cut at $b + \lfloor i\,n/2P \rfloor$, $i = 0 \ldots 2P$; in the $m$-th shortest "
        r"document rank $(r + m) \bmod P$ gets pieces $r$ and $2P-1-r$",
    ),
    misconceptions=PACKED,
    checks=(
        Check("small", 2, "visible", "documents that divide into 2P pieces", _check_small),
        Check("mixes", 1, "visible", "lengths that do not divide", _check_mixes),
        Check("short", 1, "visible", "documents shorter than 2P tokens beside long ones", _check_short),
        Check("many", 2, "visible", "hundreds of short documents", _check_many),
        Check("ranks", 2, "held-out", "many mixes, 1 to 8 ranks", _check_ranks),
    ),
)
