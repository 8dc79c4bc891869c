"""No loops over tokens: sorting and broadcasting."""


def deal(S, P, chunk, folded=False):
    order = [*range(P), *reversed(range(P))] if folded else [*range(P)]
    owner = np.asarray(order)[np.arange(S) // chunk % len(order)]
    by_owner = np.argsort(owner, kind="stable")
    return np.split(by_owner, np.searchsorted(owner[by_owner], np.arange(1, P)))


def runs(positions, step):
    if len(positions) == 0:
        return []
    chains = positions[np.lexsort((positions, positions % step))]
    heads = np.flatnonzero(np.diff(chains, prepend=chains[0] - 2 * step) != step)
    lengths = np.diff(heads, append=len(chains))
    return sorted((int(chains[h]), step, int(n)) for h, n in zip(heads, lengths, strict=True))


def tile_counts(queries, keys, tile):
    def groups(positions, size):
        parts = -(-len(positions) // size)
        low, high = np.full(parts * size, 1 << 60), np.full(parts * size, -1)
        low[: len(positions)] = high[: len(positions)] = positions
        return low.reshape(parts, size).min(1), high.reshape(parts, size).max(1)

    (q_low, q_high), (k_low, k_high) = groups(queries, tile[0]), groups(keys, tile[1])
    skipped = np.less.outer(q_high, k_low).sum()
    full = np.greater_equal.outer(q_low, k_high).sum()
    return np.array([full, len(q_low) * len(k_low) - full - skipped, skipped])


def imbalance(positions, tile):
    P, S = len(positions), sum(map(len, positions))
    work = np.array([[tile_counts(q, k, tile)[:2].sum() for k in positions] for q in positions])
    steps = [work[np.arange(P), (np.arange(P) - t) % P].max() for t in range(P)]
    return np.float64(sum(steps) * tile[0] * tile[1] * 2 * P / (S * S + S))


def pack(lengths, P):
    lengths = np.asarray(lengths)
    document = np.repeat(np.arange(len(lengths)), lengths)
    offset = np.arange(lengths.sum()) - (np.cumsum(lengths) - lengths)[document]
    piece = ((offset + 1) * 2 * P - 1) // lengths[document]
    place = np.argsort(np.argsort(lengths, kind="stable"), kind="stable")
    owner = (np.minimum(piece, 2 * P - 1 - piece) + place[document]) % P
    return [np.flatnonzero(owner == rank) for rank in range(P)]
