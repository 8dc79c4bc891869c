# expects: check=08.balance:uneven misconception=assumes_equal_lengths
"""S is P times the length of the first shard."""

import numpy as np


def tile_counts(queries, keys, tile):
    if len(queries) == 0 or len(keys) == 0:
        return 0, 0, 0
    rows, columns = np.arange(0, len(queries), tile[0]), np.arange(0, len(keys), tile[1])
    q_low, q_high = np.minimum.reduceat(queries, rows), np.maximum.reduceat(queries, rows)
    k_low, k_high = np.minimum.reduceat(keys, columns), np.maximum.reduceat(keys, columns)
    some = (q_high[:, None] >= k_low).sum()
    full = (q_low[:, None] >= k_high).sum()
    return int(full), int(some - full), int(len(rows) * len(columns) - some)


def imbalance(positions, tile):
    P, S = len(positions), len(positions) * len(positions[0])
    ideal = S * (S + 1) / 2 / P
    work = np.zeros((P, P))
    for rank in range(P):
        for step in range(P):
            full, masked, skipped = tile_counts(positions[rank], positions[(rank - step) % P], tile)
            work[rank, step] = (full + masked) * tile[0] * tile[1]
    return work.max(0).sum() / ideal
