# expects: check=09.traffic:ragged misconception=counts_what_arrives
"""From rank − 1 on."""


def bytes_sent(lengths, rank, B, K, D, itemsize):
    P = len(lengths)
    if P == 1:
        return 0, 0
    token = 2 * B * K * D
    blocks = token * itemsize * sum(lengths[(rank - step) % P] for step in range(1, P))
    return blocks, blocks + token * max(4, itemsize) * sum(lengths)
