"""Laws of packing: all forms agree, shards can be joined again, and labels stay in their documents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab import VirtualCluster, launch
from ringlab.comm.ring import Ring
from ringlab.errors import (
    AgreementError,
    LayoutError,
    MaskError,
    RinglabError,
    ShapeError,
    TrainingError,
    WorldSizeError,
)
from ringlab.nn import IGNORE
from ringlab.packing import Packing
from tests.packing.drawn import LAYOUT_NAMES, Given, given_batches, values_of
from tests.refusals import error_of, errors_on

RANKS = st.integers(1, 4)


@settings(max_examples=60)
@given(batch=given_batches(), P=RANKS, name=st.sampled_from(LAYOUT_NAMES))
def test_what_is_packed_and_cut_comes_back(batch: Given, P: int, name: str) -> None:
    packing, values = batch.packing, values_of(batch)
    layout = packing.layout(name, P)
    shards = [packing.shard(layout, rank, x=values)["x"] for rank in range(P)]
    whole = packing.unshard(layout, shards)
    assert np.array_equal(packing.restore(whole, fill=-7), values)
    for number, document in enumerate(packing.unpack(whole)):
        assert document.tolist() == values[batch.whose == number].tolist()
    assert [len(x) for x in packing.unpack(whole)] == list(packing.documents)
    tensors = [torch.from_numpy(shard) for shard in shards]
    assert torch.equal(packing.restore(packing.unshard(layout, tensors), fill=-7), torch.from_numpy(values))


@settings(max_examples=60)
@given(batch=given_batches())
def test_the_mask_lets_tokens_see_their_own_document(batch: Given) -> None:
    """Tokens see the tokens of their own document and no padding, by the packed sequence's document ids."""
    packing = batch.packing
    everyone, ids = np.arange(packing.length), packing.document_ids
    seen = packing.mask(causal=False).visible(everyone, everyone)
    real = ids >= 0
    assert np.array_equal(seen[real], (ids[real, None] == ids[None, :]))
    assert np.array_equal(np.bincount(ids[real], minlength=len(packing.documents)), packing.documents)
    assert packing.position_ids[real].tolist() == [i for n in packing.documents for i in range(n)]
    assert packing.cu_seqlens.dtype == packing.cu_seqlens_padded.dtype == np.int32
    assert packing.cu_seqlens[-1] == real.sum() and packing.cu_seqlens_padded[-1] == packing.length
    again = Packing.of_cu_seqlens(packing.cu_seqlens, packing.cu_seqlens_padded)
    assert again.mask() == packing.mask()


@settings(max_examples=60)
@given(batch=given_batches(), ahead=st.integers(1, 4))
def test_labels_stay_in_their_document(batch: Given, ahead: int) -> None:
    """Each document has the labels that it would have alone, and padding has none."""
    packing, values = batch.packing, values_of(batch)
    tokens = torch.from_numpy(
        np.where(values < 0, 5, values)
    )  # padding has a token id, as from some collators
    labels = packing.next_tokens(tokens, ahead)
    documents = packing.unpack(packing.pack(values))
    for document, of_document in zip(documents, packing.unpack(labels), strict=True):
        assert of_document.tolist() == [*document[ahead:].tolist(), *[IGNORE] * ahead][: len(document)]
    assert (labels[0][torch.from_numpy(packing.document_ids < 0)] == IGNORE).all()
    weights = packing.next_weights(values + 10, ahead)[0]
    assert torch.equal(weights, torch.where(labels[0] == IGNORE, 0, labels[0] + 10))


def gathered(ring: Ring, name: str) -> list[Any]:
    """Return whether every rank gets all tokens back, for each of three dtypes."""
    packing = Packing.of_lengths([5, 0, 1, 9]).padded(4)
    layout, found = packing.layout(name, ring.world_size), []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.arange(15 * 3, dtype=dtype).reshape(1, 15, 3)
        mine = packing.shard(layout, ring.rank, x=x)["x"]
        found.append(torch.equal(packing.restore(packing.gather(layout, ring, mine)), x))
    return found


def test_every_rank_gets_all_tokens_back() -> None:
    for name in LAYOUT_NAMES:
        assert all(map(all, VirtualCluster(3).run(gathered, name).results))
    assert all(map(all, launch(gathered, 2, "per_document").results))


