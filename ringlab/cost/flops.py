"""FLOPs of attention (by layout, tile by tile), of linear layers and of the vocabulary, forward and backward.

A multiply-add is two FLOPs. Score elements are (query, key) pairs of one head of one sequence.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Num

from ringlab.cost.models import Model
from ringlab.cost.sizes import Attention
from ringlab.errors import CostError
from ringlab.layout import Layout

FORWARD_PRODUCTS = 2
"""Matrix products of a block's forward: scores Q·Kᵀ, and probabilities · V."""
BACKWARD_PRODUCTS = 5
"""Matrix products of a block's backward: Q·Kᵀ once more, dO·Vᵀ, Pᵀ·dO, dS·K and dSᵀ·Q."""
RECOMPUTATIONS = ("none", "selective", "full")
"""The parts that a layer computes again before its backward: none; its attention; all of it."""
MOST_ENTRIES = 4_000_000  # the number of pairs of runs that are handled at once, in arrays of 32 MB


def attention_flops(sizes: Attention, score_elements: int, backward: bool = False) -> int:
    """Return the FLOPs of `score_elements` (query, key) pairs, for all B sequences and H query heads.

    The forward takes 4·D FLOPs per pair and head, and the backward 10·D, if Dv, the head dim of v, equals D:
    each matrix product takes D multiply-adds, or Dv if V or dO is a factor (one of two forward, two of five
    backward). K/V heads do not matter: GQA saves bytes, not FLOPs.
    """
    products, of_v = (BACKWARD_PRODUCTS, 2) if backward else (FORWARD_PRODUCTS, 1)
    dims = (products - of_v) * sizes.D + of_v * sizes.value_dim
    return 2 * dims * sizes.B * sizes.H * int(score_elements)


def linear_flops(model: Model, tokens: int) -> int:
    """Return the forward FLOPs of all layers' matrices: Q, K, V, output and feed-forward, 2 per weight and token.

    Of the experts, only those to which a token goes count.
    """
    return 2 * tokens * sum(it.layers * it.active_parameters for it in model.kinds)


def vocabulary_flops(model: Model, tokens: int) -> int:
    """Return the forward FLOPs of the logits, 2·d·V per token; looking embeddings up takes no FLOPs."""
    return 2 * model.d_model * model.vocabulary * tokens


def linear_backward_flops(forward_flops: int) -> int:
    """Return the FLOPs of a linear layer's backward: two products, for the inputs and for the weights."""
    return 2 * forward_flops


def check_recomputation(recomputation: str) -> None:
    """Check a kind of recomputation. Raises: CostError if it is not in RECOMPUTATIONS."""
    if recomputation not in RECOMPUTATIONS:
        raise CostError(f"recomputation among {', '.join(RECOMPUTATIONS)}", repr(recomputation))


def visible_pairs(S: int, causal: bool = True, window: int | None = None, prefix: int = 0) -> int:
    """Return the score elements of `S` rows that see each other and, if causal, the `prefix` tokens before them.

    With a window, a row sees itself, the window − 1 tokens before it and, unless causal, as many after it.

    >>> visible_pairs(4), visible_pairs(4, window=2), visible_pairs(4, False, 2), visible_pairs(2, prefix=3)
    (10, 7, 10, 9)
    """
    if not causal:
        return S * S if window is None else 2 * visible_pairs(S, True, window) - S
    most = min(window or prefix + S, prefix + S)
    growing = max(
        0, min(most - 1 - prefix, S)
    )  # the rows that see all tokens before them, and fewer than `most`
    return growing * prefix + growing * (growing + 1) // 2 + (S - growing) * most


