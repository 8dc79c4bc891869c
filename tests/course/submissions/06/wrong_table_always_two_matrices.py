# expects: check=06.table:other_models misconception=always_two_matrices
"""Two feed-forward matrices, as in the paper."""

def max_speedup(model, ranks, tokens, attention_weight=1.0):
    c, d, layers = tokens / ranks, model["d_model"], model["layers"]
    weights = layers * (4 * d * d + 2 * d * model["d_ff"]) + d * model["vocabulary"]
    linear = 2 * c * weights
    block = attention_weight * 4 * d * c**2 * layers
    return (linear + block * (ranks - 0.5)) / (linear + block * ranks / 2)
