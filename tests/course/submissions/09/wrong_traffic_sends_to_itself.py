# expects: check=09.traffic:any misconception=sends_to_itself
"""One rank sends its couriers."""


def bytes_sent(lengths, rank, B, K, D, itemsize):
    P = len(lengths)
    token = 2 * B * K * D
    blocks = token * itemsize * sum(lengths[(rank - step) % P] for step in range(P - 1))
    return blocks, blocks + token * max(4, itemsize) * sum(lengths)
