# expects: check=06.threshold:causal misconception=causal_makes_it_easier
"""Less work, so fewer tokens."""

def least_tokens(flops_per_s, rate, unit, directions, *, element_bytes=2, group=1, causal=False):
    bytes_per_s = rate * 1e9 / directions / (8 if unit == "Gbit/s" else 1)
    tokens = element_bytes * flops_per_s / (2 * bytes_per_s * group)
    return tokens / 2 if causal else tokens
