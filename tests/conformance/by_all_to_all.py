"""The plain ring whose hops are all-to-alls with split sizes: all of a block to the next rank, nothing to any other."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ringlab import plain_ring
from ringlab.conformance.plain_distributed import Neighbours, Transfer
from ringlab.conformance.target import Target


class ByAllToAll(Neighbours):
    """A shift in the words of a collective."""

    def post(self, *tensors: Tensor, length: int, tag: str) -> Transfer:
        """Send to the next rank and receive from the previous one."""
        sends = [x.contiguous() for x in tensors]
        buffers = tuple(x.new_empty((*x.shape[:2], length, x.shape[3])) for x in tensors)
        works = []
        for x, buffer in zip(sends, buffers, strict=True):
            given, taken = [0] * self.world_size, [0] * self.world_size
            given[(self.rank + 1) % self.world_size] = x.numel()
            taken[(self.rank - 1) % self.world_size] = buffer.numel()
            works.append(dist.all_to_all_single(buffer.view(-1), x.view(-1), taken, given, async_op=True))
        return Transfer([work for work in works if work is not None], sends, buffers)


def ring(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, positions: Any) -> Any:
    """A right ring."""
    return plain_ring.attend(ByAllToAll(), q, k, v, causal=causal, positions=positions)  # type: ignore[arg-type]


attend = Target(ring, over="torch.distributed", layouts=("contiguous",))
