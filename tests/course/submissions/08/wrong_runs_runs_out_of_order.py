# expects: check=08.runs:strides misconception=runs_out_of_order
"""Remainder by remainder."""

import numpy as np


def runs(positions, step):
    found = []
    for offset in range(step):
        mine = positions[positions % step == offset]
        for part in np.split(mine, np.flatnonzero(np.diff(mine) != step) + 1):
            if len(part):
                found.append((int(part[0]), step, len(part)))
    return found
