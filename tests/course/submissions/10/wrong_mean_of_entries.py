# expects: check=10.error:worked misconception=mean_of_entries
def relative_error(x, truth):
    return ((x.double() - truth) / truth).abs().mean().item()
