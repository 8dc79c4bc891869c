"""Checks of 08.packed: several causal documents in one sequence, shared out evenly; its common mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ringlab_course.checking.contract import Check, Misconception, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.positions import (
    Question,
    expect_owned_once,
    expect_shares,
    judge,
    mistake_in,
    same_sets,
)
from ringlab_course.checking.wrong_answers import mistakes_of

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Subject

mistake = mistakes_of("08.packed")

Shares = list[np.ndarray]
Cut = Callable[[int, int], list[int]]


def evenly(n: int, pieces: int) -> list[int]:
    """Return where `pieces` pieces of n tokens begin and end, as equal as they can be."""
    return [i * n // pieces for i in range(pieces + 1)]


def _rounded_up(n: int, pieces: int) -> list[int]:
    return [min(n, i * -(-n // pieces)) for i in range(pieces + 1)]


def _longest_first(n: int, pieces: int) -> list[int]:
    return [i * (n // pieces) + min(i, n % pieces) for i in range(pieces + 1)]


CUTS: dict[str, Cut] = {"": evenly, "_rounded_up": _rounded_up, "_longest_first": _longest_first}
"""Three ways to cut a length that 2P does not divide; a mistake may be made with any of them."""


def begins(lengths: Sequence[int]) -> list[int]:
    """Return the position of the first token of every document."""
    return [int(x) for x in np.cumsum([0, *lengths[:-1]])] if len(lengths) else []


def two_of_each(
    lengths: Sequence[int],
    P: int,
    cut: Cut = evenly,
    partner: Callable[[int, int], int] | None = None,
    first: Sequence[int] | None = None,
) -> Shares:
    """Return two pieces of every document for each rank: piece r and its partner, by default 2P − 1 − r.

    `first` gives for each document the rank that takes pieces 0 and 2P − 1; without it rank 0 always does.
    """
    partner = partner or (lambda rank, P: 2 * P - 1 - rank)
    first = first if first is not None else [0] * len(lengths)
    shares: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in range(P)]
    for begin, n, turn in zip(begins(lengths), lengths, first, strict=True):
        at = cut(n, 2 * P)
        for rank in range(P):
            for piece in (rank, partner(rank, P)):
                shares[(rank + turn) % P].append(begin + np.arange(at[piece], at[piece + 1]))
    return [np.concatenate(parts) for parts in shares]


def _turns_by_number(cut: Cut) -> Callable[..., Shares]:
    return lambda lengths, P: two_of_each(lengths, P, cut, first=range(len(lengths)))


def _whole_zigzag(cut: Cut) -> Callable[..., Shares]:
    return lambda lengths, P: two_of_each([sum(lengths)], P, cut)


def _document_major(cut: Cut) -> Callable[..., Shares]:
    def imitate(lengths: Sequence[int], P: int) -> Shares:
        dealt = [two_of_each([n], P, cut) for n in lengths]
        order = [begin + part for begin, parts in zip(begins(lengths), dealt, strict=True) for part in parts]
        stream = np.concatenate([np.zeros(0, np.int64), *order])
        at = cut(len(stream), P)
        return [stream[a:b] for a, b in pairwise(at)]

    return imitate


def _stretches(cut: Cut) -> Callable[..., Shares]:
    def imitate(lengths: Sequence[int], P: int) -> Shares:
        at = cut(sum(lengths), P)
        return [np.arange(a, b) for a, b in pairwise(at)]

    return imitate


def _p_pieces(cut: Cut) -> Callable[..., Shares]:
    def imitate(lengths: Sequence[int], P: int) -> Shares:
        shares: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in range(P)]
        for begin, n in zip(begins(lengths), lengths, strict=True):
            at = cut(n, P)
            for rank in range(P):
                shares[rank].append(begin + np.arange(at[rank], at[rank + 1]))
        return [np.concatenate(parts) for parts in shares]

    return imitate


def _partner(partner: Callable[[int, int], int]) -> Callable[[Cut], Callable[..., Shares]]:
    return lambda cut: lambda lengths, P: two_of_each(lengths, P, cut, partner)


def _forgets_offset(cut: Cut) -> Callable[..., Shares]:
    return lambda lengths, P: [
        np.concatenate([np.zeros(0, np.int64), *(two_of_each([n], P, cut)[rank] for n in lengths)])
        for rank in range(P)
    ]


def _drops_remainder(lengths: Sequence[int], P: int) -> Shares:
    return two_of_each(lengths, P, lambda n, pieces: [i * (n // pieces) for i in range(pieces + 1)])


def _pads(lengths: Sequence[int], P: int) -> Shares:
    return two_of_each(lengths, P, lambda n, pieces: [i * -(-n // pieces) for i in range(pieces + 1)])


def _each_cut(
    name: str, make: Callable[[Cut], Callable[..., Shares]], suffixes: Iterable[str] = tuple(CUTS)
) -> tuple[Misconception, ...]:
    return tuple(
        replace(mistake(name), name=name + suffix, imitate=make(CUTS[suffix])) for suffix in suffixes
    )


def _owners(shares: Sequence[np.ndarray], lengths: Sequence[int]) -> np.ndarray:
    owners = np.zeros(sum(lengths), dtype=np.int64)
    for rank, share in enumerate(shares):
        owners[share] = rank
    return owners


def unturned(shares: Sequence[np.ndarray], lengths: Sequence[int]) -> Shares:
    """Return the shares with each document's ranks renumbered, so that rank 0 owns its first token."""
    owners = _owners(shares, lengths)
    first = np.repeat(owners[begins(lengths)], lengths)
    return [np.flatnonzero((owners - first) % len(shares) == rank) for rank in range(len(shares))]


