# expects: check=06.threshold:plain misconception=rounds
"""Whole tokens only."""

import math


def least_tokens(flops_per_s, rate, unit, directions, *, element_bytes=2, group=1, causal=False):
    bytes_per_s = rate * 1e9 / directions / (8 if unit == "Gbit/s" else 1)
    return math.ceil(element_bytes / group * (2 if causal else 1) * flops_per_s / (2 * bytes_per_s))
