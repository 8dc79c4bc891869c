# expects: check=06.table:counts misconception=only_attention
"""The linear layers cancel, do they not?"""

def max_speedup(model, ranks, tokens, attention_weight=1.0):
    c, d, layers = tokens / ranks, model["d_model"], model["layers"]
    weights = layers * (4 * d * d + model["ffn_matrices"] * d * model["d_ff"]) + d * model["vocabulary"]
    linear = 2 * c * weights
    block = attention_weight * 4 * d * c**2 * layers
    return block * (ranks - 0.5) / (block * ranks / 2)
