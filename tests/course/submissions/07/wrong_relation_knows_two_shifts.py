# expects: check=07.relation:any_start misconception=knows_two_shifts
"""Skip, full, causal, shifted, and nothing else."""

def tiles_between(q_run, k_run):
    (q_start, step, n_q), (k_start, _, n_k) = q_run, k_run
    ahead = (q_start - k_start) // step
    if ahead < -1 or n_q == 0:
        return []
    if ahead > 0:
        return [(0, n_q, 0, n_k, False)]
    first = -ahead
    last = min(n_q, n_k + first)
    if last <= first:
        return []
    tiles = [(first, last, 0, last - first, True)]
    return tiles + ([(last, n_q, 0, n_k, False)] if last < n_q else [])
