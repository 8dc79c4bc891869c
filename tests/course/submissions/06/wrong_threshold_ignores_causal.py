# expects: check=06.threshold:causal misconception=ignores_causal
"""Half of the pairs are hidden, and still counted."""

def least_tokens(flops_per_s, rate, unit, directions, *, element_bytes=2, group=1, causal=False):
    bytes_per_s = rate * 1e9 / directions / (8 if unit == "Gbit/s" else 1)
    step_s = 4 / flops_per_s
    hop_s = 2 * element_bytes / group / bytes_per_s
    return hop_s / step_s
