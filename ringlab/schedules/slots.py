"""Memory for blocks on their way, used again and again."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringlab.schedules.call import Call


class Slots:
    """Receive buffers, each large enough for the longest block, used again once they were sent on."""

    def __init__(self, call: Call) -> None:
        self.lengths, self.longest = call.layout.lengths, call.layout.longest
        self.free: list[tuple[int, tuple[Tensor, ...]]] = []

    def take(self, origin: int, *like: Tensor) -> tuple[Tensor, ...]:
        """Return buffers for the block of `origin`, of the batch, heads and head dim of `like`."""
        length = self.lengths[origin]
        if self.free and self.free[-1][0] == length:
            return self.free.pop()[1]  # as it was: most blocks are of one length
        shapes = [(*t.shape[:2], length, t.shape[-1]) for t in like]
        if not self.free and length == self.longest:
            return tuple(t.new_empty(shape) for t, shape in zip(like, shapes, strict=True))
        storages = self._large_enough(shapes, like)
        return tuple(
            t.new_empty(0).set_(storage, 0, shape)  # type: ignore[call-overload]
            for t, storage, shape in zip(like, storages, shapes, strict=True)
        )

    def _large_enough(
        self, shapes: list[tuple[int, ...]], like: tuple[Tensor, ...]
    ) -> list[torch.UntypedStorage]:
        """Storages for these shapes: those of a slot that is free, or new ones for the longest block."""
        sizes = [math.prod(shape) * t.element_size() for shape, t in zip(shapes, like, strict=True)]
        for number, (_, slot) in enumerate(self.free):
            storages = [tensor.untyped_storage() for tensor in slot]
            if all(storage.nbytes() >= size for storage, size in zip(storages, sizes, strict=True)):
                del self.free[number]
                return storages
        whole = [(*t.shape[:2], self.longest, t.shape[-1]) for t in like]
        return [t.new_empty(shape).untyped_storage() for t, shape in zip(like, whole, strict=True)]

    def recycle(self, origin: int, tensors: tuple[Tensor, ...]) -> None:
        """Take back the buffers of the block of `origin`, which is on its way, for blocks to come."""
        self.free.append((self.lengths[origin], tensors))
