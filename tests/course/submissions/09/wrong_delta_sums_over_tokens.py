# expects: check=09.delta:rows misconception=sums_over_tokens
"""One number per column."""


def row_delta(dout, out):
    return (dout.to(out.dtype) * out).sum(-2)
