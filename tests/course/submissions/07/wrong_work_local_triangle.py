# expects: check=07.work:contiguous misconception=local_triangle
"""Row i of a shard sees keys 0 to i of any block."""

import numpy as np


def triangle(n):
    return n * (n + 1) // 2 if n > 0 else 0


def pairs(q, k):
    (q_start, step, n_q), (k_start, _, n_k) = q, k
    ahead = (q_start - k_start) // step

    def upto(row):
        return triangle(row) - triangle(row - n_k)

    return upto(n_q + ahead) - upto(ahead)


def length(own):
    return sum(n for _, _, n in own)


def triangular(rows, keys):
    return triangle(rows) - triangle(rows - keys)


def work_per_step(runs):
    P = len(runs)
    table = np.zeros((P, P), dtype=np.int64)
    for rank in range(P):
        for step in range(P):
            origin = (rank - step) % P
            table[rank, step] = triangular(length(runs[rank]), length(runs[origin]))
    return table
