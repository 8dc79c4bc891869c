# expects: check=09.delta:bfloat16 misconception=delta_in_bfloat16
"""In the dtype of dout."""


def row_delta(dout, out):
    return (dout * out.to(dout.dtype)).sum(-1)
