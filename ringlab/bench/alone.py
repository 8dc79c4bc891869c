"""One rank of a ring with nobody else there: for timing its kernels and weighing its memory."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from ringlab.comm.protocol import Comm, Work


class Alone(Comm):
    """Rank `rank` of `world_size`, whose neighbours hold what it holds itself.

    What it sends is copied into what it receives, as far as that goes: the sizes, the number and the
    lifetimes of its tensors are those of a real rank, the results are not unless it is the only one.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

    def exchange(
        self,
        *,
        send: Sequence[Tensor] = (),
        to: int | None = None,
        receive: Sequence[Tensor] = (),
        source: int | None = None,
        tag: str = "",
    ) -> Work:
        for sent, taken in zip(send, receive, strict=True):
            count = min(sent.numel(), taken.numel())
            taken.detach().flatten()[:count].copy_(sent.detach().flatten()[:count])
        return _Done(tuple(receive))

    def now(self) -> float:
        return time.perf_counter()


class _Done(Work):
    def __init__(self, buffers: tuple[Tensor, ...]) -> None:
        self.buffers = buffers

    def wait(self) -> tuple[Tensor, ...]:
        return self.buffers
