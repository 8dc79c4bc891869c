"""Checks of 08.packed: a function that shares out a sequence of several causal documents evenly."""

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
    read_sets,
    same_sets,
)
from ringlab_course.checking.wrong_answers import misconceptions_of

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Subject

EVEN = 1.01
"""The largest allowed ratio between the busiest rank and the mean, in tokens and in the work of the steps."""
FEWEST = 4096
"""If there are at least this many tokens per rank, the shares must be even for any documents.

With fewer tokens, the shares must be even only if 2P divides all lengths.
"""
SHORT = 3
"""The most tokens in a piece of a short document. A document is short if it has fewer tokens than 2P such pieces."""


def begins(lengths: Sequence[int]) -> list[int]:
    """Return the position of the first token of every document."""
    return [int(x) for x in np.cumsum([0, *lengths[:-1]])] if len(lengths) else []


def step_work(shares: Sequence[np.ndarray], lengths: Sequence[int]) -> np.ndarray:
    """Return the visible pairs of every rank (rows) in every step (columns). Each document has a causal mask of its own."""
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
    """Return the largest number of stretches of neighbouring positions that a share has in one document."""
    share = np.sort(share)
    if len(share) == 0:
        return 0
    document = np.searchsorted(begins(lengths), share, side="right") - 1
    opens = (np.diff(share, prepend=-2) > 1) | (np.diff(document, prepend=-1) > 0)
    return int(np.bincount(document[opens]).max())


def _verify(subject: Subject, cases: Sequence[tuple[list[int], int]]) -> None:
    """Check answers to cases (lengths, P) by measuring how even the shares are, because many answers are right."""

    def ask(lengths: list[int], P: int) -> Question:
        case = f"lengths={_told(lengths)}, P={P}"
        shares = expect_shares(subject.call(lengths, P), P)
        return Question((lengths, P), shares, _fault(shares, lengths, case), case)

    judge(cases, ask, lambda _, fault: fault is None, lambda wrong: wrong.truth, read_sets)


def _fault(shares: list[np.ndarray], lengths: list[int], case: str) -> Failure | None:
    """Return the failure for shares that break one of the task's conditions, or None for good shares."""
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
        return _like("stripes_documents", f"{case}: a rank owns {most} stretches of one document")
    if busiest > EVEN:
        example = (
            f"{case}: busiest rank of each step {busiest:.3f} of the mean, of all steps together {total:.3f}"
        )
        return _uneven(shares, lengths, total, example)
    if tokens > EVEN:
        return _like("uneven_tokens", f"{case}: most tokens {tokens:.3f} of the mean")
    return None


def _like(mistake: str, example: str) -> Failure:
    """Return the failure for these shares, named `mistake` unless a known wrong answer gives the same shares."""
    named = STAGE.misconception(mistake).failure(example)
    failure = Failure(named.message, example)
    failure.otherwise = named
    return failure


def _uneven(shares: list[np.ndarray], lengths: list[int], total: float, example: str) -> Failure:
    owners = np.zeros(sum(lengths), dtype=np.int64)
    for rank, share in enumerate(shares):
        owners[share] = rank
    if all(np.ptp(part) == 0 for part in np.split(owners, begins(lengths)[1:])):
        return _like("whole_documents", example)
    divides = all(n % (2 * len(shares)) == 0 for n in lengths)
    # Tested before the totals, because on two ranks this mistake may give even totals.
    if not divides and max(lengths) < SHORT * 2 * len(shares):
        return _like("remainders_add_up", example)
    if total <= EVEN:
        return _like("totals_only", example)
    return Failure(
        "The work is not even: the busiest ranks of the steps have more than 1.01 of the mean.", example
    )


def _told(lengths: list[int]) -> str:
    return str(lengths) if len(lengths) <= 8 else f"[{', '.join(map(str, lengths[:8]))}, …]"


def _check_small(subject: Subject, rng: np.random.Generator) -> None:
    """Check lengths that 2P divides, and that two calls with the same lengths give the same answer."""
    cases = [
        (_dividing(rng, P, number, most), P)
        for P, number, most in ((2, 3, 9), (3, 3, 9), (8, 5, 9), (1, 3, 400))
    ]
    lengths = _dividing(rng, 8, 9, 9)
    first, second = (expect_shares(subject.call(lengths, 8), 8) for _ in range(2))
    if not same_sets(first, second):
        raise STAGE.misconception("left_to_chance").failure(f"lengths={_told(lengths)}, P=8, twice")
    _verify(subject, cases)