def _turned(name: str, make: Callable[[Cut], Callable[..., Shares]]) -> tuple[Misconception, ...]:
    """Return the mistake for each cut, as `unturned` shows it: whichever rank a document begins with."""

    def shown(imitate: Callable[..., Shares]) -> Callable[..., Shares]:
        return lambda lengths, P: unturned(imitate(lengths, P), lengths)

    return tuple(replace(m, imitate=shown(m.imitate)) for m in _each_cut(name, make) if m.imitate)


_NOT_FOLDED = _partner(lambda rank, P: rank + P)

MEASURED = (
    mistake("whole_documents"),
    mistake("stripes_documents"),
    mistake("totals_only"),
    mistake("uneven_tokens"),
    mistake("remainders_add_up"),
    mistake("left_to_chance"),
)

PACKED = (
    *_each_cut("ignores_documents", _whole_zigzag),
    *_each_cut("document_major", _document_major),
    *_each_cut("balances_tokens", _stretches),
    *_each_cut("p_pieces", _p_pieces),
    *_each_cut("not_folded", _NOT_FOLDED),
    *_each_cut("fold_off_by_one", _partner(lambda rank, P: 2 * P - 2 - rank)),
    *_each_cut("forgets_the_offset", _forgets_offset),
    *_each_cut("same_ranks_first", lambda cut: partial(two_of_each, cut=cut), ("", "_longest_first")),
    mistake("rounds_pieces_up", partial(two_of_each, cut=_rounded_up)),
    *_each_cut("turns_by_number", _turns_by_number),
    mistake("drops_the_remainder", _drops_remainder),
    mistake("pads_the_documents", _pads),
    *MEASURED,
)

TURNED = (*_turned("p_pieces", _p_pieces), *_turned("not_folded", _NOT_FOLDED))

EVEN = 1.01
"""The most that is allowed: the busiest rank against the mean, in tokens and in the work of each step."""
FEWEST = 4096
"""Tokens a rank, on average, from which this must hold for any documents; below, only where 2P divides all lengths."""
SHORT = 3
"""Documents of fewer tokens than this times 2P count as short in a message: a piece has a token or two, or none."""
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
    """Judge cases (lengths, P). Answers are measured, so an answer's `truth` is the failure that it makes, or None."""

    def ask(lengths: list[int], P: int) -> Question:
        case = f"lengths={_told(lengths)}, P={P}"
        shares = expect_shares(subject.call(lengths, P), P)
        wrong = _what_is_wrong(shares, lengths, case)
        return Question((lengths, P), shares, wrong, case)

    judge(cases, ask, lambda _, wrong: wrong is None, _explain)


def _explain(answered: list[Question], first: Question) -> Failure:
    failure: Failure = first.truth
    # Many answers are right, so an imitation errs where it gives this very answer.
    few_first = sorted(answered, key=lambda a: len(a.inputs[0]))  # one short case rules most imitations out
    alike = [Question(a.inputs, a.got, None if a.truth else a.got, a.example) for a in few_first]
    mistake = mistake_in(alike, PACKED, lambda a, b: b is not None and same_sets(a, b))
    if mistake is None:
        mistake = _turned_mistake(few_first)
    return mistake.failure(failure.counterexample) if mistake else failure


