"""Groups of ranks with the same program: the simulator runs one rank and repeats its operations for others.

The tiles differ from rank to rank, so the computing times are not repeated: each rank has those of its own
tiles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import TypeAlias

import numpy as np
from jaxtyping import Float, Int, Int64, Shaped
from torch import Tensor

from ringlab.comm.clocked.cluster import ClockedCluster
from ringlab.comm.clocked.lockstep import Seconds as SecondsOfAll
from ringlab.comm.clocked.recording import Recording
from ringlab.comm.ring import Ring
from ringlab.cost.shape_block import Prices
from ringlab.layout import LAYOUTS, Layout
from ringlab.mask import Mask
from ringlab.plan import plan

Steps: TypeAlias = Int64[np.ndarray, " attentions"]
ROTATING = ("ring", "allgather")
"""Schedules in which every rank, at step s, computes with the block of the rank s places behind it."""
FEWEST_EQUAL = 8
"""The fewest ranks equal to others that make it worthwhile to compare ranks."""
FEWEST_IN_LOCKSTEP = 256
"""The fewest ranks of a simulation that keeps only some ranks' operations. All operations of fewer ranks fit
into memory."""
_ATTEND = re.compile(r"attend (backward )?(\d+)")
"""The labels of computations that take time."""


def run(program: Callable[[Ring], None], models: Sequence[int], seconds: Seconds) -> Recording:
    """Return the recording of all ranks.

    If enough ranks are equal, only the `models` run, and the other ranks repeat their operations.
    """
    cluster = ClockedCluster(len(models))
    if len(set(models)) > len(models) - FEWEST_EQUAL:
        return cluster.run(program)
    return cluster.run_alike(program, models, seconds)


def go_together(layout: Layout, schedule: str, mask: Mask, backward: bool) -> bool:
    """Return whether rank 0 can represent all ranks, step by step.

    It can in a rotating schedule if a rank's tiles of a block depend only on the run lengths of the rank and
    of the block's owner, and on whether the owner comes before the rank, is the rank itself, or comes after
    it. This is true of the layouts that have a name. In the backward, all ranks must have runs of the same
    lengths. Otherwise the buffers of sums, and so a rank's memory, depend on the order in which blocks
    arrive.
    """
    named = layout.name in LAYOUTS and layout == LAYOUTS[layout.name](layout.S, layout.P)
    if schedule not in ROTATING or not mask.plain or not named or layout.P < 2:
        return False
    if not backward:
        return True
    made = plan(layout, mask)  # the tiles decide whether gradients travel
    equal = len(set(kinds(layout).tolist())) == 1
    return equal and all(made.of(rank, origin) for rank, origin in ((1, 0), (0, 0), (0, 1)))


def kinds(layout: Layout) -> Int[np.ndarray, " P"]:
    """Return a number for each rank, counted from 0, that is equal for ranks whose runs have the same lengths.

    >>> from ringlab import striped
    >>> kinds(striped(10, 4))
    array([0, 0, 1, 1])
    """
    known: dict[tuple[int, ...], int] = {}
    runs = (tuple(run.length for run in runs) for runs in layout.ranks)
    return np.array([known.setdefault(lengths, len(known)) for lengths in runs])


def seconds_by_label(
    prices: Prices, queries: Mapping[int, Shaped[Tensor, "..."]], layout: Layout, mask: Mask
) -> SecondsOfAll:
    """Return a function that takes a computation's label and returns its seconds on every rank.

    The ranks must `go_together`. queries: the queries of a rank, by its number of tokens.
    """
    P, made, kind, ranks = layout.P, plan(layout, mask), kinds(layout), np.arange(layout.P)
    members = [np.flatnonzero(kind == number).tolist() for number in range(kind.max() + 1)]

    @cache
    def table(backward: bool) -> Float[np.ndarray, "kinds kinds 3"]:
        """Return the seconds of a rank by its kind, the kind of the block's owner, and the owner's place.

        The place is 0 if the owner comes before the rank, 1 if it is the rank itself, 2 if it comes after.
        """
        found = np.full((len(members), len(members), 3), np.nan)
        for own, of_own in enumerate(members):
            seconds = prices.book(queries[layout.length(of_own[0])], backward).seconds
            found[own, own, 1] = seconds(made.of(of_own[0], of_own[0]))
            for other, of_other in enumerate(members):
                if of_own[-1] > of_other[0]:
                    found[own, other, 0] = seconds(made.of(of_own[-1], of_other[0]))
                if of_own[0] < of_other[-1]:
                    found[own, other, 2] = seconds(made.of(of_own[0], of_other[-1]))
        return found

    def seconds(label: str) -> Float[np.ndarray, " P"]:
        named = _ATTEND.fullmatch(label)
        if not named:
            return np.zeros(P)
        step, of_kinds = int(named[2]), table(bool(named[1]))
        if len(members) == 1 and step:
            return np.where(ranks >= step, of_kinds[0, 0, 0], of_kinds[0, 0, 2])
        side = np.where(ranks >= step, 0, 2) if step else 1
        return of_kinds[kind, np.roll(kind, step), side]

    return seconds


def models_of(layout: Layout, schedule: str, mask: Mask, backward: bool) -> list[int]:
    """Return, for each rank, the first rank whose program is the same except for its neighbours and the seconds of its tiles.

    In a rotating schedule the program depends on the lengths of the blocks, in the order in which they
    arrive, and in the backward on whether the rank's rows see anything of each block. In other schedules, and
    if the mask is more than causal, each rank represents only itself.
    """
    ranks = range(layout.P)
    if schedule not in ROTATING or not mask.plain:
        return [*ranks]
    made, found = plan(layout, mask), list[int]()
    first: dict[bytes, int] = {}
    lengths = np.array(layout.lengths)
    for rank in ranks:
        tiles = made.of_rank(rank)
        seen = np.array([bool(tiles[origin]) for origin in ranks]) if backward else lengths[:0]
        known = b"".join(np.roll(each[::-1], rank + 1).tobytes() for each in (lengths, seen))  # by distance
        found.append(first.setdefault(known, rank))
    return found


class Seconds:
    """The seconds of every rank's computations, for `ClockedCluster.run_alike`.

    queries: the queries of each rank, whose shapes decide the prices.
    """

    def __init__(
        self, prices: Prices, queries: Sequence[Shaped[Tensor, "..."]], layout: Layout, mask: Mask
    ) -> None:
        self.prices, self.queries, self.plan = prices, queries, plan(layout, mask)

    def __call__(self, rank: int, labels: tuple[str, ...]) -> Float[np.ndarray, " computations"]:
        """Return the seconds of the computations with these labels. Only attention takes more than 0."""
        P, tiles = len(self.queries), self.plan.of_rank(rank)
        found = np.zeros(len(labels))
        for backward in (False, True):
            places, steps = attentions(labels, backward)
            seconds = self.prices.book(self.queries[rank], backward).seconds
            found[places] = [seconds(tiles[origin]) for origin in ((rank - steps) % P).tolist()]
        return found


@lru_cache(maxsize=4)
def attentions(labels: tuple[str, ...], backward: bool) -> tuple[Steps, Steps]:
    """Return the places of attention among a rank's labels, in the forward or the backward, and the step of each.

    >>> attentions(("attend 0", "attend 1", "delta"), False)
    (array([0, 1]), array([0, 1]))
    """
    found = [(place, _ATTEND.fullmatch(label)) for place, label in enumerate(labels)]
    pairs = [(place, int(named[2])) for place, named in found if named and bool(named[1]) == backward]
    places, steps = np.array(pairs, np.int64).reshape(-1, 2).T
    return places, steps
