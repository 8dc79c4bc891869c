# expects: check=07.relation:few misconception=empty_tiles
"""Always three tiles, whatever is in them."""

def tiles_between(q_run, k_run):
    (q_start, step, n_q), (k_start, _, n_k) = q_run, k_run
    ahead = (q_start - k_start) // step
    if ahead <= -n_q:
        return []
    if ahead >= n_k - 1:
        return [(0, n_q, 0, n_k, False)]
    first, last = max(0, -ahead), min(n_q, n_k - ahead)
    tiles = [(first, last, first + ahead, last + ahead, True)]
    return [*tiles, (first, last, 0, max(0, ahead), False), (last, n_q, 0, n_k, False)]
