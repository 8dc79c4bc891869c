# expects: check=08.runs:stretches misconception=forgets_the_last_run
"""A run is emitted when the next begins."""


def runs(positions, step):
    found, start, last = [], None, None
    for p in sorted(positions.tolist(), key=lambda p: (p % step, p)):
        if start is not None and p != last + step:
            found.append((start, step, (last - start) // step + 1))
            start = None
        start = p if start is None else start
        last = p
    return sorted(found)
