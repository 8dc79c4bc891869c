"""The mesh of ranks: the ranks of a row share the heads of its tokens, and a column is a ring.

Adjacent ranks, such as the ranks of one node, form a row. Rank r is member r % U of row r // U.
`MeshSchedule` makes a `Mesh` for each forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from ringlab.comm.protocol import Comm
from ringlab.comm.ring import Ring
from ringlab.comm.subgroup import SubGroup
from ringlab.layout import Layout, Run
from ringlab.schedules.call import AttentionCall


@dataclass(frozen=True)
class Span:
    """Adjacent tokens of one rank: their indices among the rank's tokens, and among the tokens of its row."""

    in_rank: slice
    in_row: slice


@dataclass(frozen=True)
class Rows:
    """The tokens of every row.

    `layout` distributes the tokens among the rows, and `spans[rank]` gives the places of a rank's tokens in
    its row.
    """

    layout: Layout
    spans: tuple[tuple[Span, ...], ...]


@dataclass(frozen=True)
class Mesh:
    """One rank's place in the mesh.

    row: the transport of its row. first: the first rank of the row. rows: the tokens of all rows. lengths:
    the number of tokens of each rank of the row. column: the call of attention within this rank's column.
    """

    row: Comm
    first: int
    rows: Rows
    lengths: tuple[int, ...]
    column: AttentionCall

    @classmethod
    def of(cls, call: AttentionCall, ring: int, ulysses: int) -> Mesh:
        """Return this rank's place in a mesh of `ring` rows with `ulysses` ranks each."""
        comm, layout = call.ring.comm, call.layout
        member = comm.rank % ulysses
        first = comm.rank - member
        rows = rows_of_ranks(layout, ulysses)
        column = SubGroup(comm, range(member, comm.world_size, ulysses))
        share = call.heads[0] // ulysses
        mine = slice(member * share, (member + 1) * share)
        return cls(
            SubGroup(comm, range(first, first + ulysses)),
            first,
            rows,
            layout.lengths[first : first + ulysses],
            replace(
                call,
                ring=Ring(column),
                layout=rows.layout,
                rules=replace(call.rules, first_head=call.rules.first_head + mine.start),
                sinks=None if call.sinks is None else call.sinks[mine],
            ),
        )

    @property
    def tokens(self) -> int:
        """Return the number of tokens of this rank's row."""
        return sum(self.lengths)

    def spans(self, member: int) -> tuple[Span, ...]:
        """Return the places of the tokens of one member of the row."""
        return self.rows.spans[self.first + member]


@lru_cache(maxsize=64)
def rows_of_ranks(layout: Layout, ulysses: int) -> Rows:
    """Return the order of the tokens in each row of `ulysses` adjacent ranks.

    A single row has the sequence in its global order. If there are several rows, each row keeps its ranks'
    runs, ordered by position, and merges runs that continue each other. A zig-zag of ranks thus becomes a
    zig-zag of rows, and tile plans of rows are as short as those of ranks.
    """
    ranks = layout.ranks
    if layout.P == ulysses:
        whole = Layout(layout.S, 1, layout.name, ((Run(0, 1, layout.S),) if layout.S else (),))
        return Rows(
            whole,
            tuple(
                tuple(Span(own, run.index) for own, run in zip(_end_to_end(runs), runs, strict=True))
                for runs in ranks
            ),
        )
    dealt: list[tuple[Run, ...]] = []
    spans: list[tuple[Span, ...]] = []
    for first in range(0, layout.P, ulysses):
        row = ranks[first : first + ulysses]
        pieces = [
            (run, member, own)
            for member, runs in enumerate(row)
            for own, run in zip(_end_to_end(runs), runs, strict=True)
            if run.length
        ]
        pieces.sort(key=lambda piece: piece[0].start)
        places = _end_to_end(tuple(run for run, _, _ in pieces))
        by_member: list[list[Span]] = [[] for _ in row]
        for (_, member, own), place in zip(pieces, places, strict=True):
            by_member[member].append(Span(own, place))
        spans += map(tuple, by_member)
        dealt.append(_joined([run for run, _, _ in pieces]))
    return Rows(Layout(layout.S, len(dealt), layout.name, tuple(dealt)), tuple(spans))


def _end_to_end(runs: tuple[Run, ...]) -> list[slice]:
    """Return the indices of each run if the runs are laid end to end."""
    return [slice(*ends) for ends in pairwise(accumulate((run.length for run in runs), initial=0))]


def _joined(runs: list[Run]) -> tuple[Run, ...]:
    """Return the runs after merging each run that continues the previous one."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last and last.step == run.step and last.last + last.step == run.start:
            joined[-1] = Run(last.start, last.step, last.length + run.length)
        else:
            joined.append(run)
    return tuple(joined)
