# expects: check=09.delta:rows misconception=takes_the_mean
"""A mean over D."""


def row_delta(dout, out):
    return (dout.to(out.dtype) * out).mean(-1)
