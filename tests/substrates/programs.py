"""Programs that tests run on every transport; real processes import them from here."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringlab.comm.ring import Ring


class ShiftBack(torch.autograd.Function):
    """Shift forward; backward sends the gradient in the other direction, by an exchange of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return ring.shift(x.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ring, back = ctx.ring, torch.empty_like(gradient)
        work = ring.comm.exchange(
            send=(gradient.contiguous(),), to=ring.previous, receive=(back,), source=ring.next, tag="gradient"
        )
        return work.wait()[0], None


def many_exchanges(ring: Ring, scale: Tensor) -> dict[str, Any]:
    """Use every operation of a transport, with results that depend on the rank."""
    generator = torch.Generator().manual_seed(ring.rank)
    x = torch.randn(2, 3 + ring.rank, 4, generator=generator)
    lengths = [3 + rank for rank in range(ring.world_size)]
    results: dict[str, Any] = {"two": ring.shift(scale * ring.rank, torch.full((5,), ring.rank))}
    results["ragged"] = ring.shift(x, length=lengths[ring.previous])
    results["empty"] = ring.shift(torch.zeros(1, 0, 3))
    none = torch.from_numpy(np.zeros(0, np.int64))  # its stride is 0
    results["empty of NumPy"] = ring.shift(none), ring.all_gather(none, [(0,)] * ring.world_size)
    results["half"] = ring.shift(x[:, :2].bfloat16())
    first, second = ring.post(scale + ring.rank), ring.post(scale - ring.rank, tag="other")
    results["waited in reverse"] = (*second.wait(), *first.wait())
    columns = torch.zeros(4, 3).t()
    ring.comm.exchange(
        send=(torch.full((4, 3), float(ring.rank)).t(),),
        to=ring.next,
        receive=(columns,),
        source=ring.previous,
    ).wait()
    results["not contiguous"] = columns
    results["gathered"] = ring.all_gather(x, [(2, length, 4) for length in lengths])
    results["sum"], results["max"] = ring.all_reduce(x[:, :2]), ring.all_reduce(x[:, :2], "max")
    ring.barrier()
    leaf = x[:, :2].clone().requires_grad_()
    (ShiftBack.apply(leaf, ring) * (ring.rank + 1)).sum().backward()
    results["gradient"] = leaf.grad
    results["product"] = ring.compute("product", torch.matmul, x, x.transpose(-1, -2))
    return results


def four_shifts(ring: Ring) -> Tensor:
    """Shift a tensor four times and return it; each hop changes the tensor, so no two messages are equal."""
    x = torch.arange(6.0).reshape(2, 3) + 10 * ring.rank
    for step in range(4):
        x = ring.shift(x) + step
    return x


def raise_on_rank_1(ring: Ring) -> None:
    four_shifts(ring)
    if ring.rank == 1:
        raise ValueError("rank 1 gives up")
    four_shifts(ring)


def wait_for_a_sleeper(ring: Ring) -> None:
    if ring.rank == 1:
        time.sleep(60)
    ring.shift(torch.zeros(3))


def sleep_on_rank_1(ring: Ring) -> int:
    ring.barrier()
    if ring.rank == 1:
        time.sleep(60)
    return ring.rank


def who_am_i(ring: Ring) -> tuple[int, int, int, bool]:
    print("x" * 99 + "\n", end="" if ring.rank else "x" * 200_000 + "\n")
    print(f"I am {ring.rank}")
    sys.stderr.write("no end of line")
    return ring.rank, os.getpid(), torch.get_num_threads(), torch.is_grad_enabled()


def rank_0_ends_early(ring: Ring) -> float:
    """Run a program in which the other ranks communicate after rank 0 has closed its connections."""
    mine = torch.full((1,), float(ring.rank))
    ring.shift(mine)
    if ring.rank == 0:
        return 0.0
    time.sleep(2.5)
    other = 3 - ring.rank
    work = ring.comm.exchange(send=(mine,), to=other, receive=(torch.empty(1),), source=other)
    return work.wait()[0].item()


def result_that_cannot_travel(ring: Ring) -> Any:
    return threading.Lock() if ring.rank == 1 else None


def exit_quietly(ring: Ring) -> None:
    if ring.rank == 1:
        os._exit(3)
    ring.barrier()


def forget_to_wait(ring: Ring) -> None:
    ring.post(torch.zeros(3))
