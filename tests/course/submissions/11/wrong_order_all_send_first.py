# expects: check=11.order:values misconception=all_send_first
import torch


def send(ring, x, to):
    ring.comm.exchange(send=(x,), to=to, tag="x").wait()


def receive(ring, like, source):
    return ring.comm.exchange(receive=(torch.empty_like(like),), source=source, tag="x").wait()[0]


def blocking_shift(ring, x):
    if ring.world_size == 1:
        return x.clone()
    send(ring, x, ring.next)
    return receive(ring, x, ring.previous)
