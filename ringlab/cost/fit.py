"""Fits the simulator's coefficients for the times of tiles and messages to measured times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

import numpy as np

from ringlab.cost.block_time import tile_scores
from ringlab.errors import CostError
from ringlab.plan import Tile

KERNEL_TILES = (64, 128, 256, 512, 1024)
"""Rows and keys that a kernel's own tiles may have."""


def fit_tiles(seconds: Mapping[tuple[int, int], float], heads: int) -> tuple[float, float, float]:
    """Return (per_launch_s, per_score_s, per_row_s) from the seconds of unmasked tiles of (rows, keys).

    A tile takes per_launch_s + heads·rows·(keys·per_score_s + per_row_s); no part is negative.
    `heads`: query heads times sequences. The fit minimises the sum of squared relative errors.
    Raises: CostError for fewer than three tiles, or times that are not positive.
    """
    _expect(seconds.values(), 3, "tiles")
    features = [(1.0, heads * rows * keys, heads * rows) for rows, keys in seconds]
    launch, score, row = _least_squares(np.array(features, float), np.array(list(seconds.values())))
    return launch, score, row


def fit_kernel_tile(
    seconds: Mapping[int, float], coefficients: tuple[float, float, float], heads: int
) -> int | None:
    """Return the `MeasuredBlock.kernel_tile` that best explains the seconds of causal tiles: one of `KERNEL_TILES`, or None.

    seconds: the seconds of square causal tiles, by their number of rows. coefficients, heads: as returned by
    and passed to `fit_tiles`, for tiles without a mask.
    """
    launch_s, score_s, row_s = coefficients

    def error(edge: int | None) -> float:
        kernel = None if edge is None else (edge, edge)
        scores = {rows: tile_scores(Tile(0, rows, 0, rows, True), kernel) for rows in seconds}
        predicted = {rows: launch_s + heads * (scores[rows] * score_s + rows * row_s) for rows in seconds}
        return sum((predicted[rows] / measured - 1) ** 2 for rows, measured in seconds.items())

    return min((None, *KERNEL_TILES), key=error)


def fit_link(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Return (latency_s, bytes_per_s) from the seconds of messages by their bytes: latency + bytes/bandwidth.

    Raises: CostError for fewer than two messages, times that are not positive, or times that do not grow
        with the size.
    """
    _expect(seconds.values(), 2, "messages")
    features = np.array([(1.0, nbytes) for nbytes in seconds])
    latency, per_byte = _least_squares(features, np.array(list(seconds.values())))
    if per_byte == 0:
        raise CostError("times that grow with the size of the message", "times that do not", "measure again")
    return latency, 1 / per_byte


def _expect(seconds: Iterable[float], least: int, of: str) -> None:
    times = list(seconds)
    if len(times) < least or not all(0 < s < float("inf") for s in times):
        raise CostError(f"at least {least} {of} with positive times", f"{times}")


def _least_squares(features: np.ndarray, seconds: np.ndarray) -> tuple[float, ...]:
    """Return the coefficients >= 0 of least relative error, the best over all choices of nonzero coefficients."""
    weighted = features / seconds[:, None]
    scale = weighted.max(axis=0)
    best, least = np.zeros(features.shape[1]), float("inf")
    columns = range(features.shape[1])
    for size in range(1, features.shape[1] + 1):
        for chosen in map(list, combinations(columns, size)):
            found, *_ = np.linalg.lstsq(
                weighted[:, chosen] / scale[chosen], np.ones(len(seconds)), rcond=None
            )
            error = float(np.square(weighted[:, chosen] / scale[chosen] @ found - 1).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(features.shape[1]), error
                best[chosen] = found / scale[chosen]
    return tuple(best.tolist())
