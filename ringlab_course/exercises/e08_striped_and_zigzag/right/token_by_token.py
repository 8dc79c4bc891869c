"""Plain loops, one token at a time."""


def deal(S, P, chunk, folded=False):
    shares = [[] for _ in range(P)]
    rank, way, left = 0, 1, chunk
    for token in range(S):
        if left == 0:
            left = chunk
            if folded and not 0 <= rank + way < P:
                way = -way
            else:
                rank = (rank + way) % P
        shares[rank].append(token)
        left -= 1
    return [np.array(share, dtype=np.int64) for share in shares]


def runs(positions, step):
    lengths = {}
    start_of = {}
    for p in positions:
        p = int(p)
        start = start_of.get(p - step, p)
        start_of[p] = start
        lengths[start] = lengths.get(start, 0) + 1
    return [[start, step, lengths[start]] for start in sorted(lengths)]


def tile_counts(queries, keys, tile):
    full = masked = skipped = 0
    columns = [keys[j : j + tile[1]] for j in range(0, len(keys), tile[1])]
    ends = [(column.min(), column.max()) for column in columns]
    for i in range(0, len(queries), tile[0]):
        rows = queries[i : i + tile[0]]
        low, high = rows.min(), rows.max()
        for first, last in ends:
            if high < first:
                skipped += 1
            elif low >= last:
                full += 1
            else:
                masked += 1
    return full, masked, skipped


def imbalance(positions, tile):
    P = len(positions)
    S = sum(len(mine) for mine in positions)
    total = 0
    for step in range(P):
        slowest = 0
        for rank in range(P):
            full, masked, _ = tile_counts(positions[rank], positions[rank - step], tile)
            slowest = max(slowest, (full + masked) * tile[0] * tile[1])
        total += slowest
    return total / (S * (S + 1) / (2 * P))


def pack(lengths, P):
    shares = [[] for _ in range(P)]
    times = {}
    begin = 0
    for n in lengths:  # documents of one length go round; so does the first of each length
        turn = times[n] = times.get(n, n) + 1
        for i in range(n):
            piece = i * 2 * P // n
            shares[(min(piece, 2 * P - 1 - piece) + turn) % P].append(begin + i)
        begin += n
    return [np.array(share, dtype=np.int64) for share in shares]