@pytest.mark.parametrize(
    ("wrong", "own"), [(lambda x: torch.ones(1, 9, 2), ShapeError), (lambda x: x.double(), AgreementError)]
)
def test_a_part_that_one_rank_has_wrong_hangs_nobody(wrong: Any, own: type[Exception]) -> None:
    packing = Packing.of_lengths([5, 3])
    layout = packing.layout("zigzag", 3)

    def call(ring: Ring) -> None:
        part = torch.ones(1, layout.length(ring.rank), 2)
        packing.gather(layout, ring, part if ring.rank else wrong(part))

    found = [
        type(error) for error in VirtualCluster(3).run(lambda ring: error_of(lambda: call(ring))).results
    ]
    assert found == [own, AgreementError, AgreementError]


def test_gradients_go_the_whole_way() -> None:
    packing = Packing.of_attention_mask([[1, 1, 1], [0, 1, 1]]).padded(4)
    x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3).requires_grad_()
    layout = packing.layout("zigzag", 2)
    parts = [packing.shard(layout, rank, x=x)["x"] for rank in range(2)]
    (packing.restore(packing.unshard(layout, parts)) * torch.arange(1.0, 7.0).reshape(2, 3)).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[1, 2, 3], [0, 5, 6]]


def test_rows_of_a_batch_become_documents_of_one_sequence() -> None:
    ids = torch.tensor([[0, 1, 2, 3, 0], [0, 0, 1, 2, 3]])
    packing = Packing.of_position_ids(ids)
    assert packing.documents == (4, 1, 1, 4) and packing.shape == (2, 5)
    assert torch.equal(packing.pack(ids), ids.reshape(1, 10))
    to_a_multiple = Packing.of_position_ids(
        [[0, 1, 2, 0, 0, 0]]
    )  # trl pads a flattened row with position ids of 0 and labels of −100
    assert to_a_multiple.documents == (3, 1, 1, 1)
    same = Packing.of_document_ids([[1, 1], [1, 1]])
    assert same.documents == (2, 2), "the same id in two rows means two documents"