def layout_work(
    layout: Layout, causal: bool = True, tile: tuple[int, int] | None = None, *, ascending: bool = False
) -> np.ndarray:
    """Return the number of score elements that each rank computes in each step: int64 (P, P), [rank, step].

    At step t rank r meets the keys of rank (r − t) mod P. If `tile` is None, only visible pairs count. A
    `tile` of (rows, keys) puts a grid over the rank's rows and the block's keys in their local order, and
    every tile of the grid that is not entirely masked counts as a whole (tiles at the edges are smaller). The
    local order of tokens is run after run; with `ascending` the grid follows ascending positions instead.
    This matters if runs interleave: with `ascending`, the token-level fold has only one diagonal of
    half-masked tiles, not one for each pair of runs.
    Raises: CostError for a tile below one.
    """
    if tile is not None and not all(isinstance(side, int) and side >= 1 for side in tile):
        raise CostError("a tile of (rows, keys), each an integer >= 1", f"{tile!r}")
    lengths = np.array([layout.length(rank) for rank in range(layout.P)], dtype=np.int64)
    if not causal:
        by_origin = np.outer(lengths, lengths)
    elif tile is None:
        by_origin = _visible(layout)
    else:
        by_origin = _tiled(layout, *tile, ascending)
    ranks = np.arange(layout.P)
    return by_origin[ranks[:, None], (ranks[:, None] - ranks[None, :]) % layout.P]


def slowest_per_step(work: Num[np.ndarray, "ranks steps"]) -> Num[np.ndarray, " steps"]:
    """Return the most work of any rank in each step, which decides when a ring in lockstep goes on."""
    return work.max(axis=0)


def imbalance(work: Num[np.ndarray, "P P"], layout: Layout) -> float:
    """Return the slowest rank's work, summed over steps, relative to an even split of the visible causal pairs."""
    ideal = layout.S * (layout.S + 1) / 2 / layout.P
    return float(slowest_per_step(work).sum() / ideal)


def _visible(layout: Layout) -> np.ndarray:
    """Return the visible pairs by (rank, origin), counted run by run: row i of a run sees keys j <= i + shift."""
    runs = [(rank, run) for rank in range(layout.P) for run in layout.runs(rank) if run.length]
    pairs = np.zeros((layout.P, layout.P), dtype=np.int64)
    if not runs:
        return pairs
    owner = np.array([rank for rank, _ in runs])
    start = np.array([run.start for _, run in runs], dtype=np.int64)
    length = np.array([run.length for _, run in runs], dtype=np.int64)
    owners, first = np.unique(owner, return_index=True)
    at_once = max(1, MOST_ENTRIES // len(runs))
    for begin in range(0, len(runs), at_once):
        rows = slice(begin, begin + at_once)
        shift = (start[rows, None] - start[None, :]) // layout.step
        seen = _staircase(shift, length[rows, None], length[None, :])
        by_rank = np.add.reduceat(seen, first, axis=1)
        np.add.at(pairs, (owner[rows, None], owners[None, :]), by_rank)
    return pairs


def _staircase(shift: np.ndarray, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the sum over rows i of clip(i + shift + 1, 0, keys)."""
    first = np.clip(-shift, 0, rows)  # the first row that sees anything
    whole = np.clip(keys - shift - 1, first, rows)  # the first row that sees all keys
    rising = whole - first
    lowest = first + shift + 1
    return rising * lowest + rising * (rising - 1) // 2 + (rows - whole) * keys


def _tiled(layout: Layout, rows: int, keys: int, ascending: bool) -> np.ndarray:
    """Return the pairs in tiles with a visible pair. A tile has one if its last row is not before its first key."""
    pairs = np.zeros((layout.P, layout.P), dtype=np.int64)
    owner, last, height = [], [], []
    blocks = []
    for rank in range(layout.P):
        positions = np.sort(layout.positions(rank)) if ascending else layout.positions(rank)
        if not len(positions):
            continue
        at = np.arange(0, len(positions), rows)
        owner.append(np.full(len(at), rank))
        last.append(np.maximum.reduceat(positions, at))
        height.append(np.diff(np.append(at, len(positions))))
        blocks.append((rank, *_first_keys(positions, keys)))
    for origin, first, widths in blocks:
        seen = widths[np.searchsorted(first, np.concatenate(last), side="right")]
        np.add.at(pairs[:, origin], np.concatenate(owner), np.concatenate(height) * seen)
    return pairs


def _first_keys(positions: np.ndarray, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first position in each tile of keys, ascending, and the number of keys in the first n tiles."""
    at = np.arange(0, len(positions), keys)
    first, width = np.minimum.reduceat(positions, at), np.diff(np.append(at, len(positions)))
    order = np.argsort(first, kind="stable")
    return first[order], np.concatenate([[0], np.cumsum(width[order])]).astype(np.int64)
