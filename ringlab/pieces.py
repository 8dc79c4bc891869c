"""A rank's runs, cut at the bounds of documents and prefixes so that one simple rule describes each pair of pieces.

`ringlab.plan` calls this for masks that are more than causal. `check_position_ids` compares a caller's position ids
with the same documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ringlab.errors import LayoutError
from ringlab.layout import Layout, Run
from ringlab.mask import Mask
from ringlab.tile import Tile, band


@dataclass(frozen=True)
class Piece:
    """A part of a run that lies in one document.

    local_start: the local index of its first token. in_prefix: whether its tokens belong to the document's prefix.
    """

    local_start: int
    run: Run
    in_prefix: bool


def pieces_by_document(layout: Layout, mask: Mask, rank: int) -> dict[int, list[Piece]]:
    """Return the pieces of a rank's runs, by document number."""
    found: dict[int, list[Piece]] = {}
    prefixes = np.array(mask.prefixes, np.int64)
    for local_start, run in with_local_starts(layout.runs(rank)):
        if run.length == 0:
            continue
        positions = run.positions
        documents = mask.document_of(positions)
        early = positions - (mask.bounds[documents] if mask.documents else 0) < prefixes[documents]
        changes = (documents[1:] != documents[:-1]) | (early[1:] != early[:-1])
        cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), run.length]
        for start, stop in pairwise(cuts):
            part = Run(int(positions[start]), run.step, stop - start)
            piece = Piece(local_start + start, part, bool(early[start]))
            found.setdefault(int(documents[start]), []).append(piece)
    return found


def piece_tiles(mask: Mask, query: Piece, key: Piece, step: int) -> list[Tile]:
    """Return the tiles of two pieces of one document, in the pieces' own indices.

    Raises: LayoutError for a run whose step is not `step`.
    """
    n, m = query.run.length, key.run.length
    if key.in_prefix:
        return [Tile(0, n, 0, m, False)]
    check_steps(query.run, key.run, step)
    apart = query.run.start - key.run.start
    lo, hi = -n, m
    if mask.window is not None:
        lo, hi = (apart - mask.window) // step + 1, -(-(apart + mask.window) // step) - 1
    if mask.causal:
        hi = min(hi, apart // step)
    return band(n, m, lo, hi)


def check_position_ids(ids: Any, layout: Layout, mask: Mask, rank: int, *, or_global: bool = False) -> None:
    """Return if `ids` are the positions of the tokens that `rank` owns, in local order, counted in their documents.

    or_global: or, if wanted, counted in the whole sequence.

    Raises: LayoutError, naming the first token whose position id is wrong.
    """
    ids = np.asarray(ids.detach().cpu() if hasattr(ids, "detach") else ids)
    if or_global and np.array_equal(ids, layout.positions(rank)):
        return
    expected = mask.of_length(layout.S).position_ids(layout.positions(rank))
    remedy = (
        f"shard the position ids of the whole sequence like the tokens: layout.shard(ids, {rank}, dim=-1)"
    )
    if ids.shape != expected.shape:
        raise LayoutError(
            f"{len(expected)} position ids on rank {rank} of {layout!r}", f"shape {ids.shape}", remedy
        )
    wrong = np.flatnonzero(ids != expected)
    if len(wrong):
        i = int(wrong[0])
        if len(np.unique(ids - expected)) == 1 and ids[i] > expected[i]:
            offset = ids[i] - expected[i]
            remedy += f"; if the model's ids begin at {offset}, pass ids - {offset}"
        raise LayoutError(
            f"position {expected[i]} for local token {i} of rank {rank} under {layout!r}",
            f"{ids[i]}; {len(wrong)} of {len(expected)} differ",
            remedy,
        )


def with_local_starts(runs: tuple[Run, ...]) -> list[tuple[int, Run]]:
    """Return (local index of its first token, run) for each run of a rank."""
    starts = np.cumsum([0, *(run.length for run in runs)])
    return [(int(start), run) for start, run in zip(starts, runs, strict=False)]


def check_steps(q: Run, k: Run, step: int) -> None:
    """Return if both runs have this step. Raises: LayoutError if one has another."""
    if (q.length > 1 and q.step != step) or (k.length > 1 and k.step != step):
        raise LayoutError(f"runs of step {step}", f"steps {q.step} and {k.step}")
