# expects: check=06.threshold:sheet misconception=bits_as_bytes
"""A Gbit/s taken for a GB/s."""

def least_tokens(flops_per_s, rate, unit, directions, *, element_bytes=2, group=1, causal=False):
    bytes_per_s = rate * 1e9 / directions
    return element_bytes / group * (2 if causal else 1) * flops_per_s / (2 * bytes_per_s)
