# expects: check=14.loss:bfloat16 misconception=narrow_loss

from torch.nn import functional as F


def loss_share(ring, logits, labels):
    count = ring.all_reduce((labels != -100).sum())
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total / count
