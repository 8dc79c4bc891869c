# expects: check=09.delta:rows misconception=only_dout
"""O forgotten."""


def row_delta(dout, out):
    return (dout.to(out.dtype)).sum(-1)
