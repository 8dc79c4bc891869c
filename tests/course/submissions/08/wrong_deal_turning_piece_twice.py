# expects: check=08.deal:folded misconception=turning_piece_twice
"""The partner of r is 2P - 2 - r."""

import numpy as np


def deal(S, P, chunk, folded=False):
    period = 2 * P if folded else P
    shares = []
    for rank in range(P):
        mine = []
        for first in range(0, S, period * chunk):
            for place in (rank, period - 2 - rank) if folded else (rank,):
                begin = first + place * chunk
                mine += range(begin, min(S, begin + chunk))
        shares.append(np.array(mine, dtype=np.int64))
    return shares
