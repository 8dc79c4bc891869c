"""Formulas, tiles, shift, one number per rank."""


def triangle(n):
    return n * (n + 1) // 2 if n > 0 else 0


def pairs(q, k):
    (q_start, step, n_q), (k_start, _, n_k) = q, k
    ahead = (q_start - k_start) // step

    def upto(row):
        return triangle(row) - triangle(row - n_k)

    return upto(n_q + ahead) - upto(ahead)


def work_per_step(runs):
    P = len(runs)
    table = np.zeros((P, P), dtype=np.int64)
    for rank in range(P):
        for step in range(P):
            origin = (rank - step) % P
            table[rank, step] = sum(pairs(q, k) for q in runs[rank] for k in runs[origin])
    return table


def tiles_between(q_run, k_run):
    (q_start, step, n_q), (k_start, _, n_k) = q_run, k_run
    ahead = (q_start - k_start) // step
    if ahead <= -n_q:
        return []
    if ahead >= n_k - 1:
        return [(0, n_q, 0, n_k, False)]
    first, last = max(0, -ahead), min(n_q, n_k - ahead)
    tiles = [(first, last, first + ahead, last + ahead, True)]
    if ahead > 0:
        tiles.append((first, last, 0, ahead, False))
    if last < n_q:
        tiles.append((last, n_q, 0, n_k, False))
    return tiles


def attend(q, k, v, causal):
    if causal and q.shape[-2] != k.shape[-2]:
        raise ValueError("a causal tile is square")
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    return Partial(torch.exp(scores - lse[..., None]) @ v, lse)


def length_of(runs):
    return sum(length for _, _, length in runs)


def ring_causal(ring, q, k, v, runs):
    state = Partial.identity(q)
    for step in range(ring.world_size):
        row = 0
        for q_run in runs[ring.rank]:
            key = 0
            for k_run in runs[ring.origin(step)]:
                for q0, q1, k0, k1, causal in tiles_between(q_run, k_run):
                    rows, keys = slice(row + q0, row + q1), slice(key + k0, key + k1)
                    merge_into(state, rows, attend(q[..., rows, :], k[..., keys, :], v[..., keys, :], causal))
                key += k_run[2]
            row += q_run[2]
        if step < ring.world_size - 1:
            k, v = ring.shift(k, v, length=length_of(runs[ring.origin(step + 1)]))
    return state.out, state.lse
