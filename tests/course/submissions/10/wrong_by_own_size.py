# expects: check=10.error:worked misconception=by_own_size
def relative_error(x, truth):
    return ((x.double() - truth).norm() / x.double().norm()).item()
