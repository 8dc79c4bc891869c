# expects: check=08.runs:stretches misconception=fills_the_holes
"""From first to last of every remainder."""


def runs(positions, step):
    found = []
    for offset in range(step):
        mine = positions[positions % step == offset]
        if len(mine):
            found.append((int(mine[0]), step, int((mine[-1] - mine[0]) // step) + 1))
    return sorted(found)
