# expects: check=08.deal:ragged misconception=evens_out_the_pieces
"""np.array_split into as many pieces, all shortened a little."""

import numpy as np


def deal(S, P, chunk, folded=False):
    pieces = np.array_split(np.arange(S), max(1, -(-S // chunk)))
    shares = [[] for _ in range(P)]
    for i, piece in enumerate(pieces):
        turn = i % (2 * P)
        shares[min(turn, 2 * P - 1 - turn) if folded else i % P].extend(piece)
    return [np.array(share, dtype=np.int64) for share in shares]
