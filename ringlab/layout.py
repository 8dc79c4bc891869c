"""Layouts: which rank owns which tokens of a sequence or of packed documents.

A layout deals pieces of `chunk` tokens to the ranks round-robin, or folded (0..P-1, P-1..0, …).

    contiguous   round-robin, chunk ceil(S / P)
    striped      round-robin, chunk 1              Source: arXiv 2311.09431
    zig-zag      folded, chunk ceil(S / (2P))      Source: arXiv 2407.21783, section 3.3.2
    token fold   folded, chunk 1

`LAYOUTS` registers the first three by name. `per_document` deals packed documents one by one, because tokens
of different documents do not see each other. Every rank stores its tokens as a few runs, one after the other.
All runs of a layout have the same step. Their starts are chosen so that the causal mask between two runs has
one of four forms: skip, full, causal, or causal shifted by one (see `ringlab.plan`).
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from jaxtyping import Int64

from ringlab.errors import GradientError, LayoutError, ShapeError, WorldSizeError
from ringlab.handles import Handled


@dataclass(frozen=True)
class Run:
    """The `length` global positions start, start + step, start + 2·step, …

    >>> Run(start=1, step=4, length=3).positions
    array([1, 5, 9])
    """

    start: int
    step: int
    length: int

    @property
    def positions(self) -> np.ndarray:
        """Return the global positions, int64."""
        return self.start + self.step * np.arange(self.length, dtype=np.int64)

    @property
    def last(self) -> int:
        """Return the last position. For an empty run it is start − step."""
        return self.start + self.step * (self.length - 1)

    @property
    def index(self) -> slice:
        """Return the slice that selects this run on a sequence axis."""
        return slice(self.start, self.start + self.step * self.length, self.step)


@dataclass(frozen=True)
class Layout(Handled):
    """A division of `S` tokens among `P` ranks: `ranks[r]` holds the runs of rank r in local order.

    Raises: LayoutError unless there are P ranks, steps are at least 1, and each position is owned exactly once.

    >>> layout = zigzag(8, P=2)
    >>> layout.runs(0)
    (Run(start=0, step=1, length=2), Run(start=6, step=1, length=2))
    >>> shards = [layout.shard(np.arange(8), rank, dim=0) for rank in range(2)]
    >>> shards
    [array([0, 1, 6, 7]), array([2, 3, 4, 5])]
    >>> layout.unshard(shards, dim=0)
    array([0, 1, 2, 3, 4, 5, 6, 7])
    """

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
        """Return whether the runs own every position from 0 to S − 1 exactly once."""
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
        """Return the hash, computed once.

        It hashes integers only, because a string's hash differs between processes.
        """
        return hash((self.S, self.P, self.ranks))

    def __repr__(self) -> str:
        return f"{self.name}(S={self.S}, P={self.P})"

    @cached_property
    def step(self) -> int:
        """Return the step that all runs share. Raises: LayoutError if their steps differ."""
        steps = {run.step for runs in self.ranks for run in runs if run.length > 1}
        if len(steps) > 1:
            raise LayoutError(
                "runs of one step", f"steps {sorted(steps)}", "build the layout with dealt(...)"
            )
        return steps.pop() if steps else 1

    def runs(self, rank: int) -> tuple[Run, ...]:
        """Return the runs of `rank` in local order. Raises: WorldSizeError unless 0 ≤ rank < P."""
        if not 0 <= rank < self.P:
            raise WorldSizeError(f"a rank from 0 to {self.P - 1}", f"{rank}")
        return self.ranks[rank]

    def local_runs(self, rank: int) -> list[tuple[int, Run]]:
        """Return (local index of the run's first token, run) for each run of `rank`.

        Raises: WorldSizeError unless 0 ≤ rank < P.
        """
        runs = self.runs(rank)
        return list(zip(accumulate((int(run.length) for run in runs), initial=0), runs, strict=False))

    def of_ranks(self, world_size: int) -> Layout:
        """Return this layout if it is for `world_size` ranks. Raises: WorldSizeError if it is not."""
        if self.P != world_size:
            raise WorldSizeError(
                f"a layout for {world_size} ranks",
                repr(self),
                f"tokens come first: (S={self.P}, P={self.S})"
                if self.S == world_size
                else f"make the layout with P={world_size}, the ring's world_size",
            )
        return self

    def length(self, rank: int) -> int:
        """Return how many tokens `rank` owns. Raises: WorldSizeError unless 0 ≤ rank < P."""
        if not 0 <= rank < self.P:
            raise WorldSizeError(f"a rank from 0 to {self.P - 1}", f"{rank}")
        return self.lengths[rank]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Return how many tokens each rank owns."""
        return tuple(sum(run.length for run in runs) for runs in self.ranks)

    @cached_property
    def longest(self) -> int:
        """Return the largest number of tokens that a rank owns."""
        return max(self.lengths)

    def positions(self, rank: int) -> np.ndarray:
        """Return the global positions of the tokens of `rank` in local order, int64."""
        return np.concatenate([np.zeros(0, np.int64), *(run.positions for run in self.runs(rank))])

    def shard(self, x: Any, rank: int, dim: int | None = None) -> Any:
        """Return a copy of the tokens of `rank` in the whole sequence(s) `x`.

        `x` is a tensor, an array, or a tuple of them; `dim` is the sequence axis, −2 by default.
        Raises: ShapeError if `x` does not have S tokens on that axis, or if `dim` is not passed and more than
        one axis could be the sequence axis; WorldSizeError unless 0 ≤ rank < P.
        """
        if isinstance(x, tuple):
            return tuple(self.shard(part, rank, dim) for part in x)
        remedy = "pass the whole sequence, not a shard, or build the layout for this length"
        if self.S < self.P and self.P in x.shape:
            remedy = f"tokens come before ranks: (S={self.P}, P={self.S})"
        axis = _sequence_axis(x, dim, self.S, f"for {self!r}", remedy)
        index = (slice(None),) * axis
        parts = [x[(*index, run.index)] for run in self.runs(rank)]
        return _concatenate(parts or [x[(*index, slice(0, 0))]], axis)

    def unshard(self, shards: Sequence[Any], dim: int | None = None) -> Any:
        """Return the whole sequence in global order from the shards of all ranks.

        `shards` contains a tensor, an array or a tuple of them for each rank, in rank order.
        Raises: WorldSizeError unless there are P shards; ShapeError if a shard has the wrong length.
        """
        if len(shards) != self.P:
            raise WorldSizeError(f"{self.P} shards for {self!r}", f"{len(shards)}")
        if isinstance(shards[0], tuple):
            return tuple(self.unshard(parts, dim) for parts in zip(*shards, strict=True))
        for rank, part in enumerate(shards):
            axis = _sequence_axis(part, dim, self.length(rank), f"from rank {rank} of {self!r}")
        joined = _concatenate(list(shards), axis)
        return _take(joined, self._order, axis)

    def gather(self, ring: Any, x: Any, dim: int | None = None) -> Any:
        """Return the whole sequence in global order, on every rank, from the shards `x` of all ranks.

        `ring` is the `Ring` of these ranks, `x` a tensor or a tuple. Gradients do not flow back, so tensors
        must be detached.
        Raises: WorldSizeError for a ring of another size; ShapeError if `x` is not this rank's shard; GradientError for a
        tensor with a gradient.

        >>> import torch
        >>> from ringlab import VirtualCluster
        >>> layout = zigzag(8, P=2)
        >>> def program(ring):
        ...     return layout.gather(ring, torch.from_numpy(layout.positions(ring.rank)), dim=0).tolist()
        >>> VirtualCluster(2).run(program).results
        [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]]
        """
        if isinstance(x, tuple):
            return tuple(self.gather(ring, part, dim) for part in x)
        self.of_ranks(ring.world_size)
        axis = _sequence_axis(
            x, dim, self.length(ring.rank), f"of rank {ring.rank} for {self!r}", "pass a shard"
        )
        if _has_gradient(x):
            raise GradientError(
                "a tensor without a gradient", "one that requires it", "gather(ring, x.detach())"
            )
        shapes = [(*x.shape[:axis], length, *x.shape[axis + 1 :]) for length in self.lengths]
        return self.unshard(ring.all_gather(x, shapes), dim)

    @cached_property
    def _order(self) -> np.ndarray:
        """Return the index of each global position in the concatenated shards of all ranks."""
        return np.argsort(np.concatenate([self.positions(rank) for rank in range(self.P)]), kind="stable")


def dealt(S: int, P: int, *, chunk: int, folded: bool = False, name: str | None = None) -> Layout:
    """Return the layout that deals pieces of `chunk` tokens to the ranks 0, 1, …, P−1, and then again from 0.

    With `folded`, every second round goes backwards: 0, …, P−1, P−1, …, 0. S need not be a multiple of P or
    of chunk. The last piece may be shorter than the others, and some ranks may own fewer tokens than others,
    or none.

    Raises: LayoutError unless S ≥ 0, P ≥ 1 and chunk ≥ 1 are integers.

    >>> [dealt(12, 2, chunk=2).positions(rank).tolist() for rank in range(2)]
    [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    >>> [dealt(12, 2, chunk=2, folded=True).positions(rank).tolist() for rank in range(2)]
    [[0, 1, 6, 7, 8, 9], [2, 3, 4, 5, 10, 11]]
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
    # Choose the runs that need fewer tiles. With runs of pieces, the tile of each piece has all earlier
    # pieces of a rank as keys. With runs of offsets there is a tile for each pair of offsets.
    deal = _runs_of_pieces if by_piece <= by_offset**2 else _runs_of_offsets
    # A folded period has two rounds. A rank that is early in one round is late in the other, so all ranks
    # have about equal causal work.
    turns = [(rank, period - 1 - rank) if folded else (rank,) for rank in range(P)]
    return Layout(S, P, name, tuple(deal(S, chunk, period, turn) for turn in turns))


def contiguous(S: int, P: int) -> Layout:
    """Return the layout in which rank r owns the r-th stretch of ceil(S/P) tokens.

    Under a causal mask the last rank computes most, because token i has i + 1 scores.
    Raises: LayoutError unless S ≥ 0 and P ≥ 1 are integers.

    >>> layout = contiguous(16, P=4)
    >>> for rank in range(4):
    ...     print(f"rank {rank} owns {layout.positions(rank).tolist()}: {sum(layout.positions(rank) + 1)} scores")
    rank 0 owns [0, 1, 2, 3]: 10 scores
    rank 1 owns [4, 5, 6, 7]: 26 scores
    rank 2 owns [8, 9, 10, 11]: 42 scores
    rank 3 owns [12, 13, 14, 15]: 58 scores
    """
    _check_sizes(S, P)
    return dealt(S, P, chunk=max(1, -(-S // P)), name="contiguous")


def striped(S: int, P: int) -> Layout:
    """Return the layout in which rank r owns tokens r, r + P, r + 2P, …

    Under a causal mask, where token i has i + 1 scores, all ranks compute almost equally many scores.
    Raises: LayoutError unless S ≥ 0 and P ≥ 1 are integers. Source: arXiv 2311.09431.

    >>> layout = striped(16, P=4)
    >>> for rank in range(4):
    ...     print(f"rank {rank} owns {layout.positions(rank).tolist()}: {sum(layout.positions(rank) + 1)} scores")
    rank 0 owns [0, 4, 8, 12]: 28 scores
    rank 1 owns [1, 5, 9, 13]: 32 scores
    rank 2 owns [2, 6, 10, 14]: 36 scores
    rank 3 owns [3, 7, 11, 15]: 40 scores
    """
    return dealt(S, P, chunk=1, name="striped")


def zigzag(S: int, P: int) -> Layout:
    """Return the layout of pieces of ceil(S / (2P)) tokens in which rank r owns pieces r and 2P−1−r.

    Under a causal mask, where token i has i + 1 scores, all ranks compute equally many scores if 2P divides
    S. Otherwise the last pieces may be short or missing.
    Raises: LayoutError unless S ≥ 0 and P ≥ 1 are integers. Source: arXiv 2407.21783, section 3.3.2.

    >>> layout = zigzag(16, P=4)
    >>> for rank in range(4):
    ...     print(f"rank {rank} owns {layout.positions(rank).tolist()}: {sum(layout.positions(rank) + 1)} scores")
    rank 0 owns [0, 1, 14, 15]: 34 scores
    rank 1 owns [2, 3, 12, 13]: 34 scores
    rank 2 owns [4, 5, 10, 11]: 34 scores
    rank 3 owns [6, 7, 8, 9]: 34 scores
    """
    _check_sizes(S, P)
    return dealt(S, P, chunk=max(1, -(-S // (2 * P))), folded=True, name="zigzag")


LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "contiguous": contiguous,
    "striped": striped,
    "zigzag": zigzag,
}
"""The layouts with a name. A new one needs a function of (S, P) and a line here (see CONTRIBUTING.md)."""


def layout_names() -> tuple[str, ...]:
    """Return the names that `get_layout` accepts."""
    return tuple(LAYOUTS)


def get_layout(name: str, S: int, P: int) -> Layout:
    """Return the layout called `name` of S tokens on P ranks.

    Raises: LayoutError for an unknown name, or unless S ≥ 0 and P ≥ 1 are integers.

    >>> get_layout("zigzag", 16, 2).positions(0)
    array([ 0,  1,  2,  3, 12, 13, 14, 15])
    """
    if name not in LAYOUTS:
        raise LayoutError(f"one of the layouts {', '.join(LAYOUTS)}", repr(name))
    return LAYOUTS[name](S, P)


def per_document(lengths: Sequence[int], P: int) -> Layout:
    """Return the layout in which every rank owns a zig-zag share of each packed document.

    The first n mod 2P tokens of a document of n tokens are set aside, and the rest is cut into 2P equal
    pieces. Rank r owns pieces r and 2P−1−r, so all ranks have equally many of these tokens and equal causal
    work. A document of fewer than 2P tokens is thus set aside entirely. The tokens of a document
    that were set aside stay together. These groups are dealt from the longest to the shortest, each to the rank
    that has the fewest tokens so far. Each of their tokens sees fewer than 2P keys.
    Each rank stores its tokens in ascending order.

    Raises: LayoutError unless the lengths are integers ≥ 0 and P is an integer ≥ 1.

    >>> layout = per_document([8, 4], P=2)  # tokens 0 … 7 and 8 … 11
    >>> [layout.positions(rank).tolist() for rank in range(2)]
    [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
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
    # (tokens, scores, rank): the tokens and scores that each rank has beyond an equal share.
    loads = [(0, 0, rank) for rank in range(P)]
    for few, at in sorted(left, key=lambda one: (-one[0], one[1])):
        tokens, scores, rank = heapq.heappop(loads)
        owned[rank].append((at, few))
        heapq.heappush(loads, (tokens + few, scores + few * (few + 1) // 2, rank))
    return Layout(start, P, "per_document", tuple(_joined(parts) for parts in owned))


def _joined(parts: list[tuple[int, int]]) -> tuple[Run, ...]:
    """Return a run of step 1 for each (start, length), in ascending order; runs that touch are joined."""
    runs: list[Run] = []
    for start, length in sorted(parts):
        if runs and runs[-1].last + 1 == start:
            runs[-1] = Run(runs[-1].start, 1, runs[-1].length + length)
        else:
            runs.append(Run(start, 1, length))
    return tuple(runs)


def _runs_of_pieces(S: int, chunk: int, period: int, turns: tuple[int, ...]) -> tuple[Run, ...]:
    """Return a run of step 1 for each piece of a rank. In every period, the rank gets the pieces at `turns`."""
    pieces = sorted(piece for turn in turns for piece in range(turn, -(-S // chunk), period))
    return tuple(Run(piece * chunk, 1, min(chunk, S - piece * chunk)) for piece in pieces)


def _runs_of_offsets(S: int, chunk: int, period: int, turns: tuple[int, ...]) -> tuple[Run, ...]:
    """Return a run for each offset inside a piece, with a whole period as its step.

    Small chunks give few runs.
    """
    step = period * chunk
    starts = [turn * chunk + place for turn in turns for place in range(chunk)]
    return tuple(Run(start, step, -(-(S - start) // step)) for start in starts if start < S)


def _check_sizes(S: int, P: int, chunk: int = 1) -> None:
    for name, value, least in (("S", S, 0), ("P", P, 1), ("chunk", chunk, 1)):
        if not isinstance(value, (int, np.integer)) or value < least:
            raise LayoutError(f"{name} >= {least}, an integer", f"{name}={value!r}")


# Shards may be NumPy arrays or torch tensors. torch is not loaded for an array.


def _sequence_axis(x: Any, dim: int | None, length: int, whose: str, remedy: str = "") -> int:
    """Return axis `dim` of `x`, counted from the front. None means −2 if no other axis could be the sequence.

    Raises: ShapeError unless `x` has `length` tokens on that axis. `whose` and `remedy` become part of its
    message. If another axis has `length` tokens, the remedy names that axis. With dim=None, ShapeError is
    also raised if two axes could be the sequence: in (B, S) and (B, S, D) the first two. Four axes are always
    (B, H, S, D).
    """
    named, dim = dim is not None, -2 if dim is None else dim
    if not -x.ndim <= dim < x.ndim:
        raise ShapeError(f"an axis {dim}", f"shape {tuple(x.shape)}", "name the sequence axis with dim=")
    if x.shape[dim] != length:
        fitting = [axis for axis, size in enumerate(x.shape) if size == length]
        if fitting:
            remedy = f"name the sequence axis: {' or '.join(f'dim={axis}' for axis in fitting)}"
        raise ShapeError(f"{length} tokens on axis {dim} {whose}", f"shape {tuple(x.shape)}", remedy)
    if not named and x.ndim in (2, 3) and length > 1 and x.shape[0] == x.shape[1]:
        needed = f"the name of the axis of {length} tokens {whose}"
        raise ShapeError(needed, f"shape {tuple(x.shape)}", "name it: dim=0 or dim=1")
    return dim % x.ndim


def _concatenate(parts: list[Any], axis: int) -> Any:
    """Return the parts concatenated along an axis."""
    if _is_torch(parts[0]):
        return sys.modules["torch"].cat(parts, dim=axis)
    return np.concatenate(parts, axis=axis)


def _take(x: Any, order: Int64[np.ndarray, "n"], axis: int) -> Any:
    """Return a copy of `x` whose elements along an axis are those at the indices `order`."""
    if _is_torch(x):
        from ringlab.upload import upload  # imports torch; `x` is a tensor, so torch is loaded already

        return x.index_select(axis, upload(order, x.device))
    return np.take(x, order, axis=axis)


def _has_gradient(x: Any) -> bool:
    """Return whether `x` is a tensor for which autograd records operations now."""
    return _is_torch(x) and x.requires_grad and sys.modules["torch"].is_grad_enabled()


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)
