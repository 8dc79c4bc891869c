# expects: check=11.order:forms misconception=receives_another_form
import torch


def send(ring, x, to):
    ring.comm.exchange(send=(x,), to=to, tag="x").wait()


def receive(ring, like, source):
    return ring.comm.exchange(receive=(torch.empty_like(like),), source=source, tag="x").wait()[0]


def blocking_shift(ring, x):
    if ring.world_size == 1:
        return x.clone()
    like = torch.empty(x.shape)
    if ring.rank % 2 == 0:
        send(ring, x, ring.next)
        return receive(ring, like, ring.previous)
    arrived = receive(ring, like, ring.previous)
    send(ring, x, ring.next)
    return arrived
