# expects: check=08.runs:stretches misconception=one_run_per_token
"""Runs of length one."""


def runs(positions, step):
    return [(int(p), step, 1) for p in positions]
