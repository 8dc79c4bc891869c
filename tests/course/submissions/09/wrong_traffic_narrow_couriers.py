# expects: check=09.traffic:equal misconception=narrow_couriers
"""Sums in the dtype of K."""


def bytes_sent(lengths, rank, B, K, D, itemsize):
    P = len(lengths)
    if P == 1:
        return 0, 0
    token = 2 * B * K * D
    blocks = token * itemsize * sum(lengths[(rank - step) % P] for step in range(P - 1))
    return blocks, blocks + token * itemsize * sum(lengths)
