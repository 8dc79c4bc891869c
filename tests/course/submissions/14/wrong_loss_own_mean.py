# expects: check=14.loss:values misconception=own_mean

from torch.nn import functional as F


def loss_share(ring, logits, labels):
    total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total / (labels != -100).sum()
