# expects: check=14.loss:uneven misconception=nan_without_labels

from torch.nn import functional as F


def loss_share(ring, logits, labels):
    mine = (labels != -100).sum()
    mean = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)
    return mean * mine / ring.all_reduce(mine)
