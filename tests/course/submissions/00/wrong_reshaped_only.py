# expects: check=00.axes:one-sequence misconception=reshaped_only
def split_heads(x, heads):
    B, S, width = x.shape
    return x.reshape(B, heads, S, width // heads)
