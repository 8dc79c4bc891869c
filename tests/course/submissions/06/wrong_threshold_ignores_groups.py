# expects: check=06.threshold:groups misconception=ignores_groups
"""As many K/V heads travel as there are query heads."""

def least_tokens(flops_per_s, rate, unit, directions, *, element_bytes=2, group=1, causal=False):
    bytes_per_s = rate * 1e9 / directions / (8 if unit == "Gbit/s" else 1)
    step_s = 4 * (0.5 if causal else 1) / flops_per_s
    hop_s = 2 * element_bytes / bytes_per_s
    return hop_s / step_s
