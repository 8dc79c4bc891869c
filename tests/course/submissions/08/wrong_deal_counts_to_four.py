# expects: check=08.deal:any misconception=counts_to_four
"""Four turns are written out, as in the examples."""

import numpy as np


def deal(S, P, chunk, folded=False):
    shares = [[] for _ in range(P)]
    for turn in range(4):
        order = range(P - 1, -1, -1) if folded and turn % 2 else range(P)
        for place, rank in enumerate(order):
            begin = (turn * P + place) * chunk
            shares[rank].extend(range(min(S, begin), min(S, begin + chunk)))
    return [np.array(share, dtype=np.int64) for share in shares]
