import platform

import numpy as np

answer = {}
answer["python"] = np.array(platform.python_version().split(".")[:2], dtype=int).tolist()
answer["torch"] = torch.version.__version__


def environment():
    return answer


def split_heads(x, heads):
    B, S, HD = x.shape
    y = np.empty((B, heads, S, HD // heads), x.dtype)
    for b in range(B):
        for s in range(S):
            for h in range(heads):
                for d in range(HD // heads):
                    y[b, h, s, d] = x[b, s, h * (HD // heads) + d]
    return y


def ring_sum(ring, x):
    total = x.clone()
    buffer = x
    step = 1
    while step < ring.world_size:
        work = ring.post(buffer)
        (buffer,) = work.wait()
        total.add_(buffer)
        step += 1
    return total
