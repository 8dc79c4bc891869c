"""Lives of a cache's pages: sequences share pages, copy those that they write to, end, and leave their pages to others.

A life is a list of events, of which some are calls of the decode. The caller keeps the tables, as servers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from ringlab.conformance.run.troubles import WrongResult

SEQUENCES, CALLS = 5, 5
"""The number of sequences of every life, and the most calls in which one of them grows."""
A, B, C, D, E = range(SEQUENCES)


class Begin(NamedTuple):
    """A sequence gets pages for its first `length` tokens, which the caller writes."""

    sequence: int
    length: int


class Fork(NamedTuple):
    """A sequence begins with the pages of the first `length` tokens of another one."""

    sequence: int
    of: int
    length: int


class End(NamedTuple):
    """A sequence ends. Its pages are free, except for those that others share."""

    sequence: int


class Move(NamedTuple):
    """A sequence is moved to other pages, as when it is preempted and comes back."""

    sequence: int


class Call(NamedTuple):
    """The decode is called for these sequences, each of which grows by the call's new tokens."""

    batch: tuple[int, ...]


Event: TypeAlias = Begin | Fork | End | Move | Call


def _forked(common: int, new: int) -> list[Event]:
    """Return a life in which three sequences share a prefix and grow, first alone, then together.

    Then forks of forks grow in one batch, also beside a shorter sequence.
    """
    return [
        Begin(A, common), Fork(B, A, common), Fork(C, A, common),
        Call((A,)), Call((B,)), Call((C,)), Call((C, A, B)),
        Fork(D, B, common + 2 * new), Call((D,)), Call((B,)), Call((D, B, A)),
        Fork(E, D, common + 4 * new), Call((E, D, B)),
    ]  # fmt: skip


def _reused(common: int, new: int) -> list[Event]:
    """Return a life in which sequences get the pages of others that ended.

    One of them does so while a fork of the ended sequence grows, and another one gets them for its first
    token.
    """
    return [
        Begin(A, common), Begin(B, common), Call((A, B)),
        Fork(C, A, common), End(A), Begin(D, common), Call((C, D)),
        End(B), Begin(E, 0), Call((E,)), Move(C), Call((D, C)), Call((E,)),
    ]  # fmt: skip


def _forked_equally(common: int, new: int) -> list[Event]:
    """Return the events of `_forked` with the shorter sequence in a call of its own."""
    events = _forked(common, new)
    at = events.index(Call((D, B, A)))
    return [*events[:at], Call((D, B)), Call((A,)), *events[at + 1 :]]


LIVES: dict[str, Callable[[int, int], list[Event]]] = {
    "forked": _forked,
    "forked equally": _forked_equally,
    "reused": _reused,
}
"""All lives by name, as functions of the number of common tokens and the number of new tokens in each call."""
EQUAL = {"forked": "forked equally"}
"""For a life with sequences of different lengths in one call, the life without such calls that can replace
it."""
BY_CALLER, LISTED, COUNTED = "", "listed", "counted"
"""The ways to copy a shared page before it is written to. The caller copies it, or the decode does. The decode
gets a list of pages to copy; or it gets the number of sequences that have each page, and a list of free
pages."""


class Row(NamedTuple):
    """A sequence in one call of a life, and its length after the call."""

    call: int
    sequence: int
    end: int


def called_rows(life: str, common: int, new: int) -> Iterator[Row]:
    """Yield the sequences of all calls, call by call."""
    length, calls = dict[int, int](), 0
    for event in LIVES[life](common, new):
        if isinstance(event, Begin | Fork):
            length[event.sequence] = event.length
        elif isinstance(event, Call):
            calls += 1
            for sequence in event.batch:
                length[sequence] += new
                yield Row(calls, sequence, length[sequence])


def with_common_tokens(
    life: str, common: int, new: int, x: Shaped[Tensor, "B H S D"]
) -> Shaped[Tensor, "B H S D"]:
    """Return a copy of keys or values of all sequences, in which a fork has the first tokens of its parent."""
    x = x.clone()
    for event in LIVES[life](common, new):
        if isinstance(event, Fork):
            x[event.sequence, :, : event.length] = x[event.of, :, : event.length]
    return x


@dataclass(frozen=True)
class Growth:
    """The arguments of a call besides queries: rows of the table, which end in unused entries, and pages to copy first.

    lengths: the length of each sequence with its new tokens. copies: pairs of a page and its copy. counts: the number of
    sequences that have each page. free: pages that belong to no sequence.
    """

    lengths: list[int]
    table: Int[Tensor, "B pages"]
    copies: Int[Tensor, "n 2"]
    counts: Int[Tensor, " pages"]
    free: Int[Tensor, " n"]


