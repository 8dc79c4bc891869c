# expects: check=08.tiles:ascending misconception=masked_counted_as_full
"""Computed or not: masked tiles are counted with the full ones."""

import numpy as np


def tile_counts(queries, keys, tile):
    if len(queries) == 0 or len(keys) == 0:
        return 0, 0, 0
    rows, columns = np.arange(0, len(queries), tile[0]), np.arange(0, len(keys), tile[1])
    q_low, q_high = np.minimum.reduceat(queries, rows), np.maximum.reduceat(queries, rows)
    k_low, k_high = np.minimum.reduceat(keys, columns), np.maximum.reduceat(keys, columns)
    some = q_high[:, None] >= k_low
    return int(some.sum()), 0, int((~some).sum())
