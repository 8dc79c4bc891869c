"""Ways to compute the same attention, all with the same three steps: prepare, run, and join the results.

`Alone` is one rank of a ring without the other ranks, for timing its kernels and measuring its memory.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringlab.attention import ring_attention
from ringlab.bench.interleaved import Turn
from ringlab.bench.problem import Inputs
from ringlab.bench.reference import Results
from ringlab.blocks.protocol import Block
from ringlab.comm.protocol import Comm, Work
from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.layout import contiguous, zigzag


class Alone(Comm):
    """Rank `rank` of `world_size` without its neighbours: it receives the tensors that it sends.

    Sent tensors are copied into the received tensors, as far as they fit. The sizes, the number and the
    lifetimes of the tensors are as on a real rank, but the results are wrong unless it is the only rank.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

    def exchange(
        self,
        *,
        send: Sequence[Shaped[Tensor, "..."]] = (),
        to: int | None = None,
        receive: Sequence[Shaped[Tensor, "..."]] = (),
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


SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
"""Backends of torch's own attention, each pinned so that nothing else runs in its place."""

Attend = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
"""(q, k, v, causal) → (out, lse); lse may be None."""


@dataclass(frozen=True)
class Contender:
    """One way to compute attention: `turn(inputs, of)` is timed, and `join` turns its value into whole results.

    `of` is "forward", "backward" or "forward_backward". `torchs`: whether this is one of torch's own
    operators, which may refuse to run while new memory is filled with NaN.
    """

    turn: Callable[[Inputs, str], Turn]
    join: Callable[[Any], Results] = dict
    torchs: bool = False


def whole(attend: Attend, causal: bool, torchs: bool = False) -> Contender:
    """Return the contender that calls `attend` once on the whole problem."""

    def forward(inputs: Inputs, gradients: bool) -> dict[str, Tensor]:
        q, k, v = (x.detach().requires_grad_(gradients) for x in inputs[:3])
        with torch.set_grad_enabled(gradients):
            out, lse = attend(q, k, v, causal)
        found = {"out": out, "q": q, "k": k, "v": v} if gradients else {"out": out}
        return found if lse is None else {**found, "lse": lse}

    def backward(inputs: Inputs, ready: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = (ready["q"], ready["k"], ready["v"])
        # Backward runs on this thread, as in the ring, and not on a thread of autograd.
        with torch.autograd.set_multithreading_enabled(False):
            gradients = torch.autograd.grad(ready["out"], leaves, inputs.dout)
        return dict(zip(("dq", "dk", "dv"), gradients, strict=True))

    def both(inputs: Inputs) -> dict[str, Tensor]:
        ready = forward(inputs, True)
        gradients = backward(inputs, ready)
        return gradients | {name: ready[name].detach() for name in ("out", "lse") if name in ready}

    def turn(inputs: Inputs, of: str) -> Turn:
        if of == "forward":
            return Turn(lambda _: forward(inputs, False))
        if of == "backward":
            return Turn(lambda ready: backward(inputs, ready), lambda: forward(inputs, True))
        return Turn(lambda _: both(inputs))

    return Contender(turn, torchs=torchs)


def all_sdpa(causal: bool) -> dict[str, Contender]:
    """Return torch's attention with each backend of `SDPA`, by name."""
    return {name: whole(sdpa(backend), causal, torchs=True) for name, backend in SDPA.items()}


def sdpa(backend: SDPBackend) -> Attend:
    """Return torch's attention with only `backend` allowed.

    It raises RuntimeError if the backend cannot run.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, None]:
        with sdpa_kernel(backend), warnings.catch_warnings():
            # If no backend can run, torch warns about each backend and then raises an error, which is enough.
            warnings.simplefilter("ignore")
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal), None

    return attend


def one_block(block: str | Block) -> Attend:
    """Return ringlab's attention on a ring of one rank: one block, one step, no message."""
    ring = Ring(Alone())

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        layout = contiguous(q.shape[-2], 1)
        return ring_attention(
            q, k, v, ring=ring, layout=layout, causal=causal, block=block, return_lse=True, validate=False
        )

    return attend


def emulated_ring(block: str | Block, P: int, causal: bool) -> Contender:
    """Return the contender that runs the zig-zag ring on P virtual ranks of this device."""
    cluster = VirtualCluster(P, memory=False)

    def turn(inputs: Inputs, of: str) -> Turn:
        layout = zigzag(inputs.q.shape[-2], P)

        def prepare() -> list[tuple[Tensor, ...]]:
            return [tuple(layout.shard(x, rank) for x in inputs) for rank in range(P)]

        def run(shards: list[tuple[Tensor, ...]]) -> Any:
            def program(ring: Ring) -> tuple[Tensor, ...]:
                return rank_program(ring, shards[ring.rank], layout, block, causal, of != "forward")

            with _one_thread():
                return cluster.run(program).results

        return Turn(run, prepare)

    def join(results: list[tuple[Tensor, ...]]) -> Results:
        names = ("out", "lse", "dq", "dk", "dv")[: len(results[0])]
        layout = zigzag(sum(part[0].shape[-2] for part in results), P)
        parts = zip(names, zip(*results, strict=True), strict=True)
        return {name: layout.unshard(list(part), dim=-1 if name == "lse" else -2) for name, part in parts}

    return Contender(turn, join)


def rank_program(
    ring: Ring,
    shards: tuple[Float[Tensor, "B _ L D"], ...],
    layout: Any,
    block: str | Block,
    causal: bool,
    gradients: bool,
) -> tuple[Tensor, ...]:
    """Return one rank's out and lse, and with `gradients` its dq, dk and dv.

    The ranks' arguments are not compared, because training compares them once and not in every layer.
    """
    q, k, v, dout = shards
    q, k, v = (x.detach().requires_grad_(gradients) for x in (q, k, v))
    with torch.set_grad_enabled(gradients):
        out, lse = ring_attention(
            q, k, v, ring=ring, layout=layout, causal=causal, block=block, return_lse=True, validate=False
        )
    if not gradients:
        return out, lse
    return out.detach(), lse, *torch.autograd.grad(out, (q, k, v), dout)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Launch the kernels of all ranks from one thread, as parallel threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
