"""The solution in the notebook, without its docstrings."""

import numpy as np


def deal(S, P, chunk, folded=False):
    period = 2 * P if folded else P
    turn = np.arange(S) // chunk % period
    owner = np.minimum(turn, period - 1 - turn) if folded else turn
    return [np.flatnonzero(owner == rank) for rank in range(P)]


def runs(positions, step):
    owned = set(positions.tolist())
    found = []
    for start in sorted(p for p in owned if p - step not in owned):
        stop = start + step
        while stop in owned:
            stop += step
        found.append((start, step, (stop - start) // step))
    return found


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
    waited = 0
    for step in range(P):
        tiles = [tile_counts(positions[r], positions[(r - step) % P], tile) for r in range(P)]
        waited += max(full + masked for full, masked, _ in tiles)
    return waited * tile[0] * tile[1] / (S * (S + 1) / 2 / P)


def pack(lengths, P):
    shares = [[np.zeros(0, np.int64)] for _ in range(P)]
    begins = np.cumsum([0, *lengths])
    for turn, document in enumerate(np.argsort(lengths, kind="stable")):
        begin, n = begins[document], lengths[document]
        cuts = [begin + i * n // (2 * P) for i in range(2 * P + 1)]
        for rank in range(P):
            for piece in (rank, 2 * P - 1 - rank):
                shares[(rank + turn) % P].append(np.arange(cuts[piece], cuts[piece + 1]))
    return [np.concatenate(parts) for parts in shares]
