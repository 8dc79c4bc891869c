# expects: check=07.relation:equal misconception=always_causal
"""Runs of queries and keys make triangles."""

def tiles_between(q_run, k_run):
    n_q, n_k = q_run[2], k_run[2]
    n = min(n_q, n_k)
    tiles = [(0, n, 0, n, True)]
    return tiles + [(n, n_q, 0, n_k, False)] if n_q > n else tiles