def _turned_mistake(answered: Sequence[Question]) -> Misconception | None:
    """Return the mistake that explains every answer if the documents may begin at any rank, else None."""
    alike = []
    for one in answered:
        lengths, P = one.inputs
        try:
            expect_owned_once(one.got, sum(lengths), one.example)
        except Failure:
            return None
        got = unturned(one.got, lengths)
        alike.append(Question((lengths, P), got, None if one.truth else got, one.example))
    return mistake_in(alike, TURNED, lambda a, b: b is not None and same_sets(a, b))


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
    owners = _owners(shares, lengths)
    if all(np.ptp(part) == 0 for part in np.split(owners, begins(lengths)[1:])):
        return NAMED["whole_documents"].failure(example)
    divides = all(n % (2 * len(shares)) == 0 for n in lengths)
    if not divides and max(lengths) < SHORT * 2 * len(shares):  # even where totals agree, as on two ranks
        return NAMED["remainders_add_up"].failure(example)
    if total <= EVEN:
        return NAMED["totals_only"].failure(example)
    return Failure(
        "The work is not even: the busiest ranks of the steps have more than 1.01 of the mean.", example
    )


def _told(lengths: list[int]) -> str:
    return str(lengths) if len(lengths) <= 8 else f"[{', '.join(map(str, lengths[:8]))}, …]"


def _check_small(subject: Subject, rng: np.random.Generator) -> None:
    """Lengths that 2P divides; and twice the same, since every rank calls the function by itself."""
    cases = [
        (_dividing(rng, P, number, most), P)
        for P, number, most in ((2, 3, 9), (3, 3, 9), (8, 5, 9), (1, 3, 400))
    ]
    lengths = _dividing(rng, 8, 9, 9)
    first, second = (expect_shares(subject.call(lengths, 8), 8) for _ in range(2))
    if not same_sets(first, second):
        raise NAMED["left_to_chance"].failure(f"lengths={_told(lengths)}, P=8, twice")
    _judge_packed(subject, cases)


def _dividing(rng: np.random.Generator, P: int, number: int, most: int) -> list[int]:
    """Return lengths that 2P divides, of which the last document is the longest by far."""
    lengths = 2 * P * rng.integers(1, most + 1, number)
    return [*lengths.tolist()[:-1], int(lengths.sum())]


def _check_mixes(subject: Subject, rng: np.random.Generator) -> None:
    cases = [
        ([_odd(rng, 5000), _odd(rng, 4000)], 2),
        ([_odd(rng, 8000), _odd(rng, 2500), _odd(rng, 4000)], 3),
    ]
    _judge_packed(subject, [*cases, (_mix(rng, 4), 4)])


def _odd(rng: np.random.Generator, about: int) -> int:
    """Return a length near `about` that no 2P divides."""
    return about + 1 + 2 * int(rng.integers(100))


def _check_short(subject: Subject, rng: np.random.Generator) -> None:
    long = (9000 + rng.integers(1000, size=3)).tolist()
    few = rng.integers(1, 12, 3).tolist()
    _judge_packed(
        subject, [([long[0], 1], 2), ([3, long[1], 2], 2), ([1, few[0], 4 * long[2], few[1], few[2]], 8)]
    )


def _check_many(subject: Subject, rng: np.random.Generator) -> None:
    more, n, long = rng.integers(0, 300, 5).tolist(), int(rng.integers(18, 23)), int(rng.integers(18, 23))
    cases: list[tuple[list[int], int]] = [
        ([9000 + more[0], *[3] * 1500], 2),
        ([n] * (34_000 // n + more[1]), 8),
        ([3] * (3000 + more[2]), 2),
        (rng.permutation([13, 7, 5]).tolist() * (700 + more[3]), 4),
        ([long, 3] * (900 + more[4]), 4),
    ]
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
    misconceptions=PACKED,
    checks=(
        Check("small", 2, "visible", "lengths that 2P divides", _check_small),
        Check("mixes", 1, "visible", "lengths that 2P does not divide", _check_mixes),
        Check("short", 1, "visible", "documents shorter than 2P tokens next to long ones", _check_short),
        Check("many", 2, "visible", "hundreds or thousands of short documents", _check_many),
        Check("ranks", 2, "held-out", "many mixtures, 1 to 8 ranks", _check_ranks),
    ),
)
