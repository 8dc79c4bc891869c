# expects: check=07.work:memory misconception=builds_masks
"""Builds the mask of two shards and adds it up."""

import numpy as np


def triangle(n):
    return n * (n + 1) // 2 if n > 0 else 0


def pairs(q, k):
    (q_start, step, n_q), (k_start, _, n_k) = q, k
    ahead = (q_start - k_start) // step

    def upto(row):
        return triangle(row) - triangle(row - n_k)

    return upto(n_q + ahead) - upto(ahead)


def positions(own):
    return np.concatenate([np.zeros(0, np.int64), *(start + step * np.arange(n) for start, step, n in own)])


def work_per_step(runs):
    P = len(runs)
    table = np.zeros((P, P), dtype=np.int64)
    for rank in range(P):
        for step in range(P):
            origin = (rank - step) % P
            table[rank, step] = int((positions(runs[rank])[:, None] >= positions(runs[origin])).sum())
    return table
