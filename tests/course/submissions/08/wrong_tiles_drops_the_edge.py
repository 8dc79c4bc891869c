# expects: check=08.tiles:edges misconception=drops_the_edge
"""Whole tiles only."""

import numpy as np


def tile_counts(queries, keys, tile):
    queries = queries[: len(queries) // tile[0] * tile[0]]
    keys = keys[: len(keys) // tile[1] * tile[1]]
    if len(queries) == 0 or len(keys) == 0:
        return 0, 0, 0
    rows, columns = np.arange(0, len(queries), tile[0]), np.arange(0, len(keys), tile[1])
    q_low, q_high = np.minimum.reduceat(queries, rows), np.maximum.reduceat(queries, rows)
    k_low, k_high = np.minimum.reduceat(keys, columns), np.maximum.reduceat(keys, columns)
    some, full = q_high[:, None] >= k_low, q_low[:, None] >= k_high
    return int(full.sum()), int((some & ~full).sum()), int((~some).sum())
