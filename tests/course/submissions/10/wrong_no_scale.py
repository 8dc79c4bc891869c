# expects: check=10.error:scale misconception=no_scale
def relative_error(x, truth):
    return (x.double() - truth).norm().item()
