"""Counts with searchsorted, finds the triangle by looking for rows, computes on flattened lists of tiles."""

from ringlab.merge import merge


def positions(runs):
    return np.concatenate([np.zeros(0, np.int64), *(start + step * np.arange(n, dtype=np.int64) for start, step, n in runs)])


def work_per_step(runs):
    P = len(runs)
    rows = [positions(own) for own in runs]
    keys = [np.sort(own) for own in rows]
    table = [[np.searchsorted(keys[(r - t) % P], rows[r], side="right").sum() for t in range(P)] for r in range(P)]
    return torch.tensor(np.array(table))


def tiles_between(q_run, k_run):
    (q_start, step, n_q), (k_start, _, n_k) = q_run, k_run

    def seen_by(row):  # how many keys
        return min(n_k, max(0, math.floor((q_start + step * row - k_start) / step) + 1))

    lead = seen_by(0)
    tiles = []
    if lead > 1 or lead == n_k:
        tiles.append((0, n_q, 0, lead - (lead < n_k), False))
    if lead == n_k:
        return tuple(tiles)
    blind = 0 if lead else (k_start - q_start + step - 1) // step
    if blind >= n_q:
        return ()
    known = max(0, lead - 1)
    side = min(n_q - blind, n_k - known)
    tiles = [(0, blind + side, 0, known, False)] if known else []
    tiles.append((blind, blind + side, known, known + side, True))
    if blind + side < n_q:
        tiles.append((blind + side, n_q, 0, n_k, False))
    return tuple(tiles)


def ring_causal(ring, q, k, v, runs):
    parts = [Partial.identity(row) for row in q.split(1, dim=-2)]
    group = q.shape[1] // k.shape[1]
    for step in range(ring.world_size):
        for row, key, tile in placed(runs[ring.rank], runs[ring.origin(step)]):
            q0, q1, k0, k1, causal = tile
            for i in range(q0, q1):
                stop = k0 + i - q0 + 1 if causal else k1
                keys, values = (x[..., key + k0 : key + stop, :].repeat_interleave(group, dim=1) for x in (k, v))
                parts[row + i] = merge(parts[row + i], one_row(q[..., row + i : row + i + 1, :], keys, values))
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v, length=len(positions(runs[ring.origin(step + 1)])))
    if not parts:
        return Partial.identity(q).out, Partial.identity(q).lse
    return torch.cat([part.out for part in parts], dim=-2), torch.cat([part.lse for part in parts], dim=-1)


def placed(q_runs, k_runs):
    row = 0
    for q_run in q_runs:
        key = 0
        for k_run in k_runs:
            for tile in tiles_between(q_run, k_run):
                yield row, key, tile
            key += k_run[2]
        row += q_run[2]


def one_row(q, k, v):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return Partial(scores.softmax(-1) @ v, scores.logsumexp(-1))


def who_waits(seconds, hop):
    P = len(seconds)
    begin = {(rank, 0): 0.0 for rank in range(P)}
    end = {}
    for step in range(P):
        for rank in range(P):
            if step:
                around = ((rank - 1) % P, rank, (rank + 1) % P)
                begin[rank, step] = max(end[rank, step - 1], hop + max(begin[r, step - 1] for r in around))
            end[rank, step] = begin[rank, step] + float(seconds[rank, step])
    makespan = max(end.values())
    return makespan, np.array([makespan - float(sum(seconds[rank])) for rank in range(P)])