class Pages:
    """One rank's pages, and the tables of all sequences on it.

    tokens: the tokens of this rank, in the order of the slots. whole: k and v of all sequences, (B, K, S, D). page: the slots
    in a page. pools: k and v as the decode sees them. kept: k and v as they must be after a call.
    """

    def __init__(
        self,
        tokens: Int[np.ndarray, " L"],
        whole: Sequence[Tensor],
        page: int,
        value: float,
        seed: Sequence[int],
    ) -> None:
        self.tokens, self.page = tokens, page
        self.whole = [x[:, :, torch.from_numpy(tokens)] for x in whole]
        self.draw = np.random.default_rng(seed)
        number = SEQUENCES * -(-max(1, len(tokens)) // page) + 1
        self.free: list[int] = self.draw.permutation(number).tolist()
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.calls = 0
        self.pools = [x.new_full((number, x.shape[1], page, x.shape[3]), value) for x in self.whole]
        self.kept = [x.clone() for x in self.pools]

    def used(self, length: int) -> int:
        """Return the number of slots that a sequence of this length uses."""
        return int((self.tokens < length).sum())

    def happen(self, event: Begin | Fork | End | Move) -> None:
        """Change the tables, and write what the caller has to write."""
        if isinstance(event, Begin):
            self.tables[event.sequence], self.lengths[event.sequence] = [], 0
            self._grow(event.sequence, event.length)
            self.write([*self.pools, *self.kept], event.sequence, event.length)
        elif isinstance(event, Fork):
            shared = -(-self.used(event.length) // self.page)
            self.tables[event.sequence] = self.tables[event.of][:shared]
            self.lengths[event.sequence] = event.length
        elif isinstance(event, End):
            self._release(self.tables.pop(event.sequence))
            del self.lengths[event.sequence]
        else:
            old = self.tables[event.sequence]
            self.tables[event.sequence] = [self.free.pop() for _ in old]
            self._copy([*self.pools, *self.kept], old, self.tables[event.sequence])
            self._release(old)

    def grow(self, batch: Sequence[int], new: int, copied: str) -> Growth:
        """Give the sequences pages for their new tokens, and copy shared pages to which they will write.

        copied: who copies them; with "counted", the shared page stays in the table.
        """
        copies: list[tuple[int, int]] = []
        for sequence in batch:
            copies += self._grow(sequence, self.lengths[sequence] + new, copied != COUNTED)
        for source, copy in copies:
            self._copy([*self.kept, *(self.pools if copied == BY_CALLER else ())], [source], [copy])
        longest = max((self.tables[sequence] for sequence in batch), key=len)
        # Servers do not clear the entries behind a sequence's end, so they may name pages of any sequence. In every second
        # call, a shorter row goes on with the entries of the longest one, as if it were a copy that was cut back.
        table = self.draw.integers(len(self.kept[0]), size=(len(batch), 1 + len(longest)))
        self.calls += 1
        for row, sequence in zip(table, batch, strict=True):
            row[: len(longest)] = longest if self.calls % 2 else row[: len(longest)]
            row[: len(self.tables[sequence])] = self.tables[sequence]
        return Growth(
            [self.lengths[sequence] for sequence in batch],
            torch.from_numpy(table).int(),
            torch.tensor(copies if copied == LISTED else [], dtype=torch.int64).reshape(-1, 2),
            torch.tensor([self._count(page) for page in range(len(self.kept[0]))], dtype=torch.int32),
            torch.tensor(self.free[::-1], dtype=torch.int32),
        )

    def write(self, pools: Sequence[Shaped[Tensor, "pages K page D"]], sequence: int, new: int) -> None:
        """Write the last `new` tokens of a sequence into these pools."""
        end = self.lengths[sequence]
        slots = torch.arange(self.used(end - new), self.used(end))
        if len(slots):
            pages = torch.tensor(self.tables[sequence])[slots // self.page]
            for pool, x in zip(pools, [*self.whole, *self.whole], strict=False):
                pool[pages, :, slots % self.page] = x[sequence][:, slots].transpose(0, 1)

    def take_table(self, batch: Sequence[int], table: Int[Tensor, "B pages"]) -> None:
        """Take the rows of a table that the decode has changed, and count free pages again.

        Raises: WrongResult for a page that does not exist.
        """
        for sequence, row in zip(batch, table.tolist(), strict=True):
            if not all(0 <= page < len(self.kept[0]) for page in row):
                raise WrongResult(
                    f"after a call the table names pages {row}, but the cache has only {len(self.kept[0])} pages"
                )
            self.tables[sequence] = row[: len(self.tables[sequence])]
        self.free = [page for page in range(len(self.kept[0])) if not self._count(page)]

    def wrong(self) -> list[str]:
        """Return "k" and "v" if the slots of a sequence do not hold its tokens, whatever its pages are."""
        found = []
        for name, pool, x in zip("kv", self.pools, self.whole, strict=True):
            for sequence, table in self.tables.items():
                slots = torch.arange(self.used(self.lengths[sequence]))
                pages = torch.tensor(table, dtype=torch.int64)[slots // self.page]
                held = pool[pages, :, slots % self.page].transpose(0, 1)
                found += [] if torch.equal(held, x[sequence][:, slots]) else [name]
        return [*dict.fromkeys(found)]

    def _grow(self, sequence: int, length: int, copied: bool = True) -> list[tuple[int, int]]:
        """Give a sequence pages for `length` tokens; return the shared page to which it writes, and its copy, if any."""
        begin, end = self.used(self.lengths[sequence]), self.used(length)
        table, copies = self.tables[sequence], list[tuple[int, int]]()
        written = begin // self.page
        if copied and end > begin and begin % self.page and self._count(table[written]) > 1:
            copies = [(table[written], self.free.pop())]
            table[written] = copies[0][1]
        while len(table) * self.page < end:
            table.append(self.free.pop())
        self.lengths[sequence] = length
        return copies

    def _count(self, page: int) -> int:
        return sum(page in table for table in self.tables.values())

    def _release(self, pages: Sequence[int]) -> None:
        """Free those of these pages that no table has; they are used next, in random order."""
        left = [page for page in pages if not self._count(page)]
        self.free += self.draw.permutation(np.array(left, dtype=np.int64)).tolist()

    def _copy(self, pools: Sequence[Tensor], sources: Sequence[int], copies: Sequence[int]) -> None:
        for pool in pools:
            pool[copies] = pool[sources]
