# expects: check=08.runs:strides misconception=looks_at_neighbours_only
"""Joins a token to the one before it in the list."""


def runs(positions, step):
    found = []
    for p in positions.tolist():
        if found and found[-1][0] + found[-1][2] * step == p:
            start, _, length = found[-1]
            found[-1] = (start, step, length + 1)
        else:
            found.append((p, step, 1))
    return found
