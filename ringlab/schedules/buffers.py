"""Receive buffers for blocks under way, reused once their block was sent on."""

from __future__ import annotations

import math

import torch
from jaxtyping import Shaped
from torch import Tensor

from ringlab.schedules.call import Call


class BlockBuffers:
    """Receive buffers, each large enough for the longest block of the layout."""

    def __init__(self, call: Call) -> None:
        self.lengths, self.longest = call.layout.lengths, call.layout.longest
        self.free: list[tuple[int, tuple[Tensor, ...]]] = []

    def reserve(self, origin: int, *like: Shaped[Tensor, "B _ _ D"]) -> tuple[Tensor, ...]:
        """Return buffers for the block of `origin`, with the batch, heads and head dim of `like`."""
        length = self.lengths[origin]
        if self.free and self.free[-1][0] == length:
            return self.free.pop()[1]  # as it is: most blocks have one length
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
        """Return storages for these shapes: those of free buffers, or new ones for the longest block."""
        sizes = [math.prod(shape) * t.element_size() for shape, t in zip(shapes, like, strict=True)]
        for number, (_, tensors) in enumerate(self.free):
            storages = [tensor.untyped_storage() for tensor in tensors]
            if all(storage.nbytes() >= size for storage, size in zip(storages, sizes, strict=True)):
                del self.free[number]
                return storages
        whole = [(*t.shape[:2], self.longest, t.shape[-1]) for t in like]
        return [t.new_empty(shape).untyped_storage() for t, shape in zip(like, whole, strict=True)]

    def recycle(self, origin: int, tensors: tuple[Shaped[Tensor, "B _ _ D"], ...]) -> None:
        """Take back the buffers of the block of `origin`, which was sent on, for blocks to come."""
        self.free.append((self.lengths[origin], tensors))
