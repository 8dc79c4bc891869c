"""Names the relation of two runs first; counts by the tiles; loops in plain Python; computes in float64."""


def relation(q_run, k_run):
    (q_start, step, rows), (k_start, _, keys) = q_run, k_run
    shift = (q_start - k_start) // step
    if shift + rows <= 0:
        return "skip", shift
    if shift >= keys - 1:
        return "full", shift
    return "causal" if shift >= 0 else "shifted", shift


def tiles_between(q_run, k_run):
    name, shift = relation(q_run, k_run)
    rows, keys = q_run[2], k_run[2]
    if name == "skip":
        return []
    if name == "full":
        return [(0, rows, 0, keys, 0)]
    top, left = (0, shift) if name == "causal" else (-shift, 0)
    side = min(rows - top, keys - left)
    candidates = [
        (top, top + side, 0, left, False),
        (top, top + side, left, left + side, True),
        (top + side, rows, 0, keys, False),
    ]
    return [tile for tile in candidates if tile[1] > tile[0] and tile[3] > tile[2]]


def work_per_step(runs):
    P = len(runs)
    table = []
    for rank in range(P):
        table.append([0] * P)
        for origin in range(P):
            count = 0
            for q in runs[rank]:
                for k in runs[origin]:
                    for q0, q1, k0, k1, causal in tiles_between(q, k):
                        count += sum_to(q1 - q0) if causal else (q1 - q0) * (k1 - k0)
            table[rank][(rank - origin) % P] = count
    return np.array(table, dtype=np.int64)


def sum_to(n):
    return n * (n + 1) // 2


def attend(q, k, v, causal):
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return Partial((scores.softmax(-1) @ v).float(), scores.logsumexp(-1).float())


def starts(runs):
    return [0, *np.cumsum([length for _, _, length in runs]).tolist()]


def ring_causal(ring, q, k, v, runs):
    state = Partial.identity(q)
    for step in range(ring.world_size):
        here = runs[ring.origin(step)]
        for row, q_run in zip(starts(runs[ring.rank]), runs[ring.rank]):
            for key, k_run in zip(starts(here), here):
                for q0, q1, k0, k1, causal in tiles_between(q_run, k_run):
                    block = [x[..., key + k0 : key + k1, :] for x in (k, v)]
                    rows = slice(row + q0, row + q1)
                    merge_into(state, rows, attend(q[..., rows, :], *block, causal))
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v, length=starts(runs[ring.origin(step + 1)])[-1])
    return state


def who_waits(seconds, hop):
    P = len(seconds)
    begin = [0.0] * P
    end = [0.0] * P
    for step in range(P):
        end = [begin[rank] + seconds[rank][step] for rank in range(P)]
        over = [max(begin[rank - 1], begin[rank], begin[(rank + 1) % P]) + hop for rank in range(P)]
        begin = [max(pair) for pair in zip(end, over)]
    makespan = float(max(end))
    return makespan, np.array([makespan - float(np.sum(row)) for row in seconds])
