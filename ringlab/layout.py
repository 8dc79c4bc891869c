"""Which rank owns which tokens: one two-parameter family that holds all published layouts.

A layout deals pieces of `chunk` tokens to the ranks round-robin, or folded (0..P-1, P-1..0, …).

    contiguous   round-robin, chunk ceil(S/P)
    striped      round-robin, chunk 1              Source: arXiv 2311.09431
    zig-zag      folded, chunk ceil(S/2P)          Source: arXiv 2407.21783, section 3.3.2
    token fold   folded, chunk 1

Those that have a name are in `LAYOUTS`; `get_layout` makes one by its name. Packed documents, which do not see each other, are dealt one by one: `per_document`.

Every rank stores its tokens as a few runs, run after run. All runs of a layout have the same
step, and their starts fall into place such that any two of them mask each other in one of four
ways only: skip, full, causal, causal shifted by one (see `ringlab.plan`).
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ringlab.errors import LayoutError, ShapeError, WorldSizeError


@dataclass(frozen=True)
class Run:
    """Global positions start, start + step, … : `length` of them."""

    start: int
    step: int
    length: int

    @property
    def positions(self) -> np.ndarray:
        """Return the global positions, int64."""
        return self.start + self.step * np.arange(self.length, dtype=np.int64)

    @property
    def last(self) -> int:
        """Return the last position; the one before the first where there is none."""
        return self.start + self.step * (self.length - 1)

    @property
    def index(self) -> slice:
        """Return the slice that takes this run out of a sequence axis."""
        return slice(self.start, self.start + self.step * self.length, self.step)


@dataclass(frozen=True)
class Layout:
    """Who owns which of `S` tokens among `P` ranks: `ranks[r]` are the runs of rank r in local order."""

    S: int
    P: int
    name: str
    ranks: tuple[tuple[Run, ...], ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != self.P:
            raise LayoutError(f"runs for {self.P} ranks", f"{len(self.ranks)}")
        steps = {run.step for runs in self.ranks for run in runs}
        if any(step < 1 for step in steps):
            raise LayoutError("runs that ascend: steps of 1 or more", f"step {min(steps)}")
        if not self._each_once():
            owned = np.concatenate(
                [np.zeros(0, np.int64), *(run.positions for runs in self.ranks for run in runs)]
            )
            raise LayoutError(
                f"runs that own each of the {self.S} positions exactly once",
                f"{len(owned)} positions, {len(np.unique(owned))} different",
            )

    def _each_once(self) -> bool:
        """Whether the runs own every position, and none twice: as many as there are, and all of them."""
        runs = [run for runs in self.ranks for run in runs if run.length > 0]
        if sum(run.length for run in runs) != self.S:
            return False
        if any(min(run.start, run.last) < 0 or max(run.start, run.last) >= self.S for run in runs):
            return False
        owned = np.zeros(self.S, dtype=bool)
        for run in runs:
            owned[run.index] = True
        return bool(owned.all())

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Worked out once: plans are looked up by layout, and there may be thousands of runs.

        Of integers only, so that it holds in another process too, where strings hash differently.
        """
        return hash((self.S, self.P, self.ranks))

    def __repr__(self) -> str:
        return f"{self.name}(S={self.S}, P={self.P})"

    @cached_property
    def step(self) -> int:
        """Return the step that all runs share."""
        steps = {run.step for runs in self.ranks for run in runs if run.length > 1}
        if len(steps) > 1:
            raise LayoutError(
                "runs of one step", f"steps {sorted(steps)}", "build the layout with dealt(...)"
            )
        return steps.pop() if steps else 1

    def runs(self, rank: int) -> tuple[Run, ...]:
        """Return the runs of `rank` in local order."""
        if not 0 <= rank < self.P:
            raise WorldSizeError(f"a rank from 0 to {self.P - 1}", f"{rank}")
        return self.ranks[rank]

    def length(self, rank: int) -> int:
        """Return how many tokens `rank` owns."""
        if not 0 <= rank < self.P:
            raise WorldSizeError(f"a rank from 0 to {self.P - 1}", f"{rank}")
        return self.lengths[rank]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Return how many tokens each rank owns."""
        return tuple(sum(run.length for run in runs) for runs in self.ranks)

    @cached_property
    def longest(self) -> int:
        """Return the most tokens that a rank owns."""
        return max(self.lengths)

    def positions(self, rank: int) -> np.ndarray:
        """Return the global positions of the tokens of `rank` in local order, int64."""
        return np.concatenate([np.zeros(0, np.int64), *(run.positions for run in self.runs(rank))])

    def shard(self, x: Any, rank: int, dim: int = -2) -> Any:
        """Return the tokens of `rank` from the whole sequence(s) `x`, a copy.

        `x` is a tensor, an array, or a tuple of them; `dim` is the sequence axis.
        Raises: ShapeError if `x` does not have S tokens there.
        """
        if isinstance(x, tuple):
            return tuple(self.shard(part, rank, dim) for part in x)
        axis = _axis(x, dim)
        if x.shape[axis] != self.S:
            raise ShapeError(
                f"{self.S} tokens on axis {dim} for {self!r}",
                f"shape {tuple(x.shape)}",
                "pass the whole sequence, not a shard, or build the layout for this length",
            )
        index = (slice(None),) * axis
        parts = [x[(*index, run.index)] for run in self.runs(rank)]
        return _concatenate(parts or [x[(*index, slice(0, 0))]], axis)

    def unshard(self, shards: Sequence[Any], dim: int = -2) -> Any:
        """Return the whole sequence in global order from the shards of all ranks.

        `shards` holds one tensor, array or tuple of them per rank, in rank order.
        Raises: WorldSizeError for another number of shards; ShapeError for wrong lengths.
        """
        if len(shards) != self.P:
            raise WorldSizeError(f"{self.P} shards for {self!r}", f"{len(shards)}")
        if isinstance(shards[0], tuple):
            return tuple(self.unshard(parts, dim) for parts in zip(*shards, strict=True))
        axis = _axis(shards[0], dim)
        for rank, part in enumerate(shards):
            if part.shape[axis] != self.length(rank):
                raise ShapeError(
                    f"{self.length(rank)} tokens on axis {dim} from rank {rank} of {self!r}",
                    f"shape {tuple(part.shape)}",
                )
        joined = _concatenate(list(shards), axis)
        return _take(joined, self._order, axis)

    @cached_property
    def _order(self) -> np.ndarray:
        """Where each global position stands in the shards laid end to end."""
        return np.argsort(np.concatenate([self.positions(rank) for rank in range(self.P)]), kind="stable")


def dealt(S: int, P: int, *, chunk: int, folded: bool = False, name: str | None = None) -> Layout:
    """Return the layout that deals `chunk`-token pieces round-robin, or folded.

    S divides by neither P nor chunk if it likes: the last piece is shorter, some ranks own less
    or nothing.
    """
    _check_sizes(S, P, chunk)
    return _dealt(S, P, chunk, folded, name or f"dealt[chunk={chunk}{', folded' if folded else ''}]")


@lru_cache(maxsize=64)
def _dealt(S: int, P: int, chunk: int, folded: bool, name: str) -> Layout:
    if P == 1:
        return Layout(S, 1, name, ((Run(0, 1, S),) if S else (),))
    pieces, period = -(-S // chunk), 2 * P if folded else P
    by_piece = -(-pieces // period) * (2 if folded else 1)
    by_offset = min(chunk, S) * (2 if folded else 1)
    deal = _runs_of_pieces if by_piece <= by_offset**2 else _runs_of_offsets
    turns = [(rank, period - 1 - rank) if folded else (rank,) for rank in range(P)]
    return Layout(S, P, name, tuple(deal(S, chunk, period, turn) for turn in turns))


def contiguous(S: int, P: int) -> Layout:
    """Return the layout in which rank r owns the r-th stretch of ceil(S/P) tokens."""
    _check_sizes(S, P)
    return dealt(S, P, chunk=max(1, -(-S // P)), name="contiguous")


def striped(S: int, P: int) -> Layout:
    """Return the layout in which rank r owns every P-th token from r. Source: arXiv 2311.09431."""
    return dealt(S, P, chunk=1, name="striped")


def zigzag(S: int, P: int) -> Layout:
    """Return the layout in which rank r owns pieces r and 2P-1-r of 2P. Source: arXiv 2407.21783."""
    _check_sizes(S, P)
    return dealt(S, P, chunk=max(1, -(-S // (2 * P))), folded=True, name="zigzag")


LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "contiguous": contiguous,
    "striped": striped,
    "zigzag": zigzag,
}
"""The layouts that can be had by name. A new one is a function of (S, P) and a line here; nothing else lists them."""


def layout_names() -> tuple[str, ...]:
    """Return the names that `get_layout` knows."""
    return tuple(LAYOUTS)


def get_layout(name: str, S: int, P: int) -> Layout:
    """Return the layout called `name` of S tokens on P ranks.

    Raises: LayoutError for an unknown name, or sizes that no layout has.

    >>> get_layout("zigzag", 16, 2).positions(0)
    array([ 0,  1,  2,  3, 12, 13, 14, 15])
    """
    if name not in LAYOUTS:
        raise LayoutError(f"a layout among {', '.join(LAYOUTS)}", repr(name))
    return LAYOUTS[name](S, P)


def per_document(lengths: Sequence[int], P: int) -> Layout:
    """Return the layout in which every rank owns a zig-zag share of each packed document.

    Behind its first n mod 2P tokens a document of n is cut into 2P equal chunks, of which rank r owns chunks r and
    2P−1−r: as many tokens and as much causal attention as any other. The few tokens before them, which see fewer
    than 2P keys each, and documents of fewer than 2P tokens, go whole to the rank that has the fewest tokens, the
    longest first. Each rank stores its tokens in ascending order.

    Raises: LayoutError for lengths or P that are none.
    """
    _check_sizes(0, P)
    whole = (int, np.integer)
    if not isinstance(lengths, (Sequence, np.ndarray)) or not all(
        isinstance(n, whole) and n >= 0 for n in lengths
    ):
        raise LayoutError("the documents' lengths in tokens, integers ≥ 0", repr(lengths))
    return _per_document(tuple(map(int, lengths)), int(P))


@lru_cache(maxsize=64)
def _per_document(lengths: tuple[int, ...], P: int) -> Layout:
    owned: list[list[tuple[int, int]]] = [[] for _ in range(P)]
    left: list[tuple[int, int]] = []
    start = 0
    for length in lengths:
        chunk, few = divmod(length, 2 * P)
        left += [(few, start)] * (few > 0)
        start += few
        for piece in range(2 * P if chunk else 0):
            owned[min(piece, 2 * P - 1 - piece)].append((start, chunk))
            start += chunk
    loads = [(0, 0, rank) for rank in range(P)]  # tokens and scores beyond the equal shares
    for few, at in sorted(left, key=lambda one: (-one[0], one[1])):
        tokens, scores, rank = heapq.heappop(loads)
        owned[rank].append((at, few))
        heapq.heappush(loads, (tokens + few, scores + few * (few + 1) // 2, rank))
    return Layout(start, P, "per_document", tuple(_joined(parts) for parts in owned))


def _joined(parts: list[tuple[int, int]]) -> tuple[Run, ...]:
    """Runs of step 1 for (start, length), ascending; those that touch become one."""
    runs: list[Run] = []
    for start, length in sorted(parts):
        if runs and runs[-1].last + 1 == start:
            runs[-1] = Run(runs[-1].start, 1, runs[-1].length + length)
        else:
            runs.append(Run(start, 1, length))
    return tuple(runs)


def _runs_of_pieces(S: int, chunk: int, period: int, turns: tuple[int, ...]) -> tuple[Run, ...]:
    """One run of step 1 for each piece that the turns of a period bring to a rank."""
    pieces = sorted(piece for turn in turns for piece in range(turn, -(-S // chunk), period))
    return tuple(Run(piece * chunk, 1, min(chunk, S - piece * chunk)) for piece in pieces)


def _runs_of_offsets(S: int, chunk: int, period: int, turns: tuple[int, ...]) -> tuple[Run, ...]:
    """One run per place inside a piece, with a step of a whole period: few runs for small chunks."""
    step = period * chunk
    starts = [turn * chunk + place for turn in turns for place in range(chunk)]
    return tuple(Run(start, step, -(-(S - start) // step)) for start in starts if start < S)


def _check_sizes(S: int, P: int, chunk: int = 1) -> None:
    for name, value, least in (("S", S, 0), ("P", P, 1), ("chunk", chunk, 1)):
        if not isinstance(value, (int, np.integer)) or value < least:
            raise LayoutError(f"{name} >= {least}, an integer", f"{name}={value!r}")


def _axis(x: Any, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ShapeError(f"an axis {dim}", f"shape {tuple(x.shape)}", "name the sequence axis with dim=")
    return dim % x.ndim


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _concatenate(parts: list[Any], axis: int) -> Any:
    if _is_torch(parts[0]):
        return sys.modules["torch"].cat(parts, dim=axis)
    return np.concatenate(parts, axis=axis)


def _take(x: Any, order: np.ndarray, axis: int) -> Any:
    if _is_torch(x):
        return x.index_select(axis, sys.modules["torch"].from_numpy(order).to(x.device))
    return np.take(x, order, axis=axis)
