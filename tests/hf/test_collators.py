"""Batches of transformers' own collators, packed and spread over ranks, give one process's training step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
)

from ringlab.errors import MaskError
from ringlab.packing import Packing
from tests.hf.models import IGNORE, VOCABULARY, Batch, llama
from tests.hf.test_step import law_equals_one_process

LENGTHS = (7, 1, 5, 9)
EXTRA = {"return_flash_attn_kwargs": True, "return_seq_idx": True}


def features(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(5)
    return [{"input_ids": torch.randint(3, VOCABULARY, (n,), generator=draw).tolist()} for n in lengths]


def flattened(**options: Any) -> dict[str, Any]:
    return DataCollatorWithFlattening(return_tensors="pt", **options)(features())


def padded(side: str) -> dict[str, Any]:
    """Return a batch whose rows are padded to the longest one; the labels of padding are −100."""
    vocabulary = {"<pad>": 0, **{f"w{n}": n for n in range(1, VOCABULARY)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "w1")), pad_token="<pad>", padding_side=side
    )
    return dict(DataCollatorForLanguageModeling(tokenizer, mlm=False)(features()))


@pytest.mark.parametrize(
    "options", [{}, EXTRA, {"return_position_ids": False, **EXTRA}], ids=["ids", "all", "no ids"]
)
def test_a_flattened_batch_says_where_documents_begin(options: dict[str, Any]) -> None:
    batch = flattened(**options)
    packing = Packing.of_batch(batch)
    assert packing.documents == LENGTHS and packing.shape == (1, sum(LENGTHS))
    assert packing.pack(batch["input_ids"]).tolist() == batch["input_ids"].tolist()
    labels = packing.next_tokens(batch["labels"])
    for document, shifted in zip(features(), packing.unpack(labels), strict=True):
        assert shifted.tolist() == [*document["input_ids"][1:], IGNORE]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_packed_without_its_padding(side: str) -> None:
    batch = padded(side)
    packing = Packing.of_batch(batch)
    assert packing.documents == LENGTHS and packing.shape == (4, 9)
    packed = packing.pack(batch["input_ids"])
    assert [x.tolist() for x in packing.unpack(packed)] == [each["input_ids"] for each in features()]
    assert torch.equal(packing.restore(packed), batch["input_ids"])  # its padding is 0


def as_given(batch: dict[str, Any]) -> Batch:
    return Batch(batch["input_ids"], batch["labels"], batch.get("position_ids"), batch.get("attention_mask"))


def packed_for_the_ring(batch: dict[str, Any], multiple: int = 1) -> tuple[Packing, Batch]:
    packing = Packing.of_batch(batch).padded(multiple)
    ids = torch.from_numpy(packing.position_ids)[None]
    return packing, Batch(packing.pack(batch["input_ids"]), packing.pack(batch["labels"], fill=IGNORE), ids)


def test_a_step_on_a_flattened_batch() -> None:
    batch = flattened()
    packing, packed = packed_for_the_ring(batch)
    law_equals_one_process(llama(), packing.layout("zigzag", 3), packed, as_given(batch))


def test_a_step_on_a_padded_batch() -> None:
    """A step that drops a batch's padding, and adds padding for the ring, equals one process's step."""
    batch = padded("right")
    packing, packed = packed_for_the_ring(batch, 6)
    law_equals_one_process(llama(), packing.layout("per_document", 3), packed, as_given(batch))


def test_labels_of_other_documents_are_dropped_whatever_the_collator_does() -> None:
    """Labels of other documents are dropped, even if a packing did not set first labels to −100."""
    batch = flattened()
    batch["labels"] = batch["input_ids"].clone()
    packing, packed = packed_for_the_ring(batch)
    law_equals_one_process(llama(), packing.layout("per_document", 2), packed, as_given(flattened()))


def wrong(**changed: Any) -> dict[str, Any]:
    return flattened(**EXTRA) | changed


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (
            wrong(cu_seq_lens_k=torch.tensor([0, 7, 13, 22])),
            "the same documents in cu_seq_lens_q and cu_seq_lens_k",
        ),
        (wrong(cu_seq_lens_q=torch.tensor([0, 7, 8, 13])), "the same documents"),
        (wrong(attention_mask=torch.arange(22)[None] < 20), "2 tokens of padding"),
        ({"input_ids": torch.zeros(1, 9), "cu_seq_lens_q": torch.tensor([0, 3, 8])}, "of all 9 tokens"),
    ],
)
def test_batches_that_contradict_themselves_are_refused(batch: dict[str, Any], words: str) -> None:
    with pytest.raises(MaskError) as caught:
        Packing.of_batch(batch)
    assert words in str(caught.value)


def test_rows_alike_and_rows_without_anything() -> None:
    ids = torch.zeros(3, 4, dtype=torch.long)
    assert Packing.of_batch({"input_ids": ids}).documents == (4, 4, 4)
    assert Packing.of_batch({"input_ids": ids, "position_ids": torch.arange(4)[None]}).documents == (4, 4, 4)
    assert (
        Packing.of_batch({"input_ids": ids, "position_ids": torch.tensor([[0, 1, 0, 1]])}).documents
        == (2,) * 6
    )
