# expects: check=07.work:cut misconception=only_four_kinds
"""A triangle of as many rows as the queries."""

import numpy as np


def pairs(q, k):
    (q_start, step, n_q), (k_start, _, n_k) = q, k
    if q_start + step * (n_q - 1) < k_start:
        return 0
    if q_start >= k_start + step * (n_k - 1):
        return n_q * n_k
    return n_q * (n_q + 1) // 2 if q_start >= k_start else n_q * (n_q - 1) // 2


def work_per_step(runs):
    P = len(runs)
    table = np.zeros((P, P), dtype=np.int64)
    for rank in range(P):
        for step in range(P):
            origin = (rank - step) % P
            table[rank, step] = sum(pairs(q, k) for q in runs[rank] for k in runs[origin])
    return table
