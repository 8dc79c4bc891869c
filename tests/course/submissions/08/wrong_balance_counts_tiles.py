# expects: check=08.balance:tiles misconception=counts_tiles
"""Tiles are not multiplied by their size."""

import numpy as np


def tile_counts(queries, keys, tile):
    if len(queries) == 0 or len(keys) == 0:
        return 0, 0, 0
    rows, columns = np.arange(0, len(queries), tile[0]), np.arange(0, len(keys), tile[1])
    q_low, q_high = np.minimum.reduceat(queries, rows), np.maximum.reduceat(queries, rows)
    k_low, k_high = np.minimum.reduceat(keys, columns), np.maximum.reduceat(keys, columns)
    some, full = q_high[:, None] >= k_low, q_low[:, None] >= k_high
    return int(full.sum()), int((some & ~full).sum()), int((~some).sum())


def imbalance(positions, tile):
    P, S = len(positions), sum(len(mine) for mine in positions)
    work = np.zeros((P, P))
    for rank in range(P):
        for step in range(P):
            full, masked, _ = tile_counts(positions[rank], positions[(rank - step) % P], tile)
            work[rank, step] = full + masked
    return work.max(0).sum() / (S * (S + 1) / 2 / P)
