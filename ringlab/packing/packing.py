"""`Packing`: the places of documents in one packed sequence, the ranks' parts of it, and the way back.

    arrays of the data loader, (rows, columns)  ─ pack ─→  (1, S)  ─ shard ─→  a rank's (1, L)
                                  ←─ restore ─  or  ←─ unpack ─  (1, S)  ←─ gather or unshard ─

Rows of a batch become documents of one sequence. The result is exact for rows of any lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64

from ringlab.comm.ring import Ring
from ringlab.errors import LayoutError, MaskError, ShapeError
from ringlab.layout import Layout, get_layout, per_document
from ringlab.lengths import look_like_cu_seqlens
from ringlab.mask import Mask
from ringlab.nn.loss import IGNORE, next_tokens
from ringlab.packing import picking, reading
from ringlab.rank_agreement import checked_over, cut_alike


@dataclass(frozen=True, eq=False)
class Packing:
    """The places of documents in one packed sequence of S tokens, and of its tokens in the original arrays.

    documents: the lengths of documents in tokens, without padding. padding: the number of padding tokens
    after each document. shape: the (rows, columns) of the arrays that `pack` takes. places: for each of the
    S tokens its index in such an array after flattening, or −1 for padding that `pack` adds. The methods
    `of_…` make a packing.

    >>> import torch
    >>> packing = Packing.of_cu_seqlens([0, 3, 4, 8])
    >>> layout = packing.layout("per_document", P=2)
    >>> tokens = torch.arange(10, 18)[None]
    >>> for rank in range(2):
    ...     mine = packing.shard(layout, rank, input_ids=tokens, labels=tokens)
    ...     print(mine["input_ids"].tolist(), mine["position_ids"].tolist(), mine["labels"].tolist())
    [[10, 11, 12, 14, 17]] [[0, 1, 2, 0, 3]] [[11, 12, -100, 15, -100]]
    [[13, 15, 16]] [[0, 1, 2]] [[-100, 16, 17]]
    """

    documents: tuple[int, ...]
    padding: tuple[int, ...]
    shape: tuple[int, int]
    places: np.ndarray

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> Packing:
        """Return the packing of documents of these lengths in tokens, one after the other.

        Raises: MaskError for lengths that are not integers ≥ 0.

        >>> Packing.of_lengths([3, 1, 4]).cu_seqlens
        array([0, 3, 4, 8], dtype=int32)
        """
        documents = Mask(documents=tuple(lengths)).documents
        return cls(documents, (0,) * len(documents), (1, sum(documents)), np.arange(sum(documents)))

    @classmethod
    def of_cu_seqlens(cls, cu_seqlens: Any, padded: Any = None) -> Packing:
        """Return the packing that flash-attn's cu_seqlens describe: 0, and then the end of each document.

        padded: cu_seqlens_padded, if the data have padding after documents, as in TransformerEngine's THD.
        Raises: MaskError for numbers that do not begin with 0 or that descend, or for a document that is
        longer than its padded place.

        >>> Packing.of_cu_seqlens([0, 3, 4], padded=[0, 4, 8]).padding
        (1, 3)
        """
        return cls(*reading.of_cu_seqlens(cu_seqlens, padded))

    @classmethod
    def of_position_ids(cls, ids: Any) -> Packing:
        """Return the packing, given each token's position in its document, (S,) or (rows, columns).

        Position 0 begins a document.

        Raises: MaskError for positions that neither ascend by one nor start again at 0.

        >>> Packing.of_position_ids([[0, 1, 2, 3], [0, 0, 1, 2]]).documents
        (4, 1, 3)
        """
        return cls(*reading.of_position_ids(ids))

    @classmethod
    def of_document_ids(cls, ids: Any, padding: int | None = None) -> Packing:
        """Return the packing, given each token's document or segment id, (S,) or (rows, columns).

        padding: the id of padding, which is dropped; 0 in MaxText and axolotl. None means that every id is a
        document. The same id in two rows means two documents.
        Raises: MaskError for a document whose tokens are not adjacent.

        >>> Packing.of_document_ids([[1, 1, 2, 0], [1, 0, 0, 0]], padding=0).documents
        (2, 1, 1)
        """
        return cls(*reading.of_document_ids(ids, padding))

    @classmethod
    def of_attention_mask(cls, mask: Any) -> Packing:
        """Return the packing of a padded batch (rows, columns), with only the tokens where `mask` is 1.

        Raises: MaskError for padding inside a row, or a mask of pairs.

        >>> Packing.of_attention_mask([[1, 1, 1], [0, 1, 1]]).documents
        (3, 2)
        """
        return cls(*reading.of_attention_mask(mask))

    @classmethod
    def of_batch(cls, batch: Any) -> Packing:
        """Return the packing of a collator's batch. `reading.of_batch` lists the entries that are read.

        Raises: MaskError for entries that contradict each other, or that describe documents but are not read.

        >>> import torch
        >>> Packing.of_batch({"input_ids": torch.zeros(1, 5), "position_ids": torch.tensor([[0, 1, 0, 1, 2]])}).documents
        (2, 3)
        """
        return cls(*reading.of_batch(batch))

    def padded(self, multiple: int) -> Packing:
        """Return the packing in which each document is padded to a multiple of `multiple` tokens.

        Other padding is dropped. Packages that cut each document into 2P equal chunks need multiple = 2P;
        ringlab does not. No token of a document sees padding, and `next_tokens` gives padding no label.
        Raises: LayoutError for a multiple below 1.

        >>> Packing.of_lengths([3, 4, 1]).padded(4).padding
        (1, 0, 3)
        """
        if multiple < 1:
            raise LayoutError("a multiple >= 1", f"{multiple}")
        padding = tuple(-length % multiple for length in self.documents)
        parts = [
            np.concatenate([self.places[tokens], np.full(pad, -1)])
            for tokens, pad in zip(self.slices, padding, strict=True)
        ]
        return Packing(self.documents, padding, self.shape, np.concatenate([np.zeros(0, np.int64), *parts]))

    @property
    def length(self) -> int:
        """Return the number of tokens of the packed sequence, including padding."""
        return len(self.places)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(accumulate(map(sum, zip(self.documents, self.padding, strict=True)), initial=0))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the slice of the packed sequence that contains each document, without its padding."""
        begins = self._starts[:-1]
        return tuple(slice(at, at + length) for at, length in zip(begins, self.documents, strict=True))

    @property
    def cu_seqlens(self) -> Int32[np.ndarray, " _"]:
        """Return flash-attn's cu_seqlens, which do not count padding."""
        return np.array([0, *accumulate(self.documents)], np.int32)

    @property
    def cu_seqlens_padded(self) -> Int32[np.ndarray, " _"]:
        """Return TransformerEngine's cu_seqlens_padded: each document's start, and the sequence's end."""
        return np.array(self._starts, np.int32)

    @cached_property
    def document_ids(self) -> Int64[np.ndarray, " S"]:
        """Return the number of each token's document, or −1 for padding."""
        numbered = enumerate(zip(self.documents, self.padding, strict=True))
        repeats = [(number, length, pad) for number, (length, pad) in numbered]
        names = [name for number, _, _ in repeats for name in (number, -1)]
        return np.repeat(np.array(names, np.int64), [n for _, length, pad in repeats for n in (length, pad)])

    @cached_property
    def position_ids(self) -> Int64[np.ndarray, " S"]:
        """Return each token's position in its document, for RoPE. Padding after a document counts from 0."""
        mask = self.mask()
        return mask.position_ids(np.arange(self.length)) if mask.documents else np.zeros(0, np.int64)

    def mask(self, **other: Any) -> Mask:
        """Return the mask of the packed sequence. Padding after a document is a separate document in the mask.

        other: further fields of the mask, such as window=. Raises: MaskError, as `Mask` does.

        >>> Packing.of_lengths([3, 1]).padded(2).mask(window=2).documents
        (3, 1, 1, 1)
        """
        if not any(self.padding):
            return Mask(documents=self.documents, **other)
        pairs = zip(self.documents, self.padding, strict=True)
        return Mask(documents=tuple(n for pair in pairs for n in pair), **other)

    def layout(self, name: str, P: int) -> Layout:
        """Return a layout of the packed sequence. name: "per_document", or a layout that ignores documents.

        Raises: LayoutError for an unknown name, or unless P is an integer ≥ 1.

        >>> Packing.of_lengths([4, 2]).layout("per_document", 2).lengths
        (4, 2)
        """
        if name != "per_document":
            return get_layout(name, self.length, P)
        return per_document([n + pad for n, pad in zip(self.documents, self.padding, strict=True)], P)

    def pack(self, x: Any, fill: Any = 0) -> Any:
        """Return the packed sequence (1, S, …) of an array (rows, columns, …). `fill` is the value of padding.

        Raises: ShapeError for an array of another shape.

        >>> Packing.of_attention_mask([[1, 1], [0, 1]]).pack([[5, 6], [0, 7]])
        array([[5, 6, 7]])
        """
        return picking.picked(self._flat(x), self.places, fill)[None]

    def _flat(self, x: Any) -> Any:
        x, (rows, columns) = picking.as_one(x), self.shape
        x = x[None] if rows == 1 and x.shape[:1] == (columns,) and x.shape[:2] != (1, columns) else x
        if tuple(x.shape[:2]) != self.shape:
            S = x.shape[:2][-1] if x.ndim else 0
            raise ShapeError(
                f"{rows} rows of {columns} tokens, from which the packing was made",
                f"shape {tuple(x.shape)}",
                "the lengths look like cu_seqlens: Packing.of_cu_seqlens(cu_seqlens)"
                if look_like_cu_seqlens(self.documents, S)
                else "pass the whole batch as the data loader returns it, before packing and sharding",
            )
        return x.reshape(rows * columns, *x.shape[2:])

    def restore(self, packed: Any, fill: Any = 0) -> Any:
        """Return the array (rows, columns, …) of a packed sequence, with `fill` where padding was dropped.

        Raises: ShapeError unless `packed` is (1, S, …).

        >>> Packing.of_attention_mask([[1, 1], [0, 1]]).restore([[5, 6, 7]], fill=-1)
        array([[ 5,  6],
               [-1,  7]])
        """
        there = self.places >= 0
        rows, columns = self.shape
        kept = picking.picked(self._sequence(packed), np.flatnonzero(there))
        flat = picking.put(kept, self.places[there], rows * columns, fill)
        return flat.reshape(rows, columns, *flat.shape[1:])

    def unpack(self, packed: Any) -> list[Any]:
        """Return the documents (n, …) of a packed sequence, without padding.

        Raises: ShapeError unless `packed` is (1, S, …).

        >>> Packing.of_lengths([2, 1]).unpack([[5, 6, 7]])
        [array([5, 6]), array([7])]
        """
        sequence = self._sequence(packed)
        return [sequence[tokens] for tokens in self.slices]

    def _sequence(self, packed: Any) -> Any:
        packed = picking.as_one(packed)
        if tuple(packed.shape[:2]) != (1, self.length):
            raise ShapeError(f"a packed sequence (1, {self.length}, …)", f"shape {tuple(packed.shape)}")
        return packed[0]

    def next_tokens(self, labels: Any, ahead: int = 1) -> Any:
        """Return the label of each packed token, (1, S): the label `ahead` tokens later in the same document.

        labels: (rows, columns), not shifted, as transformers expects them; IGNORE for a token that does not
        count. The last `ahead` tokens of a document, and padding, get IGNORE. Multi-token prediction uses
        ahead = 2, 3, …
        Raises: ShapeError for labels of another shape; TrainingError for `ahead` below 1.

        >>> import torch
        >>> Packing.of_lengths([3, 2]).next_tokens(torch.tensor([[1, 2, 3, 4, 5]]))
        tensor([[   2,    3, -100,    5, -100]])
        """
        packed = self._without_padding(self.pack(picking.as_tensor(labels), IGNORE), IGNORE)
        return next_tokens(packed, self.mask(), ahead)

    def next_weights(self, weights: Any, ahead: int = 1) -> Any:
        """Return the loss weight of each packed token, (1, S): the weight of its `next_tokens` label, or 0.

        weights: the weight of each token as a label, (rows, columns). Raises: as `next_tokens`.

        >>> import torch
        >>> Packing.of_lengths([3, 2]).next_weights(torch.tensor([[1.0, 0.5, 0.25, 1.0, 2.0]]))
        tensor([[0.5000, 0.2500, 0.0000, 2.0000, 0.0000]])
        """
        packed = self._without_padding(self.pack(picking.as_tensor(weights)), 0)
        after = next_tokens(picking.as_tensor(np.arange(self.length)[None]), self.mask(), ahead)[0].numpy()
        return picking.picked(packed[0], np.where(after == IGNORE, -1, after), 0)[None]

    def _without_padding(self, packed: Any, fill: Any) -> Any:
        return picking.picked(packed[0], np.where(self.document_ids < 0, -1, np.arange(self.length)), fill)[
            None
        ]

    def shard(
        self,
        layout: Layout,
        rank: int | Ring,
        *,
        labels: Any = None,
        loss_weights: Any = None,
        validate: bool = True,
        **others: Any,
    ) -> dict[str, Any]:
        """Return a rank's part of a batch: its arrays, "position_ids" and "document_ids", each (1, L, …).

        rank: this rank's ring, or the number of any rank. The ranks of a ring compare a hash of the whole
        batch, unless validate=False. With a number, different batches on different ranks are not detected.
        labels, loss_weights: not shifted. `next_tokens` and `next_weights` shift them BEFORE they are cut.
        All other arrays, such as input_ids, are packed and cut without a shift. Position ids count from 0 in
        each document.
        Raises: ShapeError for an array of another shape; LayoutError for a layout of another length;
        WorldSizeError unless 0 ≤ rank < P, or for a ring that does not fit the layout; MaskError for
        position_ids or document_ids, which the packing makes itself; AgreementError if the ring's ranks have
        different batches.
        """
        whole = {"labels": labels, "loss_weights": loss_weights, **others}
        if not isinstance(rank, Ring):
            return self._shard(layout, rank, **whole)
        arrays = {name: x for name, x in whole.items() if x is not None} | {"documents": self.cu_seqlens}
        return cut_alike(rank, arrays, lambda: self._shard_over(layout, rank, **whole), validate)

    def _shard_over(self, layout: Layout, ring: Ring, **whole: Any) -> dict[str, Any]:
        layout.of_ranks(ring.world_size)
        return self._shard(layout, ring.rank, **whole)

    def _shard(
        self, layout: Layout, rank: int, labels: Any, loss_weights: Any, **others: Any
    ) -> dict[str, Any]:
        self.check(layout)
        for name in ("position_ids", "document_ids"):
            if name in others:
                raise MaskError(
                    f"no {name}, which the packing makes itself",
                    f"{name}=",
                    f"leave it out; to cut ids of your own, pass them by another name: own_{name}=",
                )
        given = {name: self.pack(x) for name, x in others.items()}
        if labels is not None:
            given["labels"] = self.next_tokens(labels)
        if loss_weights is not None:
            given["loss_weights"] = self.next_weights(loss_weights)
        any_of_them = next(iter(given.values()), None)
        for name, ids in (("position_ids", self.position_ids), ("document_ids", self.document_ids)):
            given[name] = picking.like(ids[None], any_of_them)
        return {name: layout.shard(x, rank, dim=1) for name, x in given.items()}

    def unshard(self, layout: Layout, shards: Sequence[Any]) -> Any:
        """Return the packed sequence (1, S, …) of the ranks' parts (1, L, …), in rank order.

        Raises: LayoutError for a layout of another length; WorldSizeError and ShapeError, as `Layout.unshard`.
        """
        self.check(layout)
        return layout.unshard(shards, dim=1)

    def gather(self, layout: Layout, ring: Ring, part: Any) -> Any:
        """Return the whole packed sequence (1, S, …) on every rank; each rank passes its `part` (1, L, …).

        Every rank must call this method. The result is not differentiable.
        Raises: LayoutError for a layout of another length; WorldSizeError for a layout of another number of
        ranks; ShapeError for a part that does not fit the layout; AgreementError on all other ranks if a
        rank's call is wrong, and on all ranks if their calls differ.
        """
        checked_over(ring, lambda: (None, self._described(layout, ring, part)), validate=True)
        shapes = [(1, length, *part.shape[2:]) for length in layout.lengths]
        return layout.unshard(ring.all_gather(part.detach(), shapes), dim=1)

    def _described(self, layout: Layout, ring: Ring, part: Any) -> str:
        """Return the description of a gather that must be equal on all ranks.

        Raises: as `gather`, for this rank.
        """
        self.check(layout)
        layout.of_ranks(ring.world_size)
        length, shape = layout.length(ring.rank), tuple(getattr(part, "shape", ()))
        if not hasattr(part, "detach") or shape[:2] != (1, length):
            raise ShapeError(
                f"a tensor (1, {length}, …), rank {ring.rank}'s part of {layout!r}",
                f"{type(part).__name__} of shape {shape}",
            )
        return f"gather of {layout!r}, parts (1, L, {', '.join(map(str, shape[2:]))}), {part.dtype}"

    def check(self, layout: Layout) -> None:
        """Check that a layout deals as many tokens as this packing has.

        Raises: LayoutError if it does not.
        """
        if layout.S != self.length:
            raise LayoutError(
                f"a layout of the {self.length} tokens of the packing",
                repr(layout),
                "packing.layout(name, P)",
            )

    def __repr__(self) -> str:
        if not self.documents:
            return "Packing(no documents)"
        padded = f", {sum(self.padding)} tokens of padding" if any(self.padding) else ""
        return f"Packing({len(self.documents)} documents, {sum(self.documents)} tokens{padded})"
