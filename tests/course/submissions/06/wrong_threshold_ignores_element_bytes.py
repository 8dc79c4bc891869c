# expects: check=06.threshold:elements misconception=ignores_element_bytes
"""c = F/B, whatever the dtype."""

def least_tokens(flops_per_s, rate, unit, directions, *, element_bytes=2, group=1, causal=False):
    bytes_per_s = rate * 1e9 / directions / (8 if unit == "Gbit/s" else 1)
    return flops_per_s / bytes_per_s / group * (2 if causal else 1)
