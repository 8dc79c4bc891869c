# expects: check=04.flash:work misconception=computed_by_torch
import torch
import triton
import triton.language as tl


def flash(q, k, v, out, lse, S, block_m, block_n):
    q, k, v = (x[:, :S].float() for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    out[:, :S] = (torch.softmax(scores, -1) @ v).to(out.dtype)
    lse[:, :S] = torch.logsumexp(scores, -1)
    return out, lse
