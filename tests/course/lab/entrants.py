"""Entrants of lab L3: correct, wrong, crashing and cheating rings that participants might hand in."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from typing import Any, ClassVar

import torch
from torch import Tensor

from ringlab.comm.ring import Ring
from ringlab.plain_ring import attend


def right(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring, causal: bool, positions: Any) -> Any:
    """A ring that is right but slow."""
    return attend(ring, q, k, v, causal=causal, positions=positions)


def wrong(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring, causal: bool, positions: Any) -> Any:
    """A ring whose scores are one per cent too large."""
    return attend(ring, 1.01 * q, k, v, causal=causal, positions=positions)


def dies(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring) -> Any:
    """A ring in which rank 1 exits before anything is sent."""
    if ring.rank == 1:
        os._exit(3)
    return ring.shift(q)


def killed(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring) -> Any:
    """A ring in which rank 1 is killed, as happens when the machine runs out of memory."""
    if ring.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return ring.shift(q)


def leader_killed(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring) -> Any:
    """A ring in which rank 0, which writes the results, is killed."""
    if ring.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return ring.shift(q)


def hangs(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring) -> Any:
    """A ring in which rank 2 never ends, and sends nothing."""
    while ring.rank == 2:
        time.sleep(0.1)
    return ring.shift(q)


def killed_beside_a_hang(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring) -> Any:
    """A ring in which rank 1 is killed while rank 0 waits for rank 2, which never ends.

    No signal interrupts the wait of rank 0.
    """
    if ring.rank == 0:
        ring.comm.exchange(receive=(torch.empty(1),), source=2, tag="never").wait()
    time.sleep(2.0)
    if ring.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(0.1)


CALLS: Counter[int] = Counter()
"""The number of calls of each rank."""


def first_call_only(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring, causal: bool, positions: Any) -> Any:
    """A ring that is right in its first call, and returns zeros from then on."""
    CALLS[ring.rank] += 1
    if CALLS[ring.rank] == 1:
        return attend(ring, q, k, v, causal=causal, positions=positions)
    return 0.0 * (q + k + v)


def one_call_wrong(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring, causal: bool, positions: Any) -> Any:
    """A ring that omits a shift in one call only: the fifth, which is timed."""
    CALLS[ring.rank] += 1
    scale = 1.01 if CALLS[ring.rank] == 5 else 1.0
    return attend(ring, scale * q, k, v, causal=causal, positions=positions)


class _Remembered(torch.autograd.Function):
    """A function that returns the result and gradients of its first call in every call."""

    kept: ClassVar[dict[int, dict[str, Any]]] = {}

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rank: int, run: Any) -> Tensor:
        kept = ctx.own = _Remembered.kept.setdefault(rank, {})
        if not kept:
            with torch.enable_grad():
                kept["leaves"] = [x.detach().clone().requires_grad_() for x in (q, k, v)]
                kept["out"] = run(*kept["leaves"])
        return kept["out"].detach().clone()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        kept = ctx.own
        if "grads" not in kept:
            kept["grads"] = torch.autograd.grad(kept["out"], kept["leaves"], dout)
        return (*kept["grads"], None, None)


def remembers(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring, causal: bool, positions: Any) -> Any:
    """A ring that returns its first results again, whatever the inputs of later calls are."""
    return _Remembered.apply(
        q, k, v, ring.rank, lambda *x: attend(ring, *x, causal=causal, positions=positions)[0]
    )


def no_gradient_no_work(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring, causal: bool, positions: Any) -> Any:
    """A ring that computes only if gradients are wanted, and otherwise returns zeros."""
    if not q.requires_grad:
        return torch.zeros_like(q)
    return attend(ring, q, k, v, causal=causal, positions=positions)


class Later(Tensor):
    """A subclass of Tensor, which might compute its values only when they are read."""


def computes_later(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring, causal: bool, positions: Any) -> Any:
    """A ring whose result is not computed when it returns."""
    out, _ = attend(ring, q, k, v, causal=causal, positions=positions)
    return out.as_subclass(Later)


def out_of_memory(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring, causal: bool, positions: Any) -> Any:
    """A ring in which rank 1 runs out of memory after the forward has been timed."""
    if q.requires_grad and ring.rank == 1:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    return attend(ring, q, k, v, causal=causal, positions=positions)
