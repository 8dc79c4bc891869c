# expects: check=09.traffic:any misconception=always_four_bytes
"""Float32 for float64 too."""


def bytes_sent(lengths, rank, B, K, D, itemsize):
    P = len(lengths)
    if P == 1:
        return 0, 0
    token = 2 * B * K * D
    blocks = token * itemsize * sum(lengths[(rank - step) % P] for step in range(P - 1))
    return blocks, blocks + token * 4 * sum(lengths)
