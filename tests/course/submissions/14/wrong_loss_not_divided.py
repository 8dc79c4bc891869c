# expects: check=14.loss:values misconception=not_divided

import torch
from torch.nn import functional as F


def loss_share(ring, logits, labels):
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total
