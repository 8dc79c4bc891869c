"""Transformers' masks are read with their meaning, and unknown masks are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import masking_utils as theirs

from ringlab import VirtualCluster, contiguous, hf
from ringlab.comm.ring import Ring
from ringlab.errors import MaskError
from ringlab.hf.masks import LayerMask, read
from ringlab.mask import Mask
from tests.hf.models import llama


def meant(window: int | None, documents: tuple[int, ...], causal: bool) -> np.ndarray:
    """Return the matrix that transformers makes of a whole packed sequence, for torch's attention."""
    config = _config(window, causal)
    config._attn_implementation = "sdpa"
    mask = _made(config, window, documents)
    S = sum(documents)
    if mask is None:  # transformers leaves a mask out if the causal flag alone describes it
        return np.tril(np.ones((S, S), bool)) if causal else np.ones((S, S), bool)
    return mask[0, 0].numpy()


def understood(window: int | None, documents: tuple[int, ...], causal: bool) -> np.ndarray:
    """Return the matrix of the mask that ringlab.hf reads for the same sequence."""
    config = _config(window, causal)
    config._attn_implementation = hf.NAME
    given = Mask(causal=causal, documents=documents)

    def program(ring: Ring) -> Mask:
        with hf.context(ring, contiguous(sum(documents), 1), given):
            return _made(config, window, documents).mask()

    [mask] = VirtualCluster(1).run(program).results
    everyone = np.arange(sum(documents))
    return mask.visible(everyone, everyone)


def _config(window: int | None, causal: bool) -> Any:
    config = llama()
    config.sliding_window, config.is_causal = window, causal
    return config


def _made(config: Any, window: int | None, documents: tuple[int, ...]) -> Any:
    ids = torch.cat([torch.arange(n) for n in documents])[None]
    make = theirs.create_causal_mask if window is None else theirs.create_sliding_window_causal_mask
    x = torch.zeros(1, ids.shape[1], 4)
    return make(config, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=ids)


WINDOWS = st.none() | st.integers(1, 12)
DOCUMENTS = st.lists(st.integers(1, 8), min_size=1, max_size=4).map(tuple)


@settings(max_examples=60)
@given(window=WINDOWS, documents=DOCUMENTS)
def test_masks_are_read_as_they_are_meant(window: int | None, documents: tuple[int, ...]) -> None:
    assert np.array_equal(understood(window, documents, True), meant(window, documents, True))


def test_a_model_that_is_not_causal() -> None:
    assert np.array_equal(understood(None, (7,), False), meant(None, (7,), False))


def somewhere(*_: Any) -> bool:
    return True


UNKNOWN = {
    "chunked": theirs.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)),
    "or": theirs.or_masks(theirs.causal_mask_function, somewhere),
    "and": theirs.and_masks(theirs.causal_mask_function, somewhere),
    "blocks seen both ways": theirs.or_masks(
        theirs.causal_mask_function, theirs.blockwise_overlay(torch.zeros(1, 4))
    ),
    "padding": theirs.and_masks(
        theirs.causal_mask_function, theirs.padding_mask_function(torch.ones(1, 4, dtype=torch.bool))
    ),
    "window that is not causal": theirs.sliding_window_bidirectional_mask_function(3),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_parts_are_refused(name: str) -> None:
    with pytest.raises(MaskError, match="a mask of these parts"):
        read(UNKNOWN[name])


def test_known_parts_are_read() -> None:
    packed: Tensor = torch.zeros(1, 4, dtype=torch.long)
    assert read(theirs.causal_mask_function) == (True, None)
    assert read(theirs.bidirectional_mask_function) == (False, None)
    assert read(theirs.sliding_window_causal_mask_function(3)) == (True, 3)
    inside = theirs.packed_sequence_compatibility_function(
        theirs.sliding_window_causal_mask_function(5), packed, packed
    )
    assert read(inside) == (True, 5)


def test_what_the_context_says_and_what_the_config_says_must_fit() -> None:
    def program(ring: Ring) -> bool:
        layout = contiguous(4, 1)
        for said, asked in [
            (Mask(window=3), (True, None)),
            (Mask(window=3), (True, 4)),
            (Mask(causal=False), (True, None)),
            (Mask(causal=False), (False, 3)),
        ]:
            with hf.context(ring, layout, said), pytest.raises(MaskError):
                _layer(*asked).mask()
        with hf.context(ring, layout, Mask(prefix=2)):
            assert _layer(True, 3).mask() == replace(Mask(prefix=2), window=3)
        return True

    assert VirtualCluster(1).run(program).results == [True]


def _layer(causal: bool, window: int | None) -> LayerMask:
    from ringlab.hf.held import held

    return LayerMask(held(), causal, window, None)
