"""`Assignment`: which ranks hold which sequence of a batch in which micro-batch, with layouts and packings.

A short sequence is on one rank, and a long one is on a group of many ranks. Two groups of a micro-batch are
disjoint, or one is inside the other. Every rank computes its sequences in the same order, from the largest
group to the smallest. Ranks therefore never wait for each other in a circle, and the ranks of a group have
done equal work when they start a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from jaxtyping import Float64, Int64

from ringlab.cost.sequence_time import SequenceCosts, shares
from ringlab.errors import LayoutError
from ringlab.layout import Layout, Run, zigzag
from ringlab.packing.packing import Packing


@dataclass(frozen=True)
class Placement:
    """The place of a sequence: number `sequence`, with `length` tokens, on `degree` ranks from `first` on.

    >>> Placement(sequence=5, length=900, first=2, degree=2).ranks
    range(2, 4)
    """

    sequence: int
    length: int
    first: int
    degree: int

    @property
    def ranks(self) -> range:
        """Return the ranks of the sequence's group."""
        return range(self.first, self.first + self.degree)

    @property
    def layout(self) -> Layout:
        """Return the layout of the sequence on the ranks of the group."""
        return zigzag(self.length, self.degree)


@dataclass(frozen=True)
class Assignment:
    """The sequences of a batch, placed on P ranks in micro-batches of at most `capacity` tokens per rank.

    Raises: LayoutError unless each sequence is placed exactly once, two groups are always nested or disjoint,
    groups are in order from large to small, and no rank has more than `capacity` tokens in a micro-batch.

    >>> both = (Placement(1, 6, 0, 2), Placement(0, 2, 0, 1), Placement(2, 1, 1, 1))
    >>> assignment = Assignment((2, 6, 1), P=2, capacity=8, micro_batches=(both,))
    >>> assignment.tokens(0), assignment.layout(0).positions(0)
    (array([4, 5]), array([0, 1, 6, 7]))
    """

    lengths: tuple[int, ...]
    P: int
    capacity: int
    micro_batches: tuple[tuple[Placement, ...], ...]

    def __post_init__(self) -> None:
        placed = sorted((each.sequence, each.length) for batch in self.micro_batches for each in batch)
        if placed != list(enumerate(self.lengths)):
            raise LayoutError(f"each of {len(self.lengths)} whole sequences exactly once", f"{placed[:12]}")
        for number, batch in enumerate(self.micro_batches):
            _check_groups(batch, self.P)
            tokens = self.tokens(number)
            if len(tokens) and tokens.max() > self.capacity:
                raise LayoutError(
                    f"at most {self.capacity} tokens on a rank in a micro-batch",
                    f"{tokens.max()} on rank {tokens.argmax()} in micro-batch {number}",
                )

    def tokens(self, micro_batch: int) -> Int64[np.ndarray, " P"]:
        """Return the tokens of each rank in a micro-batch."""
        total = np.zeros(self.P, np.int64)
        for each in self.micro_batches[micro_batch]:
            total[each.first : each.first + each.degree] += shares(each.length, each.degree)
        return total

    def sequences(self, micro_batch: int) -> tuple[int, ...]:
        """Return the numbers of a micro-batch's sequences, in the order in which they are packed."""
        return tuple(each.sequence for each in self.micro_batches[micro_batch])

    def packing(self, micro_batch: int) -> Packing:
        """Return the packing of a micro-batch's sequences, in the order of `sequences`."""
        return Packing.of_lengths([each.length for each in self.micro_batches[micro_batch]])

    def layout(self, micro_batch: int) -> Layout:
        """Return the layout of a micro-batch's packed sequences. Ranks own shares of their groups' tokens.

        The layout can be used like any other. `ring_attention` over all ranks is also correct with it, but
        sends all blocks around all ranks.
        """
        return self._layouts[micro_batch]

    @cached_property
    def _layouts(self) -> tuple[Layout, ...]:
        return tuple(_layout(batch, self.P) for batch in self.micro_batches)

    def seconds_by_rank(self, costs: SequenceCosts) -> Float64[np.ndarray, "batches P"]:
        """Return the seconds that each rank is busy in each micro-batch."""
        busy = np.zeros((len(self.micro_batches), self.P))
        for number, batch in enumerate(self.micro_batches):
            for each in batch:
                busy[number, each.first : each.first + each.degree] += costs.rank_s(each.length, each.degree)
        return busy

    def seconds(self, costs: SequenceCosts) -> float:
        """Return the seconds of a step: the sum of the times of each micro-batch's slowest rank.

        All ranks wait for each other between micro-batches, as they do if weights are gathered layer by
        layer.
        """
        return float(self.seconds_by_rank(costs).max(axis=1, initial=0.0).sum())

    def owners(self, micro_batch: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return each rank's shares in local order, each as (sequence, tokens), for pictures.

        >>> long_and_short = (Placement(0, 6, 0, 2), Placement(1, 2, 1, 1))
        >>> Assignment((6, 2), 2, 8, (long_and_short,)).owners(0)
        (((0, 2),), ((0, 4), (1, 2)))
        """
        owned: list[list[tuple[int, int]]] = [[] for _ in range(self.P)]
        for each in self.micro_batches[micro_batch]:
            for rank, tokens in zip(each.ranks, shares(each.length, each.degree).tolist(), strict=True):
                owned[rank] += [(each.sequence, tokens)] if tokens else []
        return tuple(map(tuple, owned))


def _layout(batch: tuple[Placement, ...], P: int) -> Layout:
    owned: list[list[Run]] = [[] for _ in range(P)]
    starts = accumulate((each.length for each in batch), initial=0)
    for each, start in zip(batch, starts, strict=False):
        for rank, runs in zip(each.ranks, each.layout.ranks, strict=True):
            owned[rank] += [Run(start + run.start, run.step, run.length) for run in runs]
    return Layout(sum(each.length for each in batch), P, "dynamic", tuple(map(tuple, owned)))


def _check_groups(batch: tuple[Placement, ...], P: int) -> None:
    """Raise LayoutError for groups that are not among P ranks, that cross, or that are not ordered by size."""
    for each in batch:
        if each.degree < 1 or each.first < 0 or each.first + each.degree > P:
            raise LayoutError(f"one of the ranks 0 to {P - 1}", repr(each))
    if any(later.degree > earlier.degree for earlier, later in pairwise(batch)):
        raise LayoutError(
            "sequences in order, from the largest group to the smallest",
            f"degrees {[each.degree for each in batch]}",
        )
    groups = {(each.first, each.first + each.degree) for each in batch}
    for start, stop in groups:
        crossing = next(((a, b) for a, b in groups if start < a < stop < b), None)
        if crossing:
            raise LayoutError(
                "groups of ranks that are disjoint, or one inside the other",
                f"ranks {start} to {stop - 1} and {crossing[0]} to {crossing[1] - 1}",
            )
