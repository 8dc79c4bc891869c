# expects: check=07.relation:long misconception=builds_the_mask
"""Reads the shift off a mask."""

import numpy as np


def tiles_between(q_run, k_run):
    rows, keys = (start + step * np.arange(n) for start, step, n in (q_run, k_run))
    mask = rows[:, None] >= keys
    n_q, n_k = mask.shape
    if not mask.any():
        return []
    if mask.all():
        return [(0, n_q, 0, n_k, False)]
    seen = mask.sum(axis=1)
    first = int((seen == 0).sum())
    before = int(seen[first]) - 1
    last = min(n_q, first + n_k - before)
    tiles = [(first, last, before, before + last - first, True)]
    if before:
        tiles.append((first, last, 0, before, False))
    if last < n_q:
        tiles.append((last, n_q, 0, n_k, False))
    return tiles
