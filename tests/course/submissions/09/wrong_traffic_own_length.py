# expects: check=09.traffic:ragged misconception=own_length
"""Every block is as long as mine."""


def bytes_sent(lengths, rank, B, K, D, itemsize):
    P = len(lengths)
    if P == 1:
        return 0, 0
    token = 2 * B * K * D
    blocks = token * itemsize * sum(lengths[rank] for _ in range(P - 1))
    return blocks, blocks + token * max(4, itemsize) * P * lengths[rank]
