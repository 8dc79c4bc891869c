# expects: check=07.relation:equal misconception=by_start_only
"""Who begins later lies behind."""

def tiles_between(q_run, k_run):
    (q_start, _, n_q), (k_start, _, n_k) = q_run, k_run
    if q_start < k_start:
        return []
    if q_start > k_start:
        return [(0, n_q, 0, n_k, False)]
    n = min(n_q, n_k)
    return [(0, n, 0, n, True)] + ([(n, n_q, 0, n_k, False)] if n_q > n else [])
