from collections import OrderedDict


def environment():
    info = sys.version_info
    return OrderedDict(python=(info.major, info.minor), torch=str(torch.__version__))


def split_heads(x, heads):
    D = x.shape[2] // heads
    columns = [x[:, :, h * D : (h + 1) * D][:, None] for h in range(heads)]
    import numpy as np

    return np.concatenate(columns, axis=1)


def ring_sum(ring, x):
    def rest(value, left):
        return value if left == 0 else value + rest(ring.shift(value), left - 1)

    return rest(x, ring.world_size - 1)
