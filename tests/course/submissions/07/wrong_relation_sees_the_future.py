# expects: check=07.relation:equal misconception=sees_the_future
"""Skip and full mixed up."""

def tiles_between(q_run, k_run):
    (q_start, step, n_q), (k_start, _, n_k) = q_run, k_run
    ahead = (q_start - k_start) // step
    if ahead >= n_k:
        return []
    if ahead < 0:
        return [(0, n_q, 0, n_k, False)] if ahead <= -n_q or (k_start - q_start) // step >= n_q - 1 else rows(q_run, k_run)
    return rows(q_run, k_run)


def rows(q_run, k_run):
    (q_start, step, n_q), (k_start, _, n_k) = q_run, k_run
    tiles = []
    for i in range(min(n_q, 1000)):
        first = max(0, -((k_start - q_start - step * i) // step))
        if first < n_k:
            tiles.append((i, i + 1, first, n_k, False))
    return tiles
