"""Lengths of packed documents, read from the forms that data loaders use: cu_seqlens, position ids, document ids.

Ids and cu_seqlens may be tensors, arrays or lists, of shape (n,) or (1, n).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Int64

from ringlab.errors import MaskError


def lengths_of_cu_seqlens(cu_seqlens: Any) -> tuple[int, ...]:
    """Return the documents' lengths, given flash-attn's cu_seqlens: 0, and then the end of each document.

    Raises: MaskError unless cu_seqlens are integers that begin with 0 and do not descend.

    >>> lengths_of_cu_seqlens([0, 3, 3, 7])
    (3, 0, 4)
    """
    ends = integers(cu_seqlens, "cu_seqlens, a vector of integers")
    if not len(ends) or ends[0] != 0 or (np.diff(ends) < 0).any():
        looks_like_lengths = len(ends) and (ends >= 0).all()
        raise MaskError(
            "cu_seqlens: 0, and then the end of each document, in ascending order",
            f"{_shown(ends)}",
            "these look like lengths: Mask(documents=tuple(lengths)), Packing.of_lengths(lengths)"
            if looks_like_lengths
            else "",
        )
    return tuple(np.diff(ends).tolist())


def padding_of_cu_seqlens(lengths: tuple[int, ...], padded: Any) -> tuple[int, ...]:
    """Return the number of padding tokens after each document, given cu_seqlens_padded.

    cu_seqlens_padded: the padded start of each document, and then the end.
    Raises: MaskError if cu_seqlens_padded is for another number of documents, or leaves a document too little
    room.

    >>> padding_of_cu_seqlens((3, 0, 4), [0, 4, 4, 8])
    (1, 0, 0)
    """
    places = lengths_of_cu_seqlens(padded)
    if len(places) != len(lengths):
        raise MaskError(
            f"cu_seqlens_padded of {len(lengths)} documents, as in cu_seqlens", f"{len(places)} documents"
        )
    for number, (length, place) in enumerate(zip(lengths, places, strict=True)):
        if place < length:
            raise MaskError(
                f"room for the {length} tokens of document {number} in cu_seqlens_padded",
                f"room for {place}",
                "cu_seqlens counts tokens without padding, cu_seqlens_padded with it: were they swapped?",
            )
    return tuple(place - length for length, place in zip(lengths, places, strict=True))


def lengths_of_position_ids(ids: Any) -> tuple[int, ...]:
    """Return the documents' lengths, given each token's position in its document. A 0 begins a document.

    Raises: MaskError for positions that neither ascend by one nor start again at 0.

    >>> lengths_of_position_ids([0, 1, 2, 0])
    (3, 1)
    """
    ids = integers(ids)
    starts = _starts(ids[1:] != ids[:-1] + 1, len(ids))
    if (ids[starts] != 0).any():
        wrong = int(starts[ids[starts] != 0][0])
        before = f"{ids[wrong - 1]} and then " if wrong else ""
        offset = int(ids[0])
        offsets = f"; if the model's ids begin at {offset}, pass ids - {offset}"
        raise MaskError(
            "position ids that ascend by one and start again at 0 with each document",
            f"{before}{ids[wrong]} at token {wrong}",
            "pass the position ids of the whole sequence in its original order, before sharding"
            + offsets * (offset > 0 and bool((ids[starts] == offset).all())),
        )
    return tuple(np.diff(np.append(starts, len(ids))).tolist())


def runs_of_ids(ids: Any, padding: int | None = None) -> list[tuple[int, int, int]]:
    """Return (id, first token, length) of each stretch of tokens with one document id.

    Only the id `padding` may occur in more than one stretch.

    Raises: MaskError for a document whose tokens are not adjacent.

    >>> runs_of_ids([7, 7, 0, 9, 0], padding=0)
    [(7, 0, 2), (0, 2, 1), (9, 3, 1), (0, 4, 1)]
    """
    ids = integers(ids)
    starts = _starts(ids[1:] != ids[:-1], len(ids))
    seen: set[int] = set()
    for start in starts.tolist():
        name = int(ids[start])
        if name in seen and name != padding:
            raise MaskError(
                "documents whose tokens are adjacent",
                f"document {name} begins again at token {start}",
                "sort the tokens by document before packing them",
            )
        seen.add(name)
    stops = np.append(starts, len(ids))[1:]
    return [(int(ids[a]), int(a), int(b - a)) for a, b in zip(starts, stops, strict=True)]


def integers(values: Any, needed: str = "one integer for each token") -> Int64[np.ndarray, " n"]:
    """Return the values as a vector of int64. Raises: MaskError unless they are integers of shape (n,) or (1, n)."""
    found = as_array(values, needed)
    if found.ndim == 2 and len(found) == 1:
        found = found[0]
    if found.ndim != 1 or found.dtype.kind not in "iu":
        several = found.ndim == 2 and found.dtype.kind in "iu"
        raise MaskError(
            needed,
            f"{found.dtype} of shape {found.shape}",
            "one sequence at a time; ringlab.packing.Packing makes one sequence of all rows"
            if several
            else "",
        )
    return found.astype(np.int64)


def as_array(values: Any, needed: str = "one integer for each token") -> np.ndarray:
    """Return the values of a tensor, array or list as an array. Raises: MaskError for a list of unequal rows."""
    try:
        found = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except ValueError as error:
        raise MaskError(needed, f"{type(values).__name__}: {error}") from error
    return found.astype(np.int64) if found.size == 0 and found.dtype == float else found  # an empty list


def look_like_cu_seqlens(values: Any, S: int | None = None) -> bool:
    """Return whether the values begin with 0, do not descend and, if S is given, end at S."""
    try:
        found = integers(values)
    except MaskError:
        return False
    rises = len(found) > 1 and found[0] == 0 and bool((np.diff(found) >= 0).all()) and bool(found[-1])
    return rises and (S is None or int(found[-1]) == S)


def _starts(changes: np.ndarray, n: int) -> np.ndarray:
    """Return the indices at which something new begins: 0, and each later token marked in `changes`."""
    return np.flatnonzero(np.concatenate([np.ones(min(1, n), bool), changes]))


def _shown(values: np.ndarray) -> str:
    some = ", ".join(map(str, values[:8].tolist()))
    return f"[{some}, …], {len(values)} numbers" if len(values) > 8 else f"[{some}]"
