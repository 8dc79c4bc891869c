# expects: check=07.makespan:free misconception=busiest_rank_only
"""Who has most work is done last."""

import numpy as np


def who_waits(seconds, hop):
    total = seconds.sum(axis=1).max()
    return total, total - seconds.sum(axis=1)
