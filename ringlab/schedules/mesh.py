"""Ranks in rows and columns: a row shares the heads of its tokens, a column is a ring of rows.

Ranks side by side make a row, as those of one node are numbered; rank r stands in row r // U at place r % U.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from ringlab.comm.protocol import Comm
from ringlab.comm.ring import Ring
from ringlab.comm.subgroup import SubGroup
from ringlab.layout import Layout, Run
from ringlab.schedules.call import Call


@dataclass(frozen=True)
class Stretch:
    """Some tokens of one rank: where they lie among its own, and where among those of its row."""

    own: slice
    row: slice


@dataclass(frozen=True)
class Rows:
    """The tokens of every row: `layout` deals them to the rows, `stretches[rank]` says where a rank's lie."""

    layout: Layout
    stretches: tuple[tuple[Stretch, ...], ...]


@dataclass(frozen=True)
class Mesh:
    """One rank's place: its row as a transport, and the call of attention in its column."""

    row: Comm
    first: int
    """The first rank of the row."""
    rows: Rows
    lengths: tuple[int, ...]
    """The tokens of each rank of the row."""
    column: Call

    @classmethod
    def of(cls, call: Call, ring: int, ulysses: int) -> Mesh:
        """Return the mesh of `ring` rows of `ulysses` ranks."""
        comm, layout = call.ring.comm, call.layout
        place = comm.rank % ulysses
        first = comm.rank - place
        rows = in_rows(layout, ulysses)
        column = SubGroup(comm, range(place, comm.world_size, ulysses))
        head = call.scores.first_head + place * call.heads[0] // ulysses
        return cls(
            SubGroup(comm, range(first, first + ulysses)),
            first,
            rows,
            layout.lengths[first : first + ulysses],
            replace(
                call,
                ring=Ring(column),
                layout=rows.layout,
                scores=replace(call.scores, first_head=head),
            ),
        )

    @property
    def tokens(self) -> int:
        """Return the tokens of this rank's row."""
        return sum(self.lengths)

    def stretches(self, member: int) -> tuple[Stretch, ...]:
        """Return where the tokens of a member of the row lie."""
        return self.rows.stretches[self.first + member]


@lru_cache(maxsize=64)
def in_rows(layout: Layout, ulysses: int) -> Rows:
    """Return how the tokens of each `ulysses` ranks side by side lie once they are together.

    One row holds the sequence in its global order. Among several, each keeps its ranks' runs, in the order of their
    positions, and neighbours that fit are one run, so that a zig-zag of ranks is a zig-zag of rows: tile plans of
    rows are as short as those of ranks.
    """
    ranks = layout.ranks
    if layout.P == ulysses:
        whole = Layout(layout.S, 1, layout.name, ((Run(0, 1, layout.S),) if layout.S else (),))
        return Rows(
            whole,
            tuple(
                tuple(Stretch(own, run.index) for own, run in zip(_laid(runs), runs, strict=True))
                for runs in ranks
            ),
        )
    dealt: list[tuple[Run, ...]] = []
    stretches: list[tuple[Stretch, ...]] = []
    for first in range(0, layout.P, ulysses):
        row = ranks[first : first + ulysses]
        pieces = [
            (run, member, own)
            for member, runs in enumerate(row)
            for own, run in zip(_laid(runs), runs, strict=True)
            if run.length
        ]
        pieces.sort(key=lambda piece: piece[0].start)
        placed = _laid(tuple(run for run, _, _ in pieces))
        by_member: list[list[Stretch]] = [[] for _ in row]
        for (_, member, own), where in zip(pieces, placed, strict=True):
            by_member[member].append(Stretch(own, where))
        stretches += map(tuple, by_member)
        dealt.append(_joined([run for run, _, _ in pieces]))
    return Rows(Layout(layout.S, len(dealt), layout.name, tuple(dealt)), tuple(stretches))


def _laid(runs: tuple[Run, ...]) -> list[slice]:
    """Where each run lies when they are laid end to end."""
    return [slice(*ends) for ends in pairwise(accumulate((run.length for run in runs), initial=0))]


def _joined(runs: list[Run]) -> tuple[Run, ...]:
    """Runs in order, those of which the next goes on where the last ends made one."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last and last.step == run.step and last.last + last.step == run.start:
            joined[-1] = Run(last.start, last.step, last.length + run.length)
        else:
            joined.append(run)
    return tuple(joined)
