"""Runs of tokens in the notation of exercise 07, and the layouts on which its checks test answers.

A run is a tuple (start, step, length). A layout is given as one list of runs for each rank.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from ringlab import layout as layouts
from ringlab.layout import Layout

Run = tuple[int, int, int]
Tuples = list[list[Run]]


def runs_of(layout: Layout) -> Tuples:
    """Return the runs of every rank as tuples."""
    return [[(run.start, run.step, run.length) for run in layout.runs(rank)] for rank in range(layout.P)]


def positions_of(runs: list[Run]) -> np.ndarray:
    """Return the global positions of one rank's runs in local order, int64."""
    parts = [start + step * np.arange(length, dtype=np.int64) for start, step, length in runs]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def token_fold(S: int, P: int) -> Layout:
    """Return the layout that deals single tokens to the ranks 0 … P − 1, then to P − 1 … 0, and so on."""
    return layouts.dealt(S, P, chunk=1, folded=True, name="token fold")


def shuffled(rng: np.random.Generator, S: int, P: int) -> Layout:
    """Return a layout in which every token is a run of its own, on a random rank, and the runs have a random order."""
    owners = rng.integers(0, P, S)
    order = rng.permutation(S)
    ranks = tuple(
        tuple(layouts.Run(int(token), 1, 1) for token in order if owners[token] == r) for r in range(P)
    )
    return Layout(S, P, "shuffled", ranks)


def cut(rng: np.random.Generator, S: int, P: int, step: int) -> Layout:
    """Return a layout of runs of this step: the tokens of each residue are cut at random, and each run goes to a random rank."""
    ranks: list[list[layouts.Run]] = [[] for _ in range(P)]
    for residue in range(step):
        tokens = range(residue, S, step)
        places = sorted({0, len(tokens), *map(int, rng.integers(0, len(tokens) + 1, 2))})
        for begin, end in pairwise(places):
            ranks[int(rng.integers(P))].append(layouts.Run(tokens[begin], step, end - begin))
    order = [tuple(own[i] for i in rng.permutation(len(own))) for own in ranks]
    return Layout(S, P, f"cut by hand, step {step}", tuple(order))


def by_hand(*ranks: list[Run]) -> Layout:
    """Return the layout in which rank r owns the runs `ranks[r]`."""
    S = sum(length for own in ranks for _, _, length in own)
    return Layout(S, len(ranks), "by hand", tuple(tuple(layouts.Run(*run) for run in own) for own in ranks))


def stretches(rng: np.random.Generator, P: int, longest: int) -> Layout:
    """Return a contiguous layout in which each rank owns one stretch of 2 to `longest` tokens."""
    lengths = rng.integers(2, longest + 1, P).tolist()
    runs = [[(end - n, 1, n)] for end, n in zip(np.cumsum(lengths).tolist(), lengths, strict=True)]
    return replace(by_hand(*runs), name="contiguous")


def described(layout: Layout, runs: Tuples | None = None) -> str:
    """Return a text that describes a layout; it lists the runs of every rank if there are at most eight."""
    runs = runs or runs_of(layout)
    text = f"{layout.name}, S={layout.S}, P={layout.P}"
    if sum(map(len, runs)) > 8:
        return text
    owned = "; ".join(
        f"rank {rank} has {', '.join(map(str, own)) or 'nothing'}" for rank, own in enumerate(runs)
    )
    return f"{text}: {owned}"
