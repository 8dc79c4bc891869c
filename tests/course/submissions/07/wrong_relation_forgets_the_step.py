# expects: check=07.relation:equal misconception=forgets_the_step
"""Counts tokens for rows."""

def tiles_between(q_run, k_run):
    (q_start, step, n_q), (k_start, _, n_k) = q_run, k_run
    ahead = q_start - k_start
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
