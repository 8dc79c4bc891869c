"""Reads data loaders' descriptions of packed documents, in several forms, as the fields of a `Packing`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from ringlab.errors import MaskError
from ringlab.lengths import (
    as_array,
    lengths_of_cu_seqlens,
    lengths_of_position_ids,
    padding_of_cu_seqlens,
    runs_of_ids,
)

Fields: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, int], np.ndarray]
"""documents, padding, shape and places of a `Packing`."""


def of_cu_seqlens(cu_seqlens: Any, padded: Any = None) -> Fields:
    """Return the fields for cu_seqlens of one sequence, with cu_seqlens_padded if there is padding in the data.

    Raises: MaskError for numbers that do not begin with 0 or that descend, or for a document longer than its
    padded place.
    """
    lengths = lengths_of_cu_seqlens(cu_seqlens)
    padding = (0,) * len(lengths) if padded is None else padding_of_cu_seqlens(lengths, padded)
    S = sum(lengths) + sum(padding)
    return lengths, padding, (1, S), np.arange(S)


def of_position_ids(ids: Any) -> Fields:
    """Return the fields for positions in documents.

    Raises: MaskError unless the positions ascend by one or start again at 0.
    """
    rows = _rows(ids)
    lengths = tuple(n for row in rows for n in lengths_of_position_ids(row))
    return lengths, (0,) * len(lengths), rows.shape, np.arange(rows.size)


def of_document_ids(ids: Any, padding: int | None = None) -> Fields:
    """Return the fields for document ids. Tokens with the id `padding` are dropped.

    Raises: MaskError for a document whose tokens are not adjacent.
    """
    rows = _rows(ids)
    found = [
        (number * rows.shape[1] + start, length)
        for number, row in enumerate(rows)
        for name, start, length in runs_of_ids(row, padding)
        if name != padding
    ]
    places = [np.arange(start, start + length) for start, length in found]
    lengths = tuple(length for _, length in found)
    return lengths, (0,) * len(lengths), rows.shape, np.concatenate([np.zeros(0, np.int64), *places])


def of_attention_mask(mask: Any) -> Fields:
    """Return the fields for a padded batch: each row is a document where `mask` is 1.

    Raises: MaskError for padding inside a row, a mask of pairs, or values that are neither 0 nor 1.
    """
    rows = _rows(mask, "an attention mask (rows, columns), 1 for tokens and 0 for padding")
    _check_flags(rows)
    for number, row in enumerate(rows):
        kept = np.flatnonzero(row)
        if len(kept) and kept[-1] - kept[0] + 1 != len(kept):
            raise MaskError(
                "padding at the ends of rows",
                f"padding inside row {number}, between its tokens",
                "if the row contains several documents: Packing.of_document_ids(ids, padding=0)",
            )
    return of_document_ids(rows, padding=0)


def of_batch(batch: Mapping[str, Any]) -> Fields:
    """Return the fields for a batch as a collator returns it.

    Documents are read from "position_ids", "seq_idx" and cu_seqlens under any of its names, such as
    "cu_seq_lens_q". If the batch has several of these entries, they must agree. If it has none of them, each row is
    a document, without the padding that "attention_mask" marks.
    Raises: MaskError for entries that contradict each other; for padding beside entries that cannot express it; for
    entries that describe documents in a form that is not read, such as "segment_ids".
    """
    shape, mask = _shape(batch), batch.get("attention_mask")
    _check_all_are_read(batch)
    found = {name: read(batch[name]) for name, read in ENTRIES.items() if batch.get(name) is not None}
    if "position_ids" in found and found["position_ids"][2] == (1, shape[1]):  # the same for all rows
        found["position_ids"] = of_position_ids(np.repeat(_rows(batch["position_ids"]), shape[0], axis=0))
    if not found:
        return of_attention_mask(np.ones(shape, int) if mask is None else mask)
    first, *others = found
    for other in others:
        if found[first][0] != found[other][0]:
            raise MaskError(
                f"the same documents in {first} and {other}",
                f"{_few(found[first][0])} and {_few(found[other][0])} tokens",
                "leave out the entry that is wrong",
            )
    if mask is not None:
        _check_no_padding(as_array(mask), first)
    documents, padding, _, places = found[first]
    if shape[0] * shape[1] != len(places):
        raise MaskError(
            f"{first} of all {shape[0] * shape[1]} tokens of input_ids",
            f"{len(places)}",
            "if the data have padding: Packing.of_cu_seqlens(cu_seqlens, padded=cu_seqlens_padded)",
        )
    return documents, padding, shape, places


ENTRIES: dict[str, Callable[[Any], Fields]] = {
    "cu_seq_lens_q": of_cu_seqlens,
    "cu_seq_lens_k": of_cu_seqlens,
    "cu_seqlens": of_cu_seqlens,
    "cu_seqlens_q": of_cu_seqlens,
    "cu_seqlens_k": of_cu_seqlens,
    "cu_seqlens_kv": of_cu_seqlens,
    "seq_idx": of_document_ids,
    "position_ids": of_position_ids,
}
_UNREAD = {
    **dict.fromkeys(
        ("document_ids", "doc_ids", "segment_ids", "sequence_ids"),
        "Packing.of_document_ids(ids), with padding=0 if 0 is the id of padding",
    ),
    **dict.fromkeys(
        ("seq_lengths", "seq_lens", "document_lengths"),
        "Packing.of_lengths(lengths), of the documents in one row without padding",
    ),
    **dict.fromkeys(
        ("cu_seqlens_padded", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
        "Packing.of_cu_seqlens(cu_seqlens, padded=cu_seqlens_padded)",
    ),
}
"""Entries that describe documents but are not read. The values say which reader to call instead."""


def _shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return (rows, columns) of the batch's input_ids. Raises: MaskError unless they are (S,) or (rows, columns)."""
    needed = "input_ids, (S,) or (rows, columns)"
    ids: Any = batch.get("input_ids")
    shape = tuple(ids.shape) if hasattr(ids, "shape") else as_array(ids, needed).shape
    if len(shape) == 1:
        shape = (1, *shape)
    if len(shape) != 2:
        raise MaskError(needed, "none" if ids is None else f"shape {shape}")
    rows, columns = shape
    return rows, columns


