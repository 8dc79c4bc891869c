"""Dropout draws what Philox says, pair by pair, wherever the pair is computed; soft caps and their slope."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringlab.errors import MaskError
from ringlab.scores import ScoreRules, philox
from tests.laws import philox as twin

SEEDS = st.integers(0, 2**64 - 1)
WORDS = st.integers(0, 2**32 - 1)
# Known answers that come with the authors' Random123 library.
PI = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
ONES = ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2)
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (*ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (*PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: Any, key: Any, answer: Any) -> None:
    assert twin.words(counter, key) == answer
    found = philox(*(torch.tensor([word]) for word in counter), key[0] | key[1] << 32)
    assert tuple(int(word) for word in found) == answer
    assert tuple(twin.words_of_all(np.array(counter), key[0] | key[1] << 32).tolist()) == answer


@given(counter=st.tuples(WORDS, WORDS, WORDS, WORDS), seed=SEEDS)
def test_both_are_one_function(counter: tuple[int, int, int, int], seed: int) -> None:
    words = twin.words(counter, (seed % 2**32, seed >> 32))
    assert tuple(int(word) for word in philox(*(torch.tensor([c]) for c in counter), seed)) == words
    assert tuple(twin.words_of_all(np.array(counter), seed).tolist()) == words


@given(
    rate=st.sampled_from([0.1, 0.5, 0.9]),
    seed=SEEDS,
    rows=st.lists(st.integers(0, 19), max_size=6),
    keys=st.lists(st.integers(0, 19), max_size=6),
    heads=st.tuples(st.integers(0, 9), st.integers(1, 9)),
)
def test_a_tile_draws_its_part_of_the_whole(
    rate: float, seed: int, rows: list[int], keys: list[int], heads: tuple[int, int]
) -> None:
    """Rows and keys in any order, any heads, and parts of parts."""
    first, count = heads
    scores = ScoreRules(dropout=rate, seed=seed, first_head=first)
    tile = scores.of_tile(np.array(rows, np.int64), np.array(keys, np.int64))
    whole = twin.factors(2, first + count, 20, rate, seed)[:, first:]
    found = tile.dropout_factors(2, count, torch.zeros(1, dtype=torch.float64))
    assert found is not None
    assert np.array_equal(found.numpy(), whole[:, :, rows][..., keys])
    part = tile.part(slice(1, 4), slice(0, 3)).dropout_factors(2, count, torch.zeros(1, dtype=torch.float64))
    assert part is not None and torch.equal(part, found[:, :, 1:4, 0:3])


def test_so_many_are_dropped_and_each_draw_is_its_own() -> None:
    """A share of 0.1 of 200,000 to four standard deviations; no two heads, batches, rows, columns or seeds alike."""
    drawn = twin.factors(2, 5, 144, 0.1, 7) == 0
    assert abs(drawn.mean() - 0.1) < 4 * np.sqrt(0.09 / drawn.size)
    for axis in range(4):
        one, other = np.take(drawn, 0, axis), np.take(drawn, 1, axis)
        assert abs((one & other).mean() - 0.01) < 4 * np.sqrt(0.01 / one.size)
    assert (drawn != (twin.factors(2, 5, 144, 0.1, 8) == 0)).mean() > 0.1
    assert (drawn != drawn.swapaxes(2, 3)).mean() > 0.1


@given(cap=st.floats(0.1, 100), score=st.floats(-1e4, 1e4))
def test_a_cap_and_its_slope(cap: float, score: float) -> None:
    tile = ScoreRules(softcap=cap).of_tile(np.zeros(1, np.int64), np.zeros(1, np.int64))
    x = torch.tensor([[score]], dtype=torch.float64, requires_grad=True)
    capped = tile.capped(x)
    [slope] = torch.autograd.grad(capped.sum(), x)
    assert abs(capped.item()) <= cap
    assert torch.allclose(torch.as_tensor(tile.cap_slope(capped.detach())), slope, rtol=1e-12, atol=1e-15)


def test_none_are_none() -> None:
    tile = ScoreRules().of_tile(np.zeros(1, np.int64), np.zeros(1, np.int64))
    x = torch.ones(1, 1)
    assert tile.capped(x) is x and tile.cap_slope(x) is None and tile.dropout_factors(1, 1, x) is None
    assert ScoreRules().requirements == frozenset()
    assert ScoreRules(softcap=1.0, dropout=0.5).requirements == {"softcap", "dropout"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"softcap": 0.0}, {"softcap": -1.0}, {"softcap": float("inf")}, {"softcap": float("nan")},
        {"softcap": "30"}, {"dropout": 1.0}, {"dropout": -0.1}, {"dropout": float("nan")}, {"dropout": "0.1"},
        {"seed": -1}, {"seed": 2**64}, {"seed": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(MaskError) as caught:
        dataclasses.replace(ScoreRules(), **wrong)
    assert next(iter(wrong)) in caught.value.needed
