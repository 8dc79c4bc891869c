# expects: check=14.loss:values misconception=mean_of_own_means

from torch.nn import functional as F


def loss_share(ring, logits, labels):
    mean = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)
    return mean / ring.world_size
