"""Which key a query sees, by global position: causal, a sliding window, packed documents, a shared prefix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from ringlab.errors import MaskError


@dataclass(frozen=True)
class Mask:
    """Query i sees key j where all of this holds; it is data, equal and hashable by value.

    - both lie in one document: `documents` gives the lengths of those that are packed one after the other, none
      for one document;
    - `causal`: j ≤ i, or j is one of the first `prefix` tokens of the document, which everyone in it sees; one
      number for all documents, or one for each;
    - `window` = w: |i − j| < w, or j belongs to the prefix. A causal row sees itself and w − 1 keys before it.

    Raises: MaskError for a window below 1, a document or prefix of less than no tokens, a prefix without `causal`,
    or another number of prefixes than documents.
    """

    causal: bool = True
    window: int | None = None
    prefix: int | tuple[int, ...] = 0
    documents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.causal, (bool, np.bool_)):
            raise MaskError("causal=True or causal=False", repr(self.causal))
        if self.window is not None and not (_whole(self.window) and self.window >= 1):
            raise MaskError(
                "window=, a number of tokens ≥ 1, or None",
                repr(self.window),
                "a row that sees itself alone has window=1",
            )
        if not (isinstance(self.documents, tuple) and all(_whole(n) and n >= 0 for n in self.documents)):
            raise MaskError(
                "documents=, a tuple of lengths in tokens",
                repr(self.documents),
                "tuple(lengths); from a document id per token, Mask.of_document_ids(ids)",
            )
        given = self.prefix if isinstance(self.prefix, tuple) else (self.prefix,)
        if not all(_whole(n) and n >= 0 for n in given):
            raise MaskError(
                "prefix=, a number of tokens ≥ 0, or a tuple of one for each document", repr(self.prefix)
            )
        if isinstance(self.prefix, tuple) and len(self.prefix) != max(1, len(self.documents)):
            raise MaskError(
                f"a prefix for each of {max(1, len(self.documents))} documents", f"{len(self.prefix)}"
            )
        if any(given) and not self.causal:
            raise MaskError(
                "causal=True beside a prefix",
                "causal=False",
                "without the causal mask everyone sees all keys, the prefix too",
            )
        self._made_plain()

    def _made_plain(self) -> None:
        """Have Python's own numbers in place of NumPy's: ranks compare what masks say of themselves."""
        plain = {
            "causal": bool(self.causal),
            "window": None if self.window is None else int(self.window),
            "prefix": tuple(map(int, self.prefix)) if isinstance(self.prefix, tuple) else int(self.prefix),
            "documents": tuple(map(int, self.documents)),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of_document_ids(cls, ids: Any, **other: Any) -> Mask:
        """Return the mask of packed documents from each token's document id; a new id begins a new document.

        Raises: MaskError where a document's tokens do not lie side by side, or `ids` is no sequence of integers.
        """
        ids = _integers(ids)
        starts = np.flatnonzero(np.concatenate([np.ones(min(1, len(ids)), bool), ids[1:] != ids[:-1]]))
        if len(np.unique(ids)) < len(starts):
            again = next(i for n, i in enumerate(starts) if ids[i] in ids[starts[:n]])
            raise MaskError(
                "documents that lie in one piece",
                f"document {ids[again]} begins again at token {again}",
                "sort the tokens by document before they are packed",
            )
        return cls(documents=tuple(np.diff(np.append(starts, len(ids))).tolist()), **other)

    @classmethod
    def of_position_ids(cls, ids: Any, **other: Any) -> Mask:
        """Return the mask of packed documents from each token's position in its document; 0 begins a new one.

        Raises: MaskError where positions neither ascend by one nor begin again at 0, or `ids` is no sequence of
        integers.
        """
        ids = _integers(ids)
        first = np.concatenate([np.ones(min(1, len(ids)), bool), ids[1:] != ids[:-1] + 1])
        starts = np.flatnonzero(first)
        if (ids[starts] != 0).any():
            wrong = int(starts[ids[starts] != 0][0])
            before = f"{ids[wrong - 1]} and then " if wrong else ""
            raise MaskError(
                "position ids that ascend by one and begin again at 0 where a document begins",
                f"{before}{ids[wrong]} at token {wrong}",
                "give the position ids of the whole sequence in its own order, before it is sharded",
            )
        return cls(documents=tuple(np.diff(np.append(starts, len(ids))).tolist()), **other)

    def position_ids(self, positions: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Return each token's position in its document, from global positions: what a rank's RoPE must be given."""
        positions = np.asarray(positions, np.int64)
        return positions - self.bounds[self.document_of(positions)]

    @property
    def plain(self) -> bool:
        """Whether the causal flag says all."""
        return self.window is None and len(self.documents) <= 1 and not any(self.prefixes)

    @property
    def prefixes(self) -> tuple[int, ...]:
        """Return the tokens of each document's prefix."""
        return self.prefix if isinstance(self.prefix, tuple) else (self.prefix,) * max(1, len(self.documents))

    def of_length(self, S: int) -> Mask:
        """Return this mask, made sure to be one of S tokens. Raises: MaskError where documents do not add up to S."""
        if self.documents and sum(self.documents) != S:
            told = sum(self.documents)
            raise MaskError(
                f"documents of {S} tokens in all",
                f"{len(self.documents)} documents of {told} tokens",
                "give padding at the end as a document of its own"
                if told < S
                else "a document that was cut counts with what is left of it",
            )
        return self

    @cached_property
    def bounds(self) -> np.ndarray:
        """Return the position at which each document begins, and behind them the end of the last; int64."""
        return np.array([0, *accumulate(self.documents)], np.int64)

    def document_of(self, positions: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Return the number of the document of each global position; 0 where there is one document."""
        if not self.documents:
            return np.zeros(len(positions), np.int64)
        return np.searchsorted(self.bounds, positions, side="right") - 1

    def visible(
        self, queries: Int[np.ndarray, " rows"], keys: Int[np.ndarray, " columns"]
    ) -> Bool[np.ndarray, "rows columns"]:
        """Return who sees whom, from global positions: the definition itself, pair by pair."""
        i, j = np.asarray(queries)[:, None], np.asarray(keys)[None, :]
        of_keys = self.document_of(np.asarray(keys))
        seen = np.ones((len(queries), len(keys)), bool)
        if self.causal:
            seen &= j <= i
        if self.window is not None:
            seen &= abs(i - j) < self.window
        starts = self.bounds[of_keys] if self.documents else np.zeros(len(of_keys), np.int64)
        prefixes = np.array(self.prefixes, np.int64)[of_keys]
        seen |= (np.asarray(keys) < starts + prefixes)[None, :]
        return seen & (self.document_of(np.asarray(queries))[:, None] == of_keys[None, :])


def as_mask(causal: bool | Mask) -> Mask:
    """Return the mask that a flag stands for, or the mask itself."""
    return causal if isinstance(causal, Mask) else Mask(causal=bool(causal))


def _integers(ids: Any) -> np.ndarray:
    try:
        ids = np.asarray(ids.detach().cpu() if hasattr(ids, "detach") else ids)
    except ValueError as error:
        raise MaskError("one integer for each token", f"{type(ids).__name__}: {error}") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise MaskError("one integer for each token", f"{ids.dtype} of shape {ids.shape}")
    return ids.astype(np.int64)


def _whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
