# expects: check=07.work:ragged misconception=assumes_equal_lengths
"""All ranks own as much as rank 0."""

import numpy as np


def triangle(n):
    return n * (n + 1) // 2 if n > 0 else 0


def pairs(q, k):
    (q_start, step, n_q), (k_start, _, n_k) = q, k
    ahead = (q_start - k_start) // step

    def upto(row):
        return triangle(row) - triangle(row - n_k)

    return upto(n_q + ahead) - upto(ahead)


def work_per_step(runs):
    P = len(runs)
    lengths = [n for _, _, n in runs[0]]
    runs = [[(start, gap, n) for (start, gap, _), n in zip(own, lengths)] for own in runs]
    table = np.zeros((P, P), dtype=np.int64)
    for rank in range(P):
        for step in range(P):
            origin = (rank - step) % P
            table[rank, step] = sum(pairs(q, k) for q in runs[rank] for k in runs[origin])
    return table
