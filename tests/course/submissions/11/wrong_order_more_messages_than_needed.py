# expects: check=11.order:one_way misconception=more_messages_than_needed
import torch


def send(ring, x, to):
    ring.comm.exchange(send=(x,), to=to, tag="x").wait()


def receive(ring, like, source):
    return ring.comm.exchange(receive=(torch.empty_like(like),), source=source, tag="x").wait()[0]


def blocking_shift(ring, x):
    return ring.all_gather(x)[ring.previous]
