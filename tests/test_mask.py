"""Masks refuse arguments that do not fit, and read document ids, cu_seqlens and the causal flag correctly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ringlab import Mask
from ringlab.errors import MaskError


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"window": 0}, "window="),
        ({"window": -3}, "window="),
        ({"window": 2.5}, "window="),
        ({"window": True}, "window="),
        ({"documents": (4, -1)}, "documents="),
        ({"documents": "44"}, "tuple(lengths)"),
        ({"window": -1}, "window=None"),
        ({"window": (-1, -1)}, "window=None"),
        ({"window": (127, 0)}, "Mask(causal=True) with window=128"),
        ({"window": (-1, 0)}, "Mask(causal=True) with no window"),
        ({"window": [127, 127]}, "Mask(causal=False) with window=128"),
        ({"window": (127, 3)}, "which a Mask cannot say"),
        ({"documents": (4, 0.5)}, "documents="),
        ({"prefix": -1}, "prefix="),
        ({"prefix": (1, 2)}, "a prefix for each of 1 documents"),
        ({"prefix": (1, 2, 3), "documents": (4, 4)}, "a prefix for each of 2 documents"),
        ({"prefix": 2, "causal": False}, "causal=True with a prefix"),
        ({"causal": "no"}, "causal=True or causal=False"),
    ],
)
def test_what_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(MaskError) as caught:
        Mask(**wrong)
    assert words in str(caught.value)


def test_documents_must_add_up() -> None:
    assert Mask(documents=(3, 5)).of_length(8).documents == (3, 5)
    for S, remedy in ((7, "are left of it"), (9, "padding at the end")):
        with pytest.raises(MaskError, match=remedy):
            Mask(documents=(3, 5)).of_length(S)


def test_document_ids() -> None:
    ids = torch.tensor([7, 7, 2, 9, 9, 9])
    assert Mask.of_document_ids(ids) == Mask.of_document_ids(ids.numpy()) == Mask(documents=(2, 1, 3))
    assert Mask.of_document_ids(ids, window=4) == Mask(window=4, documents=(2, 1, 3))
    with pytest.raises(MaskError, match="document 7 begins again at token 3"):
        Mask.of_document_ids(np.array([7, 7, 2, 7]))
    assert Mask.of_document_ids(ids[None]) == Mask(documents=(2, 1, 3))
    for wrong in (ids.double(), ids.reshape(2, 3)):
        with pytest.raises(MaskError, match="one integer for each token"):
            Mask.of_document_ids(wrong)


@pytest.mark.parametrize("as_given", [list, tuple, np.array, torch.tensor])
def test_cu_seqlens(as_given: Any) -> None:
    cu, padded = as_given([0, 2, 2, 3, 6]), as_given([0, 4, 4, 8, 12])
    assert Mask.of_cu_seqlens(cu, window=4) == Mask(window=4, documents=(2, 0, 1, 3))
    assert Mask.of_cu_seqlens(cu, padded=padded).documents == (2, 2, 0, 0, 1, 3, 3, 1)
    assert Mask.of_cu_seqlens(cu, padded=cu).of_length(6).documents == (2, 0, 0, 0, 1, 0, 3, 0)
    assert Mask.of_cu_seqlens(torch.tensor([[0, 2, 6]], dtype=torch.int32)).documents == (2, 4)


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: Mask.of_cu_seqlens([4, 2, 3]), "these look like lengths"),
        (lambda: Mask.of_cu_seqlens([0, 5, 2]), "these look like lengths"),
        (lambda: Mask.of_cu_seqlens([]), "0, and then the end"),
        (lambda: Mask.of_cu_seqlens([0, 1.5]), "a vector of integers"),
        (lambda: Mask.of_cu_seqlens([[0, 2], [0, 3]]), "Packing makes one sequence of all rows"),
        (lambda: Mask.of_cu_seqlens([0, 4, 8], padded=[0, 3, 6]), "were they swapped"),
        (lambda: Mask.of_cu_seqlens([0, 3, 6], padded=[0, 8]), "of 2 documents, as in cu_seqlens"),
        (lambda: Mask(documents=torch.tensor([0, 3, 8])), "Mask.of_cu_seqlens"),  # type: ignore[arg-type]
        (lambda: Mask(documents=[0, 3, 8]), "Mask.of_cu_seqlens"),  # type: ignore[arg-type]
        (lambda: Mask(documents=(0, 3, 8)).of_length(8), "Mask.of_cu_seqlens"),
        (lambda: Mask.of_cu_seqlens([0, 3, 8]).of_length(11), "lengths that were given as cu_seqlens"),
        (lambda: Mask.of_cu_seqlens([0, 3, 6]).of_length(8), "padded=cu_seqlens_padded"),
    ],
)
def test_cu_seqlens_and_lengths_that_were_confused(make: Any, remedy: str) -> None:
    with pytest.raises(MaskError) as caught:
        make()
    assert remedy in str(caught.value)


def test_plain_is_what_the_flag_says() -> None:
    assert Mask().plain and Mask(causal=False).plain and Mask(documents=(9,)).plain
    assert Mask(prefix=0).plain and Mask(prefix=(0,)).plain
    for more in (Mask(window=9), Mask(prefix=1), Mask(documents=(4, 5)), Mask(False, window=2)):
        assert not more.plain


def test_ids_that_are_no_sequence_are_refused() -> None:
    for read in (Mask.of_document_ids, Mask.of_position_ids):
        with pytest.raises(MaskError, match="one integer for each token"):
            read([[1], [2, 3]])


def test_a_mask_of_numpys_numbers_says_the_same_of_itself() -> None:
    """A mask made of NumPy's numbers has the same text as one of Python's; ranks compare these texts."""
    numbers = np.array([4, 2, 3])
    one = Mask(np.True_, np.int64(4), tuple(numbers[1:]), tuple(numbers[1:]))
    assert repr(one) == repr(Mask(True, 4, (2, 3), (2, 3)))


def test_lists_are_taken_as_tuples() -> None:
    lists = Mask(documents=[3, 5], prefix=[1, 0])  # type: ignore[arg-type]
    assert lists == Mask(documents=(3, 5), prefix=(1, 0)) and hash(lists)


def test_flash_attns_windows_are_those_of_the_remedy() -> None:
    """The windows (before, after) in the remedy have flash-attn's meaning: i − before ≤ j ≤ i + after."""
    tokens = np.arange(9)
    apart = tokens[:, None] - tokens[None]
    for before, mask in ((3, Mask(window=4)), (0, Mask(window=1))):
        assert (mask.visible(tokens, tokens) == ((apart >= 0) & (apart <= before))).all()
    assert (Mask(causal=False, window=4).visible(tokens, tokens) == (abs(apart) <= 3)).all()


def test_positions_that_are_in_no_document_are_refused() -> None:
    """Positions that do not begin at 0, such as RoBERTa's, are refused, because they are not global positions."""
    mask = Mask(documents=(3, 2))
    assert mask.position_ids(np.arange(5)).tolist() == [0, 1, 2, 0, 1]
    for wrong in (np.arange(2, 7), np.arange(-1, 4)):
        with pytest.raises(MaskError, match="layout.positions"):
            mask.position_ids(wrong)
    with pytest.raises(MaskError, match="layout.positions"):
        Mask().position_ids(np.array([-1]))
    with pytest.raises(MaskError, match="pass ids - 2"):
        Mask.of_position_ids([2, 3, 4, 2, 3])


def test_a_mask_is_a_value() -> None:
    assert Mask(window=3) == Mask(window=3) and hash(Mask(window=3)) == hash(Mask(window=3))
    assert Mask(window=3) != Mask(window=4)
