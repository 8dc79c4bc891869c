# expects: check=10.error:not_finite misconception=drops_what_is_not_finite
import torch


def relative_error(x, truth):
    good = torch.isfinite(x) & torch.isfinite(truth)
    x, truth = x[good].double(), truth[good]
    return float((x - truth).norm() / truth.norm())
