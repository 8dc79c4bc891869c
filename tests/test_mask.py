"""What a mask refuses, how one is made of document ids, and when the causal flag says all."""

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
        ({"documents": [4, 4]}, "tuple(lengths)"),
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
    for wrong in (ids.double(), ids[None]):
        with pytest.raises(MaskError, match="one integer for each token"):
            Mask.of_document_ids(wrong)


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
    """Ranks compare what masks say."""
    numbers = np.array([4, 2, 3])
    one = Mask(np.True_, np.int64(4), tuple(numbers[1:]), tuple(numbers[1:]))
    assert repr(one) == repr(Mask(True, 4, (2, 3), (2, 3)))


def test_a_mask_is_a_value() -> None:
    assert Mask(window=3) == Mask(window=3) and hash(Mask(window=3)) == hash(Mask(window=3))
    assert Mask(window=3) != Mask(window=4)
