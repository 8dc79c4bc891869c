# expects: check=07.relation:ragged misconception=drops_the_rest
"""The triangle is all there is."""

def tiles_between(q_run, k_run):
    (q_start, step, n_q), (k_start, _, n_k) = q_run, k_run
    ahead = (q_start - k_start) // step
    if ahead <= -n_q:
        return []
    if ahead >= n_k - 1:
        return [(0, n_q, 0, n_k, False)]
    first, last = max(0, -ahead), min(n_q, n_k - ahead)
    return [(first, last, first + ahead, last + ahead, True)]