def given_ids(name: str) -> Any:
    packing = Packing.of_lengths([2, 2])
    return packing.shard(packing.layout("zigzag", 1), 0, **{name: torch.tensor([[10, 11, 20, 21]])})


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda: Packing.of_attention_mask([[1, 0, 1]]), MaskError, "padding inside row 0"),
        (lambda: Packing.of_attention_mask([[1, 2, 0]]), MaskError, "of_document_ids(ids, padding=0)"),
        (lambda: Packing.of_document_ids([[1, 2, 1]]), MaskError, "document 1 begins again"),
        (lambda: Packing.of_position_ids([[0, 1], [1, 2]]), MaskError, "before sharding"),
        (lambda: Packing.of_lengths([3, -1]), MaskError, "lengths in tokens"),
        (lambda: Packing.of_lengths([3]).pack(torch.zeros(2, 3)), ShapeError, "before packing and sharding"),
        (
            lambda: Packing.of_lengths([0, 3, 4, 8]).pack(torch.zeros(1, 8)),
            ShapeError,
            "look like cu_seqlens",
        ),
        (lambda: given_ids("position_ids"), MaskError, "leave it out"),
        (lambda: given_ids("document_ids"), MaskError, "own_document_ids="),
        (lambda: Packing.of_lengths([3]).unpack(torch.zeros(1, 4)), ShapeError, "(1, 3, …)"),
        (lambda: Packing.of_lengths([3]).layout("folded", 2), LayoutError, "folded"),
        (
            lambda: Packing.of_lengths([3]).next_tokens(torch.zeros(1, 3, dtype=int), 0),
            TrainingError,
            "ahead >= 1",
        ),
        (
            lambda: Packing.of_lengths([3]).shard(Packing.of_lengths([4]).layout("zigzag", 2), 0),
            LayoutError,
            "the 3 tokens of the packing",
        ),
    ],
)
def test_what_is_refused(wrong: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        wrong()
    assert words in str(caught.value)


OTHER: dict[str, dict[str, Any]] = {
    "tokens": {"input_ids": [9, 8, 7, 6, 5]},
    "documents": {"lengths": (4, 1)},
    "a batch that is wrong": {"input_ids": [1, 2, 3]},
}


def cut_over(ring: Ring, changed: dict[str, Any], **options: Any) -> RinglabError | dict[str, Any]:
    """Give rank 1 another batch than the other ranks; return this rank's error or result."""
    given = {
        "lengths": (3, 2),
        "input_ids": [1, 2, 3, 4, 5],
        "labels": [1, 2, 3, 4, 5],
        "loss_weights": [1.0] * 5,
    }
    given |= changed if ring.rank == 1 else {}
    packing = Packing.of_lengths(given.pop("lengths"))
    try:
        arrays = {name: torch.tensor([x]) for name, x in given.items()}
        return packing.shard(packing.layout("zigzag", ring.world_size), ring, **arrays, **options)
    except RinglabError as error:
        return error


@pytest.mark.parametrize("name", OTHER)
def test_another_batch_on_a_rank_of_a_ring_is_told_to_all(name: str) -> None:
    found = VirtualCluster(3, memory=False).run(cut_over, OTHER[name]).results
    own = ShapeError if "wrong" in name else AgreementError
    assert [type(error) for error in found] == [AgreementError, own, AgreementError], found
    if own is AgreementError:
        assert all("give all ranks of a ring the same batch" in error.remedy for error in found)
        assert all("=" in error.got.rpartition("they differ in: ")[2] for error in found), (
            "the error names the array that differs"
        )


def test_a_ring_cuts_what_its_ranks_number_cuts() -> None:
    packing = Packing.of_lengths([3, 2])
    for rank, mine in enumerate(VirtualCluster(3, memory=False).run(cut_over, {}).results):
        plain = packing.shard(packing.layout("zigzag", 3), rank, input_ids=torch.tensor([[1, 2, 3, 4, 5]]))
        assert torch.equal(mine["input_ids"], plain["input_ids"])
    unchecked = partial(cut_over, changed=OTHER["tokens"], validate=False)
    assert all(isinstance(mine, dict) for mine in VirtualCluster(3, memory=False).run(unchecked).results)
    for error in errors_on(2, lambda ring: packing.shard(packing.layout("zigzag", 3), ring)):
        assert isinstance(error, WorldSizeError) and "a layout for 2 ranks" in str(error)


IDS = torch.zeros(1, 6, dtype=torch.long)


@pytest.mark.parametrize(
    "said",
    [
        {"cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32)},
        {"cu_seqlens_q": [0, 2, 6], "cu_seqlens_kv": [0, 2, 6]},
        {"seq_idx": [[0, 0, 1, 1, 1, 1]], "attention_mask": [[1] * 6]},
        {"position_ids": np.array([0, 1, 0, 1, 2, 3])},
    ],
    ids=lambda said: ", ".join(said),
)
def test_a_batch_is_read_by_all_that_it_says(said: dict[str, Any]) -> None:
    for ids in (IDS, IDS[0].numpy(), IDS.tolist()):
        packing = Packing.of_batch({"input_ids": ids, **said})
        assert packing.documents == (2, 4) and packing.shape == (1, 6)
        assert packing.pack(ids).tolist() == [[0] * 6]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"segment_ids": [[1, 1, 2, 2, 2, 2]]}, "Packing.of_document_ids"),
        ({"document_ids": [[0, 0, 1, 1, 1, 1]], "position_ids": [[0, 1, 0, 1, 2, 3]]}, "leave document_ids out"),
        ({"seq_lengths": [[2, 4]]}, "Packing.of_lengths"),
        ({"cu_seqlens": [0, 2, 5], "cu_seqlens_padded": [0, 2, 6]}, "padded=cu_seqlens_padded"),
        ({"cu_seqlens": [0, 2, 6], "cu_seq_lens_q": [0, 3, 6]}, "the same documents in cu_seq_lens_q and cu_seqlens"),
        ({"cu_seqlens": [0, 2, 6], "position_ids": [[0, 1, 2, 3, 4, 5]]}, "the same documents in cu_seqlens"),
        ({"attention_mask": [[1, 1, 2, 2, 2, 2]], "position_ids": [[0, 1, 2, 3, 4, 5]]}, "values up to 2"),
        ({"input_ids": [[1, 2], [3]]}, "input_ids"),
        ({"input_ids": None}, "input_ids"),
    ],
)  # fmt: skip
def test_nothing_that_a_batch_says_of_documents_is_ignored(said: dict[str, Any], words: str) -> None:
    with pytest.raises(MaskError) as caught:
        Packing.of_batch({"input_ids": IDS, **said})
    assert words in str(caught.value)


def test_it_says_what_it_is() -> None:
    assert repr(Packing.of_lengths([3, 1]).padded(4)) == "Packing(2 documents, 4 tokens, 4 tokens of padding)"
    assert repr(Packing.of_lengths([])) == "Packing(no documents)" and Packing.of_lengths([]).length == 0
