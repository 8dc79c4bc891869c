# expects: check=07.work:shuffled misconception=expects_sorted_runs
"""Two shards lie apart if their ends do."""

import numpy as np


def triangle(n):
    return n * (n + 1) // 2 if n > 0 else 0


def pairs(q, k):
    (q_start, step, n_q), (k_start, _, n_k) = q, k
    ahead = (q_start - k_start) // step

    def upto(row):
        return triangle(row) - triangle(row - n_k)

    return upto(n_q + ahead) - upto(ahead)


def ends(run):
    return run[0] + run[1] * (run[2] - 1)


def work_per_step(runs):
    P = len(runs)
    table = np.zeros((P, P), dtype=np.int64)
    for rank in range(P):
        for step in range(P):
            origin = (rank - step) % P
            if not runs[rank] or not runs[origin]:
                continue
            first, last = runs[rank][0][0], ends(runs[rank][-1])
            mine, theirs = (sum(n for _, _, n in runs[r]) for r in (rank, origin))
            if last < runs[origin][0][0]:
                continue
            if first >= ends(runs[origin][-1]):
                table[rank, step] = mine * theirs
                continue
            table[rank, step] = sum(pairs(q, k) for q in runs[rank] for k in runs[origin])
    return table
