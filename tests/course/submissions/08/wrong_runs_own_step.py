# expects: check=08.runs:strides misconception=own_step
"""Every run takes the step that fits it."""


def runs(positions, step):
    found, i, items = [], 0, positions.tolist()
    while i < len(items):
        j = i + 1
        own = items[j] - items[i] if j < len(items) else 1
        while j < len(items) and items[j] - items[j - 1] == own:
            j += 1
        found.append((items[i], own, j - i))
        i = j
    return found
