"""Packed batches in every form that data loaders produce, drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ringlab.packing import Packing

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)
"""Lengths of documents, including 0, 1 and lengths that no number of ranks divides."""
LAYOUT_NAMES = ("contiguous", "striped", "zigzag", "per_document")


@dataclass(frozen=True)
class Given:
    """A data loader's batch: the packing, and for each token the document that it belongs to.

    whose: the number of the document of each element of the arrays, or −1 for padding.
    """

    packing: Packing
    whose: np.ndarray


def cu_seqlens(lengths: list[int]) -> Given:
    cu = np.array([0, *accumulate(lengths)], np.int32)
    return Given(Packing.of_cu_seqlens(cu), np.repeat(np.arange(len(lengths)), lengths)[None])


def padded_cu_seqlens(lengths: list[int]) -> Given:
    """Pad each document to a multiple of 4 tokens, as TransformerEngine's THD does for two ranks."""
    places = [-(-n // 4) * 4 for n in lengths]
    parts = [
        [number] * n + [-1] * (place - n)
        for number, (n, place) in enumerate(zip(lengths, places, strict=True))
    ]
    packing = Packing.of_cu_seqlens([0, *accumulate(lengths)], padded=[0, *accumulate(places)])
    return Given(packing, np.array([[name for part in parts for name in part]], int))


def position_ids(lengths: list[int]) -> Given:
    lengths = [n for n in lengths if n]  # position ids cannot represent an empty document
    ids = np.concatenate([np.arange(n) for n in lengths])
    return Given(Packing.of_position_ids(ids), np.repeat(np.arange(len(lengths)), lengths)[None])


def document_ids(lengths: list[int]) -> Given:
    """Return document ids with padding of id 0 at the end."""
    lengths = [n for n in lengths if n]
    whose = np.append(np.repeat(np.arange(len(lengths)), lengths), [-1, -1])[None]
    return Given(Packing.of_document_ids(whose + 1, padding=0), whose)


def padded_rows(lengths: list[int], left: bool = False) -> Given:
    lengths = [n for n in lengths if n]
    columns = max(lengths)
    rows = [[-1] * (columns - n) * left + [number] * n for number, n in enumerate(lengths)]
    whose = np.array([row + [-1] * (columns - len(row)) for row in rows])
    return Given(Packing.of_attention_mask(whose >= 0), whose)


def rows_padded_in_front(lengths: list[int]) -> Given:
    return padded_rows(lengths, left=True)


def with_padding_added(lengths: list[int]) -> Given:
    given = padded_rows(lengths)
    return Given(given.packing.padded(4), given.whose)


FORMS: dict[str, Callable[[list[int]], Given]] = {
    made.__name__: made
    for made in (
        cu_seqlens, padded_cu_seqlens, position_ids, document_ids, padded_rows, rows_padded_in_front, with_padding_added
    )
}  # fmt: skip


@st.composite
def given_batches(draw: st.DrawFn) -> Given:
    return FORMS[draw(st.sampled_from(sorted(FORMS)))](draw(LENGTHS))


def values_of(given: Given, seed: int = 0) -> Any:
    """Return different numbers for all tokens, and −7 for all padding."""
    numbers = np.random.default_rng(seed).permutation(given.whose.size).reshape(given.whose.shape)
    return np.where(given.whose < 0, -7, numbers)
