"""Runs as exercise 07 writes them: tuples (start, step, length), a list of them for every rank."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ringlab import layout as layouts
from ringlab.layout import Layout, Run

Tuples = list[list[tuple[int, int, int]]]


def runs_of(layout: Layout) -> Tuples:
    """Return the runs of every rank as tuples."""
    return [[(run.start, run.step, run.length) for run in layout.runs(rank)] for rank in range(layout.P)]


def positions_of(runs: list[tuple[int, int, int]]) -> np.ndarray:
    """Return the global positions of one rank's runs in local order, int64."""
    parts = [start + step * np.arange(length, dtype=np.int64) for start, step, length in runs]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def token_fold(S: int, P: int) -> Layout:
    """Return the layout that deals single tokens 0..P−1, P−1..0, and so on."""
    return layouts.dealt(S, P, chunk=1, folded=True, name="token fold")


def shuffled(rng: np.random.Generator, S: int, P: int) -> Layout:
    """Return a layout without any order: every token is a run of its own, on a rank drawn by chance."""
    owners = rng.integers(0, P, S)
    order = rng.permutation(S)
    ranks = tuple(tuple(Run(int(token), 1, 1) for token in order if owners[token] == r) for r in range(P))
    return Layout(S, P, "shuffled", ranks)


def cut(rng: np.random.Generator, S: int, P: int, step: int) -> Layout:
    """Return a layout by hand: every residue of `step` is cut into runs of any length, for any ranks."""
    ranks: list[list[Run]] = [[] for _ in range(P)]
    for residue in range(step):
        tokens = range(residue, S, step)
        places = sorted({0, len(tokens), *map(int, rng.integers(0, len(tokens) + 1, 2))})
        for begin, end in pairwise(places):
            ranks[int(rng.integers(P))].append(Run(tokens[begin], step, end - begin))
    order = [tuple(own[i] for i in rng.permutation(len(own))) for own in ranks]
    return Layout(S, P, f"cut by hand, step {step}", tuple(order))


def by_hand(*ranks: list[tuple[int, int, int]]) -> Layout:
    """Return the layout in which rank r owns the runs `ranks[r]`."""
    S = sum(length for own in ranks for _, _, length in own)
    return Layout(S, len(ranks), "by hand", tuple(tuple(Run(*run) for run in own) for own in ranks))


def described(layout: Layout) -> str:
    """Return a layout in words, with the runs of every rank where they are few."""
    text = f"{layout.name}, S={layout.S}, P={layout.P}"
    if layout.S > 8:
        return text
    owned = "; ".join(
        f"rank {rank} has {', '.join(map(str, runs)) or 'nothing'}"
        for rank, runs in enumerate(runs_of(layout))
    )
    return f"{text}: {owned}"
