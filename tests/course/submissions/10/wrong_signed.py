# expects: check=10.error:worked misconception=signed
def relative_error(x, truth):
    difference = x.double() - truth
    return (difference.sum().abs() / truth.sum().abs()).item()
