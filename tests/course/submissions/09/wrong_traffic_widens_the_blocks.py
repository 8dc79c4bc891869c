# expects: check=09.traffic:equal misconception=widens_the_blocks
"""K and V in float32."""


def bytes_sent(lengths, rank, B, K, D, itemsize):
    P = len(lengths)
    if P == 1:
        return 0, 0
    token = 2 * B * K * D
    blocks = token * max(4, itemsize) * sum(lengths[(rank - step) % P] for step in range(P - 1))
    return blocks, blocks + token * max(4, itemsize) * sum(lengths)
