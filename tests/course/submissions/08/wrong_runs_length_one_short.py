# expects: check=08.runs:stretches misconception=length_one_short
"""Steps are counted, not tokens."""


def runs(positions, step):
    owned = set(positions.tolist())
    found = []
    for start in sorted(p for p in owned if p - step not in owned):
        last = start
        while last + step in owned:
            last += step
        found.append((start, step, (last - start) // step))
    return found
