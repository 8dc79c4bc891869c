"""The mask: the keys that each query sees, by global position.

A mask can be causal, and have a sliding window, packed documents and a shared prefix. `ring_attention` takes
the mask as `mask=`. `ringlab.plan` turns it into tiles, so no mask tensor is ever built.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from ringlab.errors import LayoutError, MaskError
from ringlab.handles import Handled
from ringlab.layout import Layout
from ringlab.lengths import (
    lengths_of_cu_seqlens,
    lengths_of_position_ids,
    look_like_cu_seqlens,
    padding_of_cu_seqlens,
    runs_of_ids,
)


@dataclass(frozen=True)
class Mask(Handled):
    """A mask: query i sees key j if all conditions below are met. Masks are compared and hashed by value.

    - Both tokens are in the same document. `documents` contains the lengths of the packed documents, in
      order. If it is empty, the whole sequence is one document.
    - `causal`: j ≤ i, or j belongs to the document's prefix. `prefix` is the length of the prefix, which
      every token of the document sees: one number for all documents, or a tuple with one number for each
      document. With a window, the prefix can consist of sink tokens (arXiv 2309.17453); sink logits are
      `sinks=` of `ring_attention`.
    - `window` = w: |i − j| < w, or j belongs to the prefix. A causal row sees itself and the w − 1 keys before it.

    Raises: MaskError for a window below 1, a negative length of a document or prefix, a prefix without `causal`, or
    a tuple of prefixes whose length differs from that of `documents`.

    >>> import numpy as np
    >>> from ringlab import Mask
    >>> tokens = np.arange(4)
    >>> Mask(window=2).visible(tokens, tokens).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 1, 1, 0],
           [0, 0, 1, 1]])
    >>> Mask(documents=(3, 1)) == Mask.of_document_ids([7, 7, 7, 9])
    True
    """

    causal: bool = True
    window: int | None = None
    prefix: int | tuple[int, ...] = 0
    documents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.causal, (bool, np.bool_)):
            raise MaskError("causal=True or causal=False", repr(self.causal))
        for name in ("documents", "prefix"):
            given = getattr(self, name)
            if isinstance(given, list) and not (name == "documents" and look_like_cu_seqlens(given)):
                object.__setattr__(self, name, tuple(given))
        if self.window is not None and not (_whole(self.window) and self.window >= 1):
            raise MaskError(
                "window=, a number of tokens ≥ 1, or None", repr(self.window), _window_remedy(self.window)
            )
        if not (isinstance(self.documents, tuple) and all(_whole(n) and n >= 0 for n in self.documents)):
            raise MaskError(
                "documents=, a tuple or list of lengths in tokens",
                repr(self.documents),
                "these look like cu_seqlens: Mask.of_cu_seqlens(cu_seqlens)"
                if look_like_cu_seqlens(self.documents)
                else "tuple(lengths); from a document id per token, Mask.of_document_ids(ids)",
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
                "causal=True with a prefix",
                "causal=False",
                "without the causal mask every row sees the prefix anyway: leave prefix= out",
            )
        self._use_python_numbers()

    def _use_python_numbers(self) -> None:
        """Replace NumPy numbers by Python numbers, because ranks compare the repr of their masks."""
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
        """Return the mask of packed documents, given each token's document id. A new id begins a document.

        other: further fields of the mask, such as window=.
        Raises: MaskError for a document whose tokens are not adjacent, or ids that are not a sequence of integers.

        >>> Mask.of_document_ids([7, 7, 7, 9], window=2).documents
        (3, 1)
        """
        return cls(documents=tuple(length for _, _, length in runs_of_ids(ids)), **other)

    @classmethod
    def of_position_ids(cls, ids: Any, **other: Any) -> Mask:
        """Return the mask of packed documents, given each token's position in its document; 0 begins a new document.

        other: further fields of the mask, such as window=.
        Raises: MaskError for positions that neither ascend by one nor start again at 0, or ids that are not a
        sequence of integers.

        >>> Mask.of_position_ids([0, 1, 2, 0]).documents
        (3, 1)
        """
        return cls(documents=lengths_of_position_ids(ids), **other)

    @classmethod
    def of_cu_seqlens(cls, cu_seqlens: Any, *, padded: Any = None, **other: Any) -> Mask:
        """Return the mask of packed documents, given cu_seqlens: 0, and then the end of each document.

        padded: cu_seqlens_padded, if there is padding after documents, as in TransformerEngine's THD. The
        padding after a document then counts as a separate document, so no token of the document sees the
        padding.
        other: further fields of the mask, such as window=.
        Raises: MaskError for numbers that do not begin with 0 or that descend, or for a document that is
        longer than its padded place.

        >>> Mask.of_cu_seqlens([0, 3, 4]).documents
        (3, 1)
        >>> Mask.of_cu_seqlens([0, 3, 4], padded=[0, 4, 8]).documents
        (3, 1, 1, 3)
        """
        lengths = lengths_of_cu_seqlens(cu_seqlens)
        if padded is not None:
            padding = padding_of_cu_seqlens(lengths, padded)
            lengths = tuple(n for pair in zip(lengths, padding, strict=True) for n in pair)
        return cls(documents=lengths, **other)

    def position_ids(self, positions: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Return each token's position in its document, given global positions. RoPE uses these positions.

        Raises: MaskError for positions that are in no document.
        """
        positions = np.asarray(positions, np.int64)
        end = int(self.bounds[-1]) if self.documents else None
        if len(positions) and (positions.min() < 0 or (end is not None and positions.max() >= end)):
            raise MaskError(
                "global positions, which count from 0" + ("" if end is None else f" to {end - 1}"),
                f"positions from {positions.min()} to {positions.max()}",
                "pass layout.positions(rank); if a model's ids begin at another number, add it to the result",
            )
        return positions - self.bounds[self.document_of(positions)]

    @property
    def plain(self) -> bool:
        """Return whether the mask has no rule but its `causal` flag."""
        return self.window is None and len(self.documents) <= 1 and not any(self.prefixes)

    @property
    def prefixes(self) -> tuple[int, ...]:
        """Return the length of each document's prefix, in tokens."""
        return self.prefix if isinstance(self.prefix, tuple) else (self.prefix,) * max(1, len(self.documents))

    def of_length(self, S: int) -> Mask:
        """Return this mask if it fits S tokens.

        Raises: MaskError if its documents do not have S tokens in all.
        """
        if self.documents and sum(self.documents) != S:
            total = sum(self.documents)
            raise MaskError(
                f"documents of {S} tokens in all",
                f"{len(self.documents)} documents of {total} tokens",
                _remedy(self.documents, S),
            )
        return self

    @cached_property
    def bounds(self) -> np.ndarray:
        """Return the first position of each document, then the end of the last one; int64."""
        return np.array([0, *accumulate(self.documents)], np.int64)

    def document_of(self, positions: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Return the number of the document that contains each global position, or 0 without documents."""
        if not self.documents:
            return np.zeros(len(positions), np.int64)
        return np.searchsorted(self.bounds, positions, side="right") - 1

    def visible(
        self, queries: Int[np.ndarray, " rows"], keys: Int[np.ndarray, " columns"]
    ) -> Bool[np.ndarray, "rows columns"]:
        """Return a boolean array, True where a query sees a key, given global positions.

        This method defines the mask.
        """
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
    """Return the mask for the flag `causal`, or `causal` itself if it is a mask.

    Raises: MaskError for any other value.
    """
    if isinstance(causal, Mask):
        return causal
    return _plain(causal) if isinstance(causal, bool) else Mask(causal=causal)


@cache
def _plain(causal: bool) -> Mask:
    return Mask(causal=causal)


def check_position_ids(ids: Any, layout: Layout, mask: Mask, rank: int, *, or_global: bool = False) -> None:
    """Check that `ids` are the positions, in their documents, of the tokens of `rank`, in local order.

    or_global: whether positions in the whole sequence are also accepted.

    Raises: LayoutError, naming the first token whose position id is wrong.
    """
    ids = np.asarray(ids.detach().cpu() if hasattr(ids, "detach") else ids)
    if or_global and np.array_equal(ids, layout.positions(rank)):
        return
    expected = mask.of_length(layout.S).position_ids(layout.positions(rank))
    remedy = (
        f"shard the position ids of the whole sequence like the tokens: layout.shard(ids, {rank}, dim=-1)"
    )
    if ids.shape != expected.shape:
        raise LayoutError(
            f"{len(expected)} position ids on rank {rank} of {layout!r}", f"shape {ids.shape}", remedy
        )
    wrong = np.flatnonzero(ids != expected)
    if len(wrong):
        i = int(wrong[0])
        if len(np.unique(ids - expected)) == 1 and ids[i] > expected[i]:
            offset = ids[i] - expected[i]
            remedy += f"; if the model's ids begin at {offset}, pass ids - {offset}"
        raise LayoutError(
            f"position {expected[i]} for local token {i} of rank {rank} under {layout!r}",
            f"{ids[i]}; {len(wrong)} of {len(expected)} differ",
            remedy,
        )


def _window_remedy(given: Any) -> str:
    """Return the likely remedy for an invalid window, such as flash-attn's pair (before, after) in tokens."""
    if given in (-1, (-1, -1), [-1, -1]):
        return "window=None for no window, which flash-attn writes as -1"
    if isinstance(given, (tuple, list)) and len(given) == 2 and all(map(_whole, given)):
        before, after = given
        if after == 0 or before == after:
            limit = "no window" if before < 0 else f"window={before + 1}"
            return f"flash-attn's window_size={(before, after)} is Mask(causal={after == 0}) with {limit}"
        return f"flash-attn's window_size={(before, after)} looks unequally far both ways, which a Mask cannot say"
    return "a row that sees only itself has window=1"


def _remedy(documents: tuple[int, ...], S: int) -> str:
    """Return the likely reason why documents do not add up to S tokens."""
    if look_like_cu_seqlens(documents, S):
        return "these look like cu_seqlens: Mask.of_cu_seqlens(cu_seqlens)"
    if sum(accumulate(documents)) == S:
        return "these look like lengths that were given as cu_seqlens: Mask(documents=tuple(lengths))"
    if sum(documents) > S:
        return "if a document was truncated, count only the tokens that are left of it"
    return (
        "pass padding at the end as a document of its own; "
        "if it follows every document, Mask.of_cu_seqlens(cu_seqlens, padded=cu_seqlens_padded)"
    )


def _whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
