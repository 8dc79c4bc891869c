# expects: check=11.order:values misconception=swaps_with_a_partner
import torch


def send(ring, x, to):
    ring.comm.exchange(send=(x,), to=to, tag="x").wait()


def receive(ring, like, source):
    return ring.comm.exchange(receive=(torch.empty_like(like),), source=source, tag="x").wait()[0]


def blocking_shift(ring, x):
    partner = ring.rank ^ 1
    if partner >= ring.world_size:
        return x.clone()
    if ring.rank % 2 == 0:
        send(ring, x, partner)
        return receive(ring, x, partner)
    arrived = receive(ring, x, partner)
    send(ring, x, partner)
    return arrived
