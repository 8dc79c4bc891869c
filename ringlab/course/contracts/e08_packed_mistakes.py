"""Exercise 08: common mistakes in sharing out packed documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from ringlab.course.contract import Misconception

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


def turning(lengths: Sequence[int], P: int) -> Shares:
    """Return a right answer: two of each, and from the shortest document to the longest another rank is first."""
    first = np.empty(len(lengths), dtype=np.int64)
    first[np.argsort(lengths, kind="stable")] = np.arange(len(lengths))
    return two_of_each(lengths, P, first=first.tolist())


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
    name: str, message: str, make: Callable[[Cut], Callable[..., Shares]]
) -> tuple[Misconception, ...]:
    return tuple(Misconception(name + suffix, message, make(cut)) for suffix, cut in CUTS.items())


MEASURED = (
    Misconception(
        "whole_documents",
        "You hand out whole documents. A ring exists because one sequence is too long for one rank; and one long document "
        "alone takes more work than a rank's share. Every document has to be cut.",
    ),
    Misconception(
        "stripes_documents",
        "A rank owns more than two stretches of a document. Dealt in single tokens or small pieces the work may be even, but "
        "nearly every tile has a diagonal in it. Two stretches are enough for an even share.",
    ),
    Misconception(
        "totals_only",
        "Every rank has the same work in all, but not in each step: while one rank computes, the others wait, and later the "
        "other way round. Even out every document, and every step is even.",
    ),
    Misconception(
        "uneven_tokens",
        "The work is even, but the tokens are not: memory and the linear layers follow the number of tokens. Give every rank "
        "as many.",
    ),
    Misconception(
        "remainders_add_up",
        "The work is not even. All these documents are short, so a piece has a token or two, or none, and which rank gets "
        "one token more than others matters: over many documents the remainders have to go round.",
    ),
)

PACKED = (
    *_each_cut(
        "ignores_documents",
        "You lay a zig-zag over the whole sequence. It evens out one long triangle; but a query sees its own document only, "
        "so there is a triangle for every document, and ranks get different parts of them.",
        _whole_zigzag,
    ),
    *_each_cut(
        "document_major",
        "Each document is folded by itself, and then the stream of pieces is cut into P stretches, document after document: "
        "so the pieces that belong together land wherever the cut falls. Collect by rank: of every document two pieces.",
        _document_major,
    ),
    *_each_cut(
        "balances_tokens",
        "You give every rank one stretch of equally many tokens. Equally many tokens are not equally much work: a token late "
        "in a long document sees many keys, one in a short document few.",
        _stretches,
    ),
    *_each_cut(
        "p_pieces",
        "You cut every document into P pieces, one for each rank: rank P − 1 gets all the late ones. A fold needs 2P pieces, "
        "so that an early and a late one come together.",
        _p_pieces,
    ),
    *_each_cut(
        "not_folded",
        "Rank r gets pieces r and r + P of every document: two pieces, but both earlier than those of rank r + 1. The partner "
        "of piece r is the one as far from the end, 2P − 1 − r.",
        _partner(lambda rank, P: rank + P),
    ),
    *_each_cut(
        "fold_off_by_one",
        "An off-by-one in the fold: the partner of piece r among 2P is 2P − 1 − r, not 2P − 2 − r. With yours the last piece "
        "of every document belongs to nobody, and piece P − 1 is there twice.",
        _partner(lambda rank, P: 2 * P - 2 - rank),
    ),
    *_each_cut(
        "forgets_the_offset",
        "Every document begins at position 0 in your answer. Positions are those of the packed sequence: add the lengths of "
        "the documents before.",
        _forgets_offset,
    ),
    *(
        Misconception(
            f"same_ranks_first{suffix}",
            "In every document the same ranks get the pieces that are a token longer. In one long document that is nothing; "
            "in hundreds of short ones it adds up. Let another rank begin at every document.",
            partial(two_of_each, cut=CUTS[suffix]),
        )
        for suffix in ("", "_longest_first")
    ),
    Misconception(
        "rounds_pieces_up",
        "You cut pieces of ⌈n / 2P⌉ tokens, and what is missing is missing in the last pieces: always the same ranks get less, "
        "in short documents much less. Cut at ⌊i · n / 2P⌋, and let another rank begin at every document.",
        partial(two_of_each, cut=_rounded_up),
    ),
    *_each_cut(
        "turns_by_number",
        "You let the next rank begin at every document, which evens out documents of one length. Where long and short ones "
        "alternate, the long ones always begin at the same ranks. Let it go round in order of length.",
        _turns_by_number,
    ),
    Misconception(
        "drops_the_remainder",
        "What is left over when a document's length is divided by 2P belongs to nobody. Lengths need not divide: cut at "
        "⌊i · n / 2P⌋, i = 0 … 2P, and nothing is lost.",
        _drops_remainder,
    ),
    Misconception(
        "pads_the_documents",
        "You round every document's length up to a multiple of 2P, and so reach into the next document, or beyond the end. "
        "Cut at ⌊i · n / 2P⌋, i = 0 … 2P: pieces may differ by a token.",
        _pads,
    ),
    *MEASURED,
)
