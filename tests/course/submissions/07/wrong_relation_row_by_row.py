# expects: check=07.relation:few misconception=row_by_row
"""A tile for every row."""

def tiles_between(q_run, k_run):
    (q_start, step, n_q), (k_start, _, n_k) = q_run, k_run
    ahead = (q_start - k_start) // step
    seen = [min(max(i + ahead + 1, 0), n_k) for i in range(min(n_q, 1000))]
    return [(i, i + 1, 0, n, False) for i, n in enumerate(seen) if n]
