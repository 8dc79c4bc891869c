# expects: check=07.relation:ragged misconception=only_four_kinds
"""Triangles of the shorter length, and nothing beside them."""


def tiles_between(q_run, k_run):
    (q_start, step, n_q), (k_start, _, n_k) = q_run, k_run
    n = min(n_q, n_k)
    if q_start + step * (n_q - 1) < k_start:
        return []
    if q_start >= k_start + step * (n_k - 1):
        return [(0, n_q, 0, n_k, False)]
    ahead = (q_start - k_start) // step
    if ahead == 0:
        return [(0, n, 0, n, True)]
    if ahead == -1:
        return [(1, n, 0, n - 1, True)]
    return [(0, n_q, 0, n_k, False)] if ahead > 0 else []
