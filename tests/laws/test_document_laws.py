"""Layouts of packed documents: every token has one owner, and ranks have equal work on each document."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab import contiguous, per_document, plan, zigzag
from ringlab.errors import LayoutError, MaskError
from ringlab.layout import Layout, Run
from ringlab.mask import Mask, check_position_ids
from tests.laws.draw import refute

Lengths = tuple[int, ...]
Maker = Callable[[Lengths, int], Layout]
LENGTHS = st.lists(st.integers(0, 60), max_size=6).map(tuple)


def scores(layout: Layout, lengths: Lengths) -> list[int]:
    """Return how many scores each rank computes if tokens see their own document up to themselves."""
    mask = Mask(documents=lengths)
    return [int((mask.position_ids(layout.positions(rank)) + 1).sum()) for rank in range(layout.P)]


def law_every_token_has_one_owner(make: Maker, lengths: Lengths, P: int) -> None:
    layout = make(lengths, P)
    owned = np.concatenate([layout.positions(rank) for rank in range(P)])
    assert sorted(owned) == list(range(sum(lengths)))
    assert all((np.diff(layout.positions(rank)) > 0).all() for rank in range(P)), "not in ascending order"
    assert layout.step == 1


def law_equal_shares_of_each_document(make: Maker, lengths: Lengths, P: int) -> None:
    """All ranks have equally many tokens and scores of each document, apart from its first `length % (2 * P)` tokens."""
    layout, mask = make(lengths, P), Mask(documents=lengths)
    shares = []
    for rank in range(P):
        positions = layout.positions(rank)
        document, place = mask.document_of(positions), mask.position_ids(positions)
        equal = place >= np.array(lengths, int)[document] % (2 * P)
        weights = [np.where(equal, 1, 0), np.where(equal, place + 1, 0)]
        shares.append([np.bincount(document, weight, len(lengths)).tolist() for weight in weights])
    assert all(share == shares[0] for share in shares)


def law_what_is_left_is_spread(make: Maker, lengths: Lengths, P: int) -> None:
    owned = make(lengths, P).lengths
    assert max(owned) - min(owned) <= max((n % (2 * P) for n in lengths), default=0)


@given(lengths=LENGTHS, P=st.integers(1, 9))
def test_per_document(lengths: Lengths, P: int) -> None:
    law_every_token_has_one_owner(per_document, lengths, P)
    law_equal_shares_of_each_document(per_document, lengths, P)
    law_what_is_left_is_spread(per_document, lengths, P)


@given(lengths=LENGTHS, P=st.integers(1, 5))
def test_tiles_compute_these_scores_and_no_others(lengths: Lengths, P: int) -> None:
    layout, mask = per_document(lengths, P), Mask(documents=lengths)
    computed = [sum(plan.work(layout, rank, origin, mask) for origin in range(P)) for rank in range(P)]
    assert computed == scores(layout, lengths)


def all_left_to_one(lengths: Lengths, P: int) -> Layout:
    """Deal the remainder of each document to rank 0, a bias that grows with the number of documents."""
    layout = per_document(lengths, P)
    mask = Mask(documents=lengths)
    left = mask.position_ids(np.arange(layout.S)) < np.array(lengths, int)[
        mask.document_of(np.arange(layout.S))
    ] % (2 * P)
    owned = [[p for p in layout.positions(rank) if not left[p]] for rank in range(P)]
    owned[0] = sorted([*owned[0], *np.flatnonzero(left)])
    return Layout(
        layout.S, P, "left to one", tuple(tuple(Run(int(p), 1, 1) for p in positions) for positions in owned)
    )


def zigzag_of_all(lengths: Lengths, P: int) -> Layout:
    return zigzag(sum(lengths), P)


def one_rank_twice(lengths: Lengths, P: int) -> Any:
    """Return an invalid layout in which rank 0 owns the tokens of rank 1."""
    layout = per_document(lengths, P)
    other = Layout(layout.S, P, "twice", layout.ranks)
    object.__setattr__(other, "ranks", (layout.ranks[1], *layout.ranks[1:]))
    return other


EXAMPLES = [((17, 5, 40), 2), ((16, 16), 2), ((3, 3, 3, 3, 3, 3, 3), 2)]


@pytest.mark.parametrize(
    ("law", "mutant"),
    [
        (law_every_token_has_one_owner, one_rank_twice),
        (law_equal_shares_of_each_document, zigzag_of_all),
        (law_what_is_left_is_spread, all_left_to_one),
    ],
)
def test_the_law_notices(law: Callable[..., None], mutant: Maker) -> None:
    refute(law, per_document, mutant, EXAMPLES)


# Position ids.


def test_position_ids_give_the_documents() -> None:
    assert Mask.of_position_ids(np.array([0, 1, 2, 0, 0, 1])) == Mask(documents=(3, 1, 2))
    assert Mask.of_position_ids(np.array([0, 1, 2]), window=2) == Mask(window=2, documents=(3,))
    assert Mask(documents=(3,)).plain and Mask.of_position_ids(np.zeros(0, int)).documents == ()


@given(lengths=LENGTHS.map(lambda x: tuple(n for n in x if n)), P=st.integers(1, 5))
def test_position_ids_there_and_back(lengths: Lengths, P: int) -> None:
    mask, layout = Mask(documents=lengths), per_document(lengths, P)
    ids = mask.position_ids(np.arange(sum(lengths)))
    assert Mask.of_position_ids(ids) == mask
    for rank in range(P):
        check_position_ids(layout.shard(ids, rank, dim=-1), layout, mask, rank)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 2, 3], "1 at token 0"),
        ([0, 1, 3, 4], "1 and then 3 at token 2"),
        ([0, 1, 1, 2], "1 and then 1 at token 2"),
        ([0, 1, 2, 1, 0], "2 and then 1 at token 3"),
        ([[0, 1], [0, 1]], "shape (2, 2)"),
        ([0.0, 1.0], "float64"),
    ],
)
def test_position_ids_that_are_none(ids: Any, words: str) -> None:
    with pytest.raises(MaskError) as caught:
        Mask.of_position_ids(np.array(ids))
    assert words in str(caught.value)


def test_position_ids_that_contradict_the_layout() -> None:
    """Position ids of another layout, of the shard, of the whole sequence or of one document are refused."""
    lengths, P = (9, 20, 3), 2
    layout, mask = per_document(lengths, P), Mask(documents=lengths)
    ids = mask.position_ids(np.arange(sum(lengths)))
    wrong = partial(check_position_ids, layout=layout, mask=mask, rank=1)
    for given_ids in (
        contiguous(sum(lengths), P).shard(ids, 1, dim=-1),
        np.arange(layout.length(1)),
        layout.positions(1),
        ids,
    ):
        with pytest.raises(LayoutError, match="layout.shard"):
            wrong(given_ids)
    with pytest.raises(MaskError, match="32 tokens"):
        check_position_ids(ids, zigzag(40, 2), mask, 0)


@pytest.mark.parametrize(("lengths", "P"), [((4, -1), 2), ((4, 2.5), 2), ((4,), 0)])
def test_lengths_that_are_none(lengths: Any, P: int) -> None:
    with pytest.raises(LayoutError):
        per_document(lengths, P)
