"""Generators, recursion and integer arithmetic; masks of one tile at a time."""

from fractions import Fraction
from itertools import cycle, islice


def deal(S, P, chunk, folded=False):
    order = cycle([*range(P), *reversed(range(P))] if folded else range(P))
    mine = {rank: [] for rank in range(P)}
    for begin, rank in zip(range(0, S, chunk), order):
        mine[rank].append(np.arange(begin, min(begin + chunk, S)))
    return [np.concatenate([np.empty(0, dtype=np.int64), *mine[rank]]) for rank in range(P)]


def runs(positions, step):
    found = []
    for rest in np.unique(positions % step):
        mine = positions[positions % step == rest]
        for part in np.split(mine, np.flatnonzero(np.diff(mine) != step) + 1):
            found.append((int(part[0]), step, part.size))
    return sorted(found)


def tile_counts(queries, keys, tile):
    def groups(positions, size):
        it = iter(positions.tolist())
        while group := list(islice(it, size)):
            yield min(group), max(group)

    rows, columns = (np.array(list(groups(x, size))).reshape(-1, 2) for x, size in zip((queries, keys), tile))
    full = rows[:, None, 0] >= columns[None, :, 1]
    some = rows[:, None, 1] >= columns[None, :, 0]
    return np.sum(full), np.sum(some & ~full), np.sum(~some)


def imbalance(positions, tile):
    P = len(positions)
    counts = [[tile_counts(q, k, tile)[:2] for k in positions] for q in positions]
    work = [[int(sum(counts[r][(r - t) % P])) for r in range(P)] for t in range(P)]
    S = sum(map(len, positions))
    return float(Fraction(2 * P * tile[0] * tile[1] * sum(map(max, work)), S * (S + 1)))


def pack(lengths, P):
    """Short documents first; the ranks take turns at beginning."""
    offsets = [0]
    for n in lengths:
        offsets.append(offsets[-1] + n)
    shares = [[] for _ in range(P)]
    for turn, d in enumerate(sorted(range(len(lengths)), key=lambda d: lengths[d])):
        edges = [offsets[d] + lengths[d] * i // (2 * P) for i in range(2 * P + 1)]
        for piece in range(2 * P):
            rank = (min(piece, 2 * P - 1 - piece) + turn) % P
            shares[rank] += range(edges[piece], edges[piece + 1])
    return [np.fromiter(share, dtype=np.int64, count=len(share)) for share in shares]
