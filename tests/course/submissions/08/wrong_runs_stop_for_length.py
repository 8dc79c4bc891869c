# expects: check=08.runs:stretches misconception=stop_for_length
"""(start, step, stop)."""


def runs(positions, step):
    owned = set(positions.tolist())
    found = []
    for start in sorted(p for p in owned if p - step not in owned):
        stop = start + step
        while stop in owned:
            stop += step
        found.append((start, step, stop))
    return found
