# expects: check=09.delta:rows misconception=sums_over_heads
"""One number per token and column."""


def row_delta(dout, out):
    return (dout.to(out.dtype) * out).sum(1)
