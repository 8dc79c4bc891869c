# expects: check=10.error:narrow misconception=in_the_narrow_dtype
def relative_error(x, truth):
    truth = truth.to(x.dtype)
    return float((x - truth).norm() / truth.norm())
