# expects: check=06.threshold:mixed misconception=one_condition_at_a_time
"""Shared heads or a causal mask, never both."""

def least_tokens(flops_per_s, rate, unit, directions, *, element_bytes=2, group=1, causal=False):
    bytes_per_s = rate * 1e9 / directions / (8 if unit == "Gbit/s" else 1)
    tokens = element_bytes * flops_per_s / (2 * bytes_per_s)
    if causal:
        return 2 * tokens
    return tokens / group
