# expects: check=08.runs:memory misconception=compares_all_pairs
"""An n by n table of who follows whom."""

import numpy as np


def runs(positions, step):
    follows = positions[:, None] + step == positions
    found = []
    for i in np.flatnonzero(~follows.any(0)):
        length, j = 1, i
        while follows[j].any():
            j = int(follows[j].argmax())
            length += 1
        found.append((int(positions[i]), step, length))
    return found
