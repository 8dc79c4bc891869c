# expects: check=03.backward:values misconception=calls_autograd
import torch


def tiled_backward(dout, q, k, v, out, lse, *, causal, scale, tile):
    dtype = torch.promote_types(q.dtype, torch.float32)
    loss = (dout.to(dtype) * out).sum()
    return torch.autograd.grad(loss, [q, k, v])
