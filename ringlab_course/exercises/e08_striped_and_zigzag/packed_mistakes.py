"""Exercise 08: common mistakes in sharing out packed documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from ringlab_course.checking.contract import Misconception
from ringlab_course.checking.wrong_answers import mistakes_of

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
"""Three ways to cut a length that does not divide; a mistake may be made with any of them."""


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
    """Return two pieces of every document for each rank: r and its partner, 2P − 1 − r unless told otherwise.

    `first` is for each document the rank that takes pieces 0 and 2P − 1; without it rank 0 always does.
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


MEASURED = (
    mistake("whole_documents"),
    mistake("stripes_documents"),
    mistake("totals_only"),
    mistake("uneven_tokens"),
    mistake("remainders_add_up"),
)

PACKED = (
    *_each_cut("ignores_documents", _whole_zigzag),
    *_each_cut("document_major", _document_major),
    *_each_cut("balances_tokens", _stretches),
    *_each_cut("p_pieces", _p_pieces),
    *_each_cut("not_folded", _partner(lambda rank, P: rank + P)),
    *_each_cut("fold_off_by_one", _partner(lambda rank, P: 2 * P - 2 - rank)),
    *_each_cut("forgets_the_offset", _forgets_offset),
    *_each_cut("same_ranks_first", lambda cut: partial(two_of_each, cut=cut), ("", "_longest_first")),
    mistake("rounds_pieces_up", partial(two_of_each, cut=_rounded_up)),
    *_each_cut("turns_by_number", _turns_by_number),
    mistake("drops_the_remainder", _drops_remainder),
    mistake("pads_the_documents", _pads),
    *MEASURED,
)
