# expects: check=07.relation:equal misconception=sees_everything
"""No mask between runs."""

def tiles_between(q_run, k_run):
    return [(0, q_run[2], 0, k_run[2], False)]