def _dividing(rng: np.random.Generator, P: int, number: int, most: int) -> list[int]:
    """Return lengths that 2P divides. The last document is at least as long as all others together."""
    lengths = 2 * P * rng.integers(1, most + 1, number)
    return [*lengths.tolist()[:-1], int(lengths.sum())]


def _check_mixes(subject: Subject, rng: np.random.Generator) -> None:
    cases = [
        ([_odd(rng, 5000), _odd(rng, 4000)], 2),
        ([_odd(rng, 8000), _odd(rng, 2500), _odd(rng, 4000)], 3),
    ]
    _verify(subject, [*cases, (_mix(rng, 4), 4)])


def _odd(rng: np.random.Generator, about: int) -> int:
    """Return an odd length above the even number `about`. No 2P divides an odd length."""
    return about + 1 + 2 * int(rng.integers(100))


def _check_short(subject: Subject, rng: np.random.Generator) -> None:
    long = (9000 + rng.integers(1000, size=3)).tolist()
    few = rng.integers(1, 12, 3).tolist()
    _verify(subject, [([long[0], 1], 2), ([3, long[1], 2], 2), ([1, few[0], 4 * long[2], few[1], few[2]], 8)])


def _check_many(subject: Subject, rng: np.random.Generator) -> None:
    more, n, long = rng.integers(0, 300, 5).tolist(), int(rng.integers(18, 23)), int(rng.integers(18, 23))
    cases: list[tuple[list[int], int]] = [
        ([9000 + more[0], *[3] * 1500], 2),
        ([n] * (34_000 // n + more[1]), 8),
        ([3] * (3000 + more[2]), 2),
        (rng.permutation([13, 7, 5]).tolist() * (700 + more[3]), 4),
        ([long, 3] * (900 + more[4]), 4),
    ]
    _verify(subject, cases)


def _check_ranks(subject: Subject, rng: np.random.Generator) -> None:
    cases = []
    for P in (1, 2, 3, 8):
        short = rng.lognormal(np.log(300), 1.0, 7 * P).astype(int) + 1
        cases += [
            (_mix(rng, P), P),
            ([*rng.integers(900, 1500, 6).tolist(), int(rng.integers(33_000, 36_000))], P),
            ([*short.tolist(), FEWEST * P], P),
            (rng.integers(1, 41, FEWEST * P * 11 // 200).tolist(), P),
        ]
    _verify(subject, cases)


def _mix(rng: np.random.Generator, P: int) -> list[int]:
    """Return lengths like those of real documents: most have a few thousand tokens, and some are many times longer."""
    lengths: list[int] = []
    while sum(lengths) < FEWEST * P:
        lengths += np.clip(rng.lognormal(np.log(3000), 1.0, 6), 1000, 20_000).astype(int).tolist()
    return lengths


STAGE = Stage(
    id="08.packed",
    function="pack",
    title="Packed documents",
    hints=(
        "A query sees only its own document. How many triangles of work are there, and which part of each should a rank get?",
        "Treat every document as a sequence of its own: cut it into 2P pieces, and give rank r an early piece together with the "
        "late one that makes up for it. Collect for each rank its pieces of all documents, as positions in the packed sequence. "
        "In short documents some pieces are a token longer. Which documents should rank 0 begin, which rank 1, and so on, so "
        "that these tokens spread evenly, whatever the order of the documents?",
        r"document of $n$ tokens from $b$: cut at $b + \lfloor i\,n/2P \rfloor$, $i = 0 \ldots 2P$; in the $m$-th shortest "
        r"document rank $(r + m) \bmod P$ gets pieces $r$ and $2P-1-r$",
    ),
    misconceptions=misconceptions_of("08.packed"),
    checks=(
        Check("small", 2, "visible", "lengths that 2P divides", _check_small),
        Check("mixes", 1, "visible", "lengths that 2P does not divide", _check_mixes),
        Check("short", 1, "visible", "documents shorter than 2P tokens next to long ones", _check_short),
        Check("many", 2, "visible", "hundreds or thousands of short documents", _check_many),
        Check("ranks", 2, "held-out", "many mixtures, 1 to 8 ranks", _check_ranks),
    ),
)
