# expects: check=10.error:scale misconception=largest_without_scale
def relative_error(x, truth):
    return float((x.double() - truth).abs().max())
