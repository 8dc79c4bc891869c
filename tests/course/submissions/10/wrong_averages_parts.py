# expects: check=10.fold:worked misconception=averages_parts
import math

import torch


def fold(out, lse, outs, lses):
    every = torch.cat([lse[None], lses])
    return torch.cat([out[None], outs.float()]).mean(0), torch.logsumexp(every, 0)
