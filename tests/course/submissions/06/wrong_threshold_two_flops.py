# expects: check=06.threshold:plain misconception=two_flops
"""One multiply-add, one FLOP."""

def least_tokens(flops_per_s, rate, unit, directions, *, element_bytes=2, group=1, causal=False):
    bytes_per_s = rate * 1e9 / directions / (8 if unit == "Gbit/s" else 1)
    flops = 2 / (2 if causal else 1)
    return 2 * element_bytes / group * flops_per_s / (flops * bytes_per_s)