def _check_all_are_read(batch: Mapping[str, Any]) -> None:
    for name, reader in _UNREAD.items():
        if batch.get(name) is not None:
            raise MaskError(
                f"documents in entries that of_batch reads: {', '.join(ENTRIES)}",
                f"{name}, which would be ignored",
                f"{reader}; or leave {name} out, if other entries contain the same documents",
            )


def _check_no_padding(mask: np.ndarray, first: str) -> None:
    """Raise MaskError unless the attention mask of a batch with the entry `first` is 1 everywhere."""
    _check_flags(mask)
    if not mask.all():
        raise MaskError(
            f"no padding in an attention_mask that comes with {first}",
            f"{int((mask == 0).sum())} tokens of padding",
            f"leave out {first}, if each row is one document; or Packing.of_document_ids(ids, padding=0)",
        )


def _check_flags(mask: np.ndarray) -> None:
    """Raise MaskError unless an attention mask has only the values 0 and 1."""
    if not np.isin(mask, (0, 1)).all():
        raise MaskError(
            "an attention mask of 0 and 1",
            f"values up to {mask.max()}",
            "if they are document ids: Packing.of_document_ids(ids, padding=0)",
        )


def _rows(ids: Any, needed: str = "one integer for each token, (S,) or (rows, columns)") -> Any:
    """Return ids as an array (rows, columns) of int64."""
    found = as_array(ids, needed)
    found = found[None] if found.ndim == 1 else found
    if found.ndim != 2 or found.dtype.kind not in "iub":
        raise MaskError(needed, f"{found.dtype} of shape {found.shape}")
    return found.astype(np.int64)


def _few(lengths: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, lengths[:6]))}{', …' if len(lengths) > 6 else ''}"
