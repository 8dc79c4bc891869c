# expects: check=11.order:values misconception=leaves_somebody_waiting
import torch


def send(ring, x, to):
    ring.comm.exchange(send=(x,), to=to, tag="x").wait()


def receive(ring, like, source):
    return ring.comm.exchange(receive=(torch.empty_like(like),), source=source, tag="x").wait()[0]


def blocking_shift(ring, x):
    """A line: the last rank sends to nobody."""
    arrived = x.clone()
    if ring.rank > 0:
        arrived = receive(ring, x, ring.previous)
    if ring.rank < ring.world_size - 1:
        send(ring, x, ring.next)
    elif ring.world_size > 1:
        pass
    return receive(ring, x, ring.previous) if ring.rank == 0 and ring.world_size > 1 else arrived
