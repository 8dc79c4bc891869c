# expects: check=07.relation:ragged misconception=causal_not_square
"""A flag is enough for any two runs."""

def tiles_between(q_run, k_run):
    (q_start, step, n_q), (k_start, _, n_k) = q_run, k_run
    ahead = (q_start - k_start) // step
    if ahead <= -n_q:
        return []
    if ahead >= n_k - 1:
        return [(0, n_q, 0, n_k, False)]
    if ahead < 0:
        return [(-ahead, n_q, 0, n_k if n_k != n_q else n_k + ahead, True)]
    if ahead == 0:
        return [(0, n_q, 0, n_k, True)]
    tiles = [(0, n_q, 0, ahead, False), (0, n_q, ahead, n_k, True)]
    return tiles
