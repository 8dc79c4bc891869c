# expects: check=11.order:alone misconception=sends_to_itself
import torch


def send(ring, x, to):
    ring.comm.exchange(send=(x,), to=to, tag="x").wait()


def receive(ring, like, source):
    return ring.comm.exchange(receive=(torch.empty_like(like),), source=source, tag="x").wait()[0]


def blocking_shift(ring, x):
    if ring.rank % 2 == 0:
        send(ring, x, ring.next)
        return receive(ring, x, ring.previous)
    arrived = receive(ring, x, ring.previous)
    send(ring, x, ring.next)
    return arrived
