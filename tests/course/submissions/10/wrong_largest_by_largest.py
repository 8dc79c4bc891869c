# expects: check=10.error:worked misconception=largest_by_largest
def relative_error(x, truth):
    return ((x.double() - truth).abs().max() / truth.abs().max()).item()
