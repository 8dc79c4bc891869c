# expects: check=10.error:worked misconception=entry_by_entry
def relative_error(x, truth):
    return ((x.double() - truth).abs() / truth.abs()).max().item()
