"""Block tables: the numbers of the pages in which each sequence's tokens are. `PagedCache` has the tensors.

A page has the same number on all ranks, and each rank has a part of its tokens. All ranks make the same
changes in the same order, so their tables are equal without a message.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from numbers import Integral
from typing import Any

from ringlab.errors import CacheError, ShapeError


def token_counts(sequences: Sequence[Any], new: Any) -> list[int]:
    """Return `new`, the number of new tokens of each sequence, as a list; by default 1 for each sequence.

    Raises: ShapeError unless `new` has an integer ≥ 0 for each sequence.

    >>> token_counts([4, 7], None), token_counts([4, 7], (3, 0))
    ([1, 1], [3, 0])
    """
    counts = [1] * len(sequences) if new is None else list(new) if isinstance(new, Iterable) else None
    if counts is None or len(counts) != len(sequences) or not all(map(_is_count, counts)):
        raise ShapeError(f"new= a number of tokens ≥ 0 for each of {len(sequences)} sequences", repr(new))
    return [int(n) for n in counts]


def _is_count(n: Any) -> bool:
    return not isinstance(n, bool) and isinstance(n, Integral) and int(n) >= 0


class BlockTables:
    """The pages of several sequences. A shared page is copied before one of its sequences writes to it.

    pages: the number of pages. span: the number of tokens in a page, on all ranks together.

    >>> tables = BlockTables(pages=8, span=4)
    >>> first = tables.add()
    >>> tables.extend([first], [6])
    []
    >>> second = tables.fork(first)                  # shares both pages; the last one is half full
    >>> tables.extend([second], [1])                 # so it is copied, from page 1 to page 2
    [(1, 2)]
    >>> tables.pages[first], tables.pages[second], tables.free_pages
    ([0, 1], [0, 2], 5)
    """

    def __init__(self, pages: int, span: int) -> None:
        self.span = span
        self.lengths: dict[int, int] = {}
        """The number of tokens of each sequence."""
        self.pages: dict[int, list[int]] = {}
        """The pages of each sequence, in the order of its tokens."""
        self.references = [0] * pages
        """The number of sequences that use each page."""
        self._free = list(range(pages))
        self._named = 0

    @property
    def free_pages(self) -> int:
        """Return the number of pages that are unused."""
        return len(self._free)

    def add(self) -> int:
        """Return the number of a new sequence without tokens."""
        sequence = self._named
        self._named += 1
        self.lengths[sequence], self.pages[sequence] = 0, []
        return sequence

    def fork(self, sequence: int, length: int | None = None) -> int:
        """Return the number of a new sequence that shares the first `length` tokens of `sequence`, by default all.

        Raises: CacheError for an unknown sequence, or for more tokens than it has.
        """
        self.check([sequence])
        whole = self.lengths[sequence]
        length = whole if length is None else length
        if not 0 <= length <= whole:
            raise CacheError(f"a prefix of 0 to {whole} tokens of sequence {sequence}", f"{length} tokens")
        shared = self.pages[sequence][: self._pages_of(length)]
        new = self.add()
        self.lengths[new], self.pages[new] = length, list(shared)
        for page in shared:
            self.references[page] += 1
        return new

    def free(self, sequence: int) -> None:
        """Forget a sequence and free its unshared pages. Raises: CacheError if it is unknown."""
        self.check([sequence])
        for page in self.pages.pop(sequence):
            self._release(page)
        del self.lengths[sequence]

    def extend(self, sequences: Sequence[int], new: Sequence[int]) -> list[tuple[int, int]]:
        """Allocate pages for `new` tokens of each sequence; return the pages to copy first, as (from, to).

        Raises: CacheError for unknown or repeated sequences, or too few free pages; ShapeError if `new` is
        not one number for each sequence. After an error the tables are unchanged.
        """
        self.check_room(sequences, new)
        copies = []
        for sequence, tokens in zip(sequences, new, strict=True):
            if not tokens:
                continue
            pages = self.pages[sequence]
            if self._writes_to_shared(sequence):
                copy = self._take()
                copies.append((pages[-1], copy))
                self._release(pages[-1])
                pages[-1] = copy
            self.lengths[sequence] += tokens
            pages += [self._take() for _ in range(self._pages_of(self.lengths[sequence]) - len(pages))]
        return copies

    def check(self, sequences: Sequence[int]) -> None:
        """Check that all these sequences exist. Raises: CacheError if one is unknown or given twice."""
        known = isinstance(sequences, Collection) and all(
            isinstance(sequence, Hashable) and sequence in self.lengths for sequence in sequences
        )
        if not known or len(set(sequences)) < len(sequences):
            raise CacheError(
                f"sequences of this cache, {sorted(self.lengths)}, each at most once",
                repr(sequences),
                "add() and fork() return the numbers of sequences; free() forgets them",
            )

    def check_room(self, sequences: Sequence[int], new: Sequence[int]) -> None:
        """Check that there are pages for `new` tokens of each sequence. Raises: the errors of `extend`."""
        self.check(sequences)
        needed, writers = 0, Counter[int]()
        for sequence, tokens in zip(sequences, token_counts(sequences, new), strict=True):
            needed += self._pages_of(self.lengths[sequence] + tokens) - len(self.pages[sequence])
            if tokens and self._writes_to_shared(sequence):
                writers[self.pages[sequence][-1]] += 1
        # If several sequences share a page, the last of them to write may write into the page without a copy.
        needed += sum(min(count, self.references[page] - 1) for page, count in writers.items())
        if needed > self.free_pages:
            raise CacheError(
                f"{needed} free pages of {self.span} tokens",
                f"{self.free_pages} of {len(self.references)}",
                "free(sequence), or make the cache with more pages",
            )

    def _writes_to_shared(self, sequence: int) -> bool:
        """Return whether the sequence's next token goes to a page that another sequence shares."""
        partly = self.lengths[sequence] % self.span > 0
        return partly and self.references[self.pages[sequence][-1]] > 1

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.span)

    def _take(self) -> int:
        page = heapq.heappop(self._free)
        self.references[page] = 1
        return page

    def _release(self, page: int) -> None:
        self.references[page] -= 1
        if not self.references[page]:
            heapq.heappush(self._free, page)
