# expects: check=06.table:counts misconception=linear_whole_sequence
"""The linear layers of all tokens."""


def max_speedup(model, ranks, tokens, attention_weight=1.0):
    c, d, layers = tokens / ranks, model["d_model"], model["layers"]
    weights = layers * (4 * d * d + model["ffn_matrices"] * d * model["d_ff"]) + d * model["vocabulary"]
    linear = 2 * tokens * weights
    block = attention_weight * 4 * d * c**2 * layers
    return (linear + block * (ranks - 0.5)) / (linear + block * ranks / 2)
