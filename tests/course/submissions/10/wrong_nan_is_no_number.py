# expects: check=10.error:not_finite misconception=nan_is_no_number
def relative_error(x, truth):
    return float((x.double() - truth).norm() / (truth.norm() if truth.any() else 1.0))
