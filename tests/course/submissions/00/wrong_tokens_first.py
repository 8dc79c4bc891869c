# expects: check=00.axes:one-sequence misconception=tokens_first
def split_heads(x, heads):
    B, S, width = x.shape
    return x.reshape(B, S, heads, width // heads)
