"""Dynamic context parallelism: long sequences of a batch get more ranks, so that all ranks finish together.

    static    one degree for all sequences, which the longest one needs; short ones mostly wait for hops
    dynamic   a degree for each sequence: the smallest at which it fits and delays no other rank

Source: Megatron-LM's hybrid context parallelism, and arXiv 2412.01523 (FlexSP).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int64

from ringlab.cost.sequence_time import SequenceCosts, shares
from ringlab.errors import LayoutError
from ringlab.packing.assignment import Assignment, Placement

TARGETS = 16
"""The number of target times for a sequence that `Problem.degrees_by_target` tries."""


def assign(
    lengths: Sequence[int],
    P: int,
    capacity: int,
    costs: SequenceCosts,
    degrees: Sequence[int] | None = None,
) -> Assignment:
    """Return a fast assignment of sequences to groups among P ranks and to micro-batches.

    It is never slower than `static`, but not always the fastest; `least_seconds` is a lower bound for all
    assignments.
    lengths: in tokens. capacity: the largest number of tokens of a rank in a micro-batch. degrees: the sizes
    that groups may have, ascending. Each must divide the next one, and the last must divide P. By default
    they are 1 and the products of P's prime factors, such as 1, 2, 4, 8.
    Raises: LayoutError for a sequence that does not fit on all ranks together, for degrees that do not
    divide each other, or for sizes below 1.

    >>> from ringlab.cost.hardware import Link
    >>> from ringlab.cost.sequence_time import Pass
    >>> costs = SequenceCosts(1e-6, (Pass(pair_s=1e-9, hop_bytes=4096),), between=Link("slow", 1e9, 1e-3, "made up"))
    >>> assign([8000, 900, 700, 1100, 400], P=4, capacity=4096, costs=costs).owners(0)
    (((0, 4000),), ((0, 4000),), ((3, 550), (1, 450), (2, 350), (4, 200)), ((3, 550), (1, 450), (2, 350), (4, 200)))
    """
    problem = Problem.of(lengths, P, capacity, costs, degrees)
    found = [problem.place(np.full(len(problem.lengths), degree)) for degree in problem.degrees_of_all()]
    found += [
        problem.place(degrees_of_each, micro_batches)
        for degrees_of_each in problem.degrees_by_target()
        for micro_batches in range(problem.fewest_batches, problem.fewest_batches + 2)
    ]
    return min(found, key=lambda assignment: assignment.seconds(costs))


def static(
    lengths: Sequence[int],
    P: int,
    capacity: int,
    costs: SequenceCosts,
    degrees: Sequence[int] | None = None,
) -> Assignment:
    """Return the fastest assignment in which all sequences have the same degree. Raises: as `assign`.

    >>> from ringlab.cost.sequence_time import Pass
    >>> costs = SequenceCosts(token_s=1e-6, passes=(Pass(pair_s=1e-9),))
    >>> static([8000, 900, 700], P=4, capacity=4096, costs=costs).owners(0)[0]
    ((0, 2000), (1, 222), (2, 172))
    """
    problem = Problem.of(lengths, P, capacity, costs, degrees)
    found = [problem.place(np.full(len(problem.lengths), degree)) for degree in problem.degrees_of_all()]
    return min(found, key=lambda assignment: assignment.seconds(costs))


def least_seconds(
    lengths: Sequence[int],
    P: int,
    capacity: int,
    costs: SequenceCosts,
    degrees: Sequence[int] | None = None,
) -> float:
    """Return a lower bound, in seconds, for the time of every assignment.

    It is the larger of two times: that of all work if it were spread evenly over P ranks, and that of the
    slowest sequence.

    Raises: as `assign`.

    >>> from ringlab.cost.sequence_time import Pass
    >>> costs = SequenceCosts(token_s=1e-6, passes=())
    >>> least_seconds([8000, 2000], P=4, capacity=4096, costs=costs)
    0.0025
    """
    return Problem.of(lengths, P, capacity, costs, degrees).least_seconds


def nested_degrees(P: int) -> tuple[int, ...]:
    """Return sizes of groups that nest in P ranks: 1 and the products of P's prime factors, smallest first.

    >>> nested_degrees(8), nested_degrees(12)
    ((1, 2, 4, 8), (1, 2, 4, 12))
    """
    degrees, left = [1], P
    while left > 1:
        prime = next(p for p in range(2, left + 1) if left % p == 0)
        degrees.append(degrees[-1] * prime)
        left //= prime
    return tuple(degrees)


@dataclass(frozen=True)
class Problem:
    """Sequences to be placed.

    seconds, tokens: for each degree and sequence, the seconds of the slowest rank and the tokens of the
    fullest rank. The seconds are infinite where the sequence does not fit.
    """

    lengths: tuple[int, ...]
    P: int
    capacity: int
    degrees: tuple[int, ...]
    seconds: dict[int, np.ndarray] = field(compare=False)
    tokens: dict[int, np.ndarray] = field(compare=False)

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        P: int,
        capacity: int,
        costs: SequenceCosts,
        degrees: Sequence[int] | None,
    ) -> Problem:
        """Return the problem. Raises: LayoutError as `assign`."""
        if P < 1 or capacity < 1:
            raise LayoutError("P >= 1 ranks of a capacity >= 1 token", f"P={P} and capacity={capacity}")
        lengths = tuple(map(int, lengths))
        chosen = nested_degrees(P) if degrees is None else tuple(degrees)
        if not chosen or chosen[0] < 1 or any(b % a for a, b in zip(chosen, (*chosen[1:], P), strict=True)):
            raise LayoutError(f"degrees of which each divides the next, and the last P={P}", f"{chosen}")
        tokens = {d: np.array([shares(n, d).max() for n in lengths], np.int64) for d in chosen}
        seconds = {d: np.array([costs.rank_s(n, d) for n in lengths]) for d in chosen}
        for degree in chosen:
            seconds[degree][tokens[degree] > capacity] = np.inf
        longest = int(np.argmax(lengths)) if lengths else 0
        if lengths and not np.isfinite(seconds[chosen[-1]]).all():
            raise LayoutError(
                f"sequences that fit on {chosen[-1]} ranks of {capacity} tokens each",
                f"{lengths[longest]} tokens in sequence {longest}",
                f"a capacity of {shares(lengths[longest], chosen[-1]).max()} tokens, or more ranks",
            )
        return cls(lengths, P, capacity, chosen, seconds, tokens)

    @property
    def least_seconds(self) -> float:
        """Return the larger of two times: all work spread evenly over P ranks, and the slowest sequence."""
        if not self.lengths:
            return 0.0
        work = np.min([degree * self.seconds[degree] for degree in self.degrees], axis=0)
        alone = np.min([self.seconds[degree] for degree in self.degrees], axis=0)
        return max(float(work.sum()) / self.P, float(alone.max()))

    @property
    def fewest_batches(self) -> int:
        """Return the smallest number of micro-batches into which the tokens can fit."""
        return max(1, -(-sum(self.lengths) // (self.P * self.capacity)))

    def degrees_of_all(self) -> list[int]:
        """Return the degrees at which every sequence fits."""
        return [degree for degree in self.degrees if np.isfinite(self.seconds[degree]).all()]

    def degrees_by_target(self) -> list[np.ndarray]:
        """Return several arrays with a degree for each sequence, each of them made for a target time.

        The degree of a sequence is the smallest at which it takes no longer than the target.
        """
        if not self.lengths:
            return []
        seconds = np.stack([self.seconds[degree] for degree in self.degrees])
        fastest, slowest = seconds.min(axis=0), float(seconds[np.isfinite(seconds)].max())
        found: dict[bytes, np.ndarray] = {}
        for target in np.geomspace(max(self.least_seconds / 4, 1e-30), max(slowest, 1e-30), TARGETS):
            chosen = np.full(len(self.lengths), self.degrees[-1])
            for degree in reversed(self.degrees):  # if no degree reaches the target, take the fastest one
                chosen[self.seconds[degree] <= np.maximum(fastest, target)] = degree
            found[chosen.tobytes()] = chosen
        return list(found.values())

    def place(self, degrees: Int64[np.ndarray, " sequences"], micro_batches: int = 1) -> Assignment:
        """Return a placement of the sequences with these degrees.

        Sequences with the largest groups are placed first. If two groups are equally large, the slower sequence
        is first. Each is placed where the time of the step grows least. If no micro-batch has room, another one
        is opened.
        """
        busy = np.zeros((micro_batches, self.P))
        held = np.zeros((micro_batches, self.P), np.int64)
        placed: list[list[Placement]] = [[] for _ in range(micro_batches)]
        times = np.array([self.seconds[degree][i] for i, degree in enumerate(degrees.tolist())])
        for i in np.lexsort((-times, -degrees)).tolist():
            degree, time, tokens = int(degrees[i]), times[i], int(self.tokens[int(degrees[i])][i])
            if (_by_group(held, degree) + tokens > self.capacity).all():
                busy = np.vstack([busy, np.zeros(self.P)])
                held = np.vstack([held, np.zeros(self.P, np.int64)])
                placed.append([])
            after = _by_group(busy, degree) + time
            grows = np.maximum(after - busy.max(1, keepdims=True), 0.0)
            grows[_by_group(held, degree) + tokens > self.capacity] = np.inf
            batch, group = np.unravel_index(np.lexsort((after.ravel(), grows.ravel()))[0], grows.shape)
            ranks = slice(group * degree, (group + 1) * degree)
            busy[batch, ranks] += time
            held[batch, ranks] += tokens
            placed[batch].append(Placement(i, self.lengths[i], int(group) * degree, degree))
        return Assignment(
            self.lengths, self.P, self.capacity, tuple(tuple(batch) for batch in placed if batch)
        )


def _by_group(of_ranks: np.ndarray, degree: int) -> np.ndarray:
    """Return the largest value among the ranks of each group, as an array (micro-batches, groups)."""
    largest: np.ndarray = of_ranks.reshape(len(of_ranks), -1, degree).max(axis=2)
    return largest
