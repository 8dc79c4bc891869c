"""Posts first, takes its own block for one triangle where positions ascend, joins tiles that touch."""


def work_per_step(runs):
    P = len(runs)
    table = np.zeros((P, P), np.int64)
    for rank, step in np.ndindex(P, P):
        for q in runs[rank]:
            for k in runs[(rank - step) % P]:
                for q0, q1, k0, k1, causal in tiles_between(q, k):
                    rows = q1 - q0
                    table[rank, step] += rows * (rows + 1) // 2 if causal else rows * (k1 - k0)
    return table


def tiles_between(q_run, k_run):
    ahead, rows, keys = (q_run[0] - k_run[0]) // q_run[1], q_run[2], k_run[2]
    if ahead <= -rows:
        return []
    if ahead + 1 >= keys:
        return [[0, rows, 0, keys, False]]
    if ahead < 0:  # the first rows see nothing
        later = (q_run[0] - ahead * q_run[1], q_run[1], rows + ahead)
        return [[q0 - ahead, q1 - ahead, k0, k1, causal] for q0, q1, k0, k1, causal in tiles_between(later, k_run)]
    if ahead > 0:  # the first keys are seen by all
        later = (k_run[0] + ahead * k_run[1], k_run[1], keys - ahead)
        beside = [[q0, q1, k0 + ahead, k1 + ahead, causal] for q0, q1, k0, k1, causal in tiles_between(q_run, later)]
        last = min(rows, keys - ahead)
        after = [[last, rows, 0, keys, False]] if last < rows else []
        return [[0, last, 0, ahead, False], beside[0], *after]
    square = [[0, min(rows, keys), 0, min(rows, keys), True]]
    return square + ([[keys, rows, 0, keys, False]] if rows > keys else [])


def ring_causal(ring, q, k, v, runs):
    out = torch.zeros(q.shape, dtype=torch.float32)
    lse = torch.full(q.shape[:-1], -math.inf)
    mine = runs[ring.rank]
    for step in range(ring.world_size):
        work = None
        if step < ring.world_size - 1:
            due = runs[ring.origin(step + 1)]
            work = ring.post(k, v, length=sum(n for _, _, n in due))
        for rows, keys, causal in visible(mine, runs[ring.origin(step)], step == 0):
            add(out, lse, rows, *attend(q[..., rows, :], k[..., keys, :], v[..., keys, :], causal))
        if work is not None:
            k, v = work.wait()
    return out, lse


def visible(mine, theirs, own):
    """Slices of rows and keys, and whether they are a triangle."""
    ends = [(start, start + step * (n - 1)) for start, step, n in mine]
    if own and mine and all(a[1] < b[0] for a, b in zip(ends, ends[1:], strict=False)):
        n = sum(n for _, _, n in mine)
        return [(slice(0, n), slice(0, n), True)]
    tiles, row = [], 0
    for q in mine:
        key, touching = 0, None
        for k in theirs:
            for q0, q1, k0, k1, causal in tiles_between(q, k):
                rows, keys = slice(row + q0, row + q1), slice(key + k0, key + k1)
                if not causal and touching == (rows.start, rows.stop, keys.start):
                    tiles[-1] = (rows, slice(tiles[-1][1].start, keys.stop), False)
                else:
                    tiles.append((rows, keys, causal))
                touching = None if causal else (rows.start, rows.stop, keys.stop)
            key += k[2]
        row += q[2]
    return tiles


def attend(q, k, v, causal):
    group = q.shape[1] // k.shape[1]
    q = q.unflatten(1, (-1, group))
    scores = torch.einsum("bkgid,bkjd->bkgij", q, k) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores + torch.full(scores.shape[-2:], -math.inf).triu(1)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    part = torch.einsum("bkgij,bkjd->bkgid", weights / total, v).flatten(1, 2)
    return part, (top + torch.log(total))[..., 0].flatten(1, 2)


def add(out, lse, rows, part, part_lse):
    both = torch.logaddexp(lse[..., rows], part_lse)
    out[..., rows, :] *= torch.exp(lse[..., rows] - both)[..., None]
    out[..., rows, :] += torch.exp(part_lse - both)[..., None] * part
    lse[..., rows] = both


def who_waits(seconds, hop):
    begin = np.zeros(len(seconds))
    for now in np.asarray(seconds).T[:-1]:
        posted = np.stack([np.roll(begin, places) for places in (-1, 0, 1)]).max(axis=0)
        begin = np.maximum(begin + now, posted + hop)
    makespan = float((begin + seconds[:, -1]).max())
    return makespan, makespan - np.sum(seconds, axis=1)
