# expects: check=10.error:zero misconception=divides_by_entries
def relative_error(x, truth):
    entries = ((x.double() - truth) / truth).abs()
    return entries.max().item() if truth.any() else x.double().norm().item()
