# expects: check=11.order:one_way misconception=posts_both_at_once
import torch


def send(ring, x, to):
    ring.comm.exchange(send=(x,), to=to, tag="x").wait()


def receive(ring, like, source):
    return ring.comm.exchange(receive=(torch.empty_like(like),), source=source, tag="x").wait()[0]


def blocking_shift(ring, x):
    return ring.shift(x)
