# expects: check=02.merge:state misconception=state_forced_to_float32
import torch


def merge(outs, lses):
    lse = torch.logsumexp(lses, 0)
    safe = torch.where(lse == float("-inf"), 0.0, lse)
    weights = torch.exp(lses - safe).unsqueeze(-1)
    return (outs * weights).sum(0).float(), lse.float()
