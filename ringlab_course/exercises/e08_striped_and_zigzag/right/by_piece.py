"""Piece by piece, with lists and sets; the pieces of a document rounded up, and its shares not in order."""


def deal(S, P, chunk, folded=False):
    shares = [[] for _ in range(P)]
    for number, begin in enumerate(range(0, S, chunk)):
        turn, place = divmod(number, P)
        rank = P - 1 - place if folded and turn % 2 == 1 else place
        shares[rank] += range(begin, min(begin + chunk, S))
    return [np.array(share, dtype=np.int64) for share in shares]


def runs(positions, step):
    waiting, found = set(positions.tolist()), []
    for p in positions.tolist():
        if p not in waiting:
            continue
        length = 0
        while p + length * step in waiting:
            waiting.remove(p + length * step)
            length += 1
        found.append((p, step, length))
    return found


def tile_counts(queries, keys, tile):
    rows = [queries[i : i + tile[0]] for i in range(0, len(queries), tile[0])]
    columns = [keys[j : j + tile[1]] for j in range(0, len(keys), tile[1])]
    latest_query = np.array([row.max() for row in rows])
    earliest_query = np.array([row.min() for row in rows])
    full = skipped = 0
    for column in columns:
        full += int((earliest_query >= column.max()).sum())
        skipped += int((latest_query < column.min()).sum())
    return full, len(rows) * len(columns) - full - skipped, skipped


def imbalance(positions, tile):
    P = len(positions)
    S = max((int(mine.max()) for mine in positions if len(mine)), default=-1) + 1
    computed = {}
    for rank in range(P):
        for origin in range(P):
            full, masked, _ = tile_counts(positions[rank], positions[origin], tile)
            computed[rank, (rank - origin) % P] = (full + masked) * tile[0] * tile[1]
    busiest = [max(computed[rank, step] for rank in range(P)) for step in range(P)]
    return sum(busiest) / (S * (S + 1) / 2 / P)


def pack(lengths, P):
    late, early = [[] for _ in range(P)], [[] for _ in range(P)]
    begins = np.cumsum(lengths) - lengths
    for turn, d in enumerate(sorted(range(len(lengths)), key=lambda d: -lengths[d])):
        chunk = -(-lengths[d] // (2 * P))
        at = [begins[d] + min(lengths[d], i * chunk) for i in range(2 * P + 1)]
        for rank in range(P):
            owner = (rank - turn) % P
            early[owner] += range(at[rank], at[rank + 1])
            late[owner] += range(at[2 * P - 1 - rank], at[2 * P - rank])
    return [np.array(a + b, dtype=np.int64) for a, b in zip(late, early, strict=True)]
