"""What wrong rings would answer: the forward ring in float64 with one thing changed, on the shards of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ringlab import oracle
from ringlab.conformance.runs import Ran, Run, expected
from ringlab_course.checking.backward import Problem
from ringlab_course.checking.diagnosis import Answered
from ringlab_course.checking.numbers import State, attend, merged
from ringlab_course.exercises.e18_capstone.suite import BACKWARD, given, inputs, positions_of

See = Callable[["Held", int, int], np.ndarray]


@dataclass(frozen=True)
class Held:
    """The shards of a run, with the positions of their tokens."""

    run: Run

    @cached_property
    def positions(self) -> list[np.ndarray]:
        """The global positions of each rank's tokens."""
        return [own.numpy() for own in positions_of(self.run)]

    @cached_property
    def shards(self) -> list[tuple[np.ndarray, ...]]:
        """(q, k, v) of each rank, in float64."""
        whole = [oracle.float64(x) for x in inputs(self.run)[:3]]
        return [tuple(x[:, :, own] for x in whole) for own in self.positions]

    def shape(self, rank: int, owner: int) -> tuple[int, int]:
        """Return how many queries of `rank` meet how many keys of `owner`."""
        return len(self.positions[rank]), len(self.positions[owner])

    def visible(self, rank: int, owner: int) -> np.ndarray:
        """Return what the rank's queries may see of the owner's keys."""
        if not self.run.causal:
            return np.ones(self.shape(rank, owner), dtype=bool)
        return self.positions[rank][:, None] >= self.positions[owner][None, :]


def right(held: Held, rank: int, owner: int) -> np.ndarray:
    """Return the mask as it should be."""
    return held.visible(rank, owner)


def under_mask(see: See) -> See:
    """Return `see` where there is a mask; without one all is seen."""
    return lambda held, rank, owner: (see if held.run.causal else right)(held, rank, owner)


def fold(parts: Iterable[State], join: Callable[[State, State], State], empty: State) -> State:
    """Return all partials joined, beginning with none."""
    total = empty
    for number, part in enumerate(parts):
        total = part if number == 0 else join(total, part)
    return total


def ring(
    see: See = right,
    here: Callable[[int, int, int], int] = lambda rank, owner, P: owner,
    steps: Callable[[int], range] = range,
    join: Callable[[State, State], State] = merged,
    scale: float | None = None,
    heads: Callable[[np.ndarray, int], np.ndarray] = lambda x, group: np.repeat(x, group, axis=1),
) -> Callable[..., State]:
    """Return an imitation: (rank, held) → (out, lse).

    see: the mask that is used for the block of `owner`. here: whose K/V really lie there. steps: the steps
    whose block is used. heads: K/V heads spread over the query heads.
    """

    def imitate(rank: int, held: Held) -> State:
        P, q = held.run.P, held.shards[rank][0]
        group = held.run.H // held.run.K
        parts = []
        for step in steps(P):
            owner = (rank - step) % P
            there = here(rank, owner, P)
            if len(held.positions[there]) != len(held.positions[owner]):
                raise ValueError("blocks of other lengths, and this mistake breaks off")
            k, v = (heads(x, group) for x in held.shards[there][1:])
            parts.append(attend(q, k, v, see(held, rank, owner), scale))
        return fold(parts, join, (np.zeros(q.shape), np.full(q.shape[:-1], -np.inf)))

    return imitate


def problem(run: Run) -> Problem:
    """Return the run as exercise 09 has it, for its imitations of wrong backward rings."""
    q, k, v, dout = inputs(run)
    owned = positions_of(run)
    cut = [[x.index_select(2, own) for own in owned] for x in (dout, q, k, v, *given(run))]
    return Problem(*cut, owned, str(run))


def answered(ran: Ran, names: tuple[str, ...]) -> list[Answered]:
    """Return what every rank answered in a run beside what it should have, as mistakes are compared with it."""
    run = ran.run
    true, bounds = expected(run.plain)
    inputs_of = problem(run) if names == BACKWARD else Held(run)
    found = []
    for rank, own in enumerate(positions_of(run)):
        index: np.ndarray = own.numpy()
        truth = tuple(getattr(true, name)[:, :, index] for name in names)
        got = tuple(ran.arrays[name][:, :, index] for name in names)
        bound = max(
            bounds[name] * _scale(getattr(true, name)) / _scale(part)
            for name, part in zip(names, truth, strict=True)
        )
        found.append(Answered(got, truth, bound, (rank, inputs_of), names, f"{run}: rank {rank}"))
    return found


def _scale(part: np.ndarray) -> float:
    return float(np.abs(part[np.isfinite(part)]).max(initial=0.0)) or 1.0
