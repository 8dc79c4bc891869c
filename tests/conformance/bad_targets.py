"""Targets that hang, crash, print without end, or return something else than attention."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

import torch
from torch import Tensor

from ringlab import ring_attention
from ringlab.comm.ring import Ring
from ringlab.conformance import Target

NO_FUNCTION = 3


def hangs(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    while ring.world_size == 2:
        time.sleep(0.1)
    return ring_attention(q, k, v, ring=ring, layout=_contiguous(ring, q), causal=False)


def hangs_always(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    while True:
        time.sleep(0.1)


def crashes(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if ring.world_size == 2:
        print("last words")
        os._exit(3)
    return ring_attention(q, k, v, ring=ring, layout=_contiguous(ring, q), causal=False)


def prints(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    while ring.world_size == 2:
        print("x" * 10_000)
    return ring_attention(q, k, v, ring=ring, layout=_contiguous(ring, q), causal=False)


def leaves(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise SystemExit(0)


def interrupts(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise KeyboardInterrupt


def asserts(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert ring.world_size > 8
    return q


def returns_text(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return "attention"


def returns_nothing(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return None


def returns_one_token(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q[:, :, :1]


def returns_float64(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ring_attention(q, k, v, ring=ring, layout=_contiguous(ring, q), causal=False).double()


def returns_no_gradient(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ring_attention(q, k, v, ring=ring, layout=_contiguous(ring, q), causal=False).detach()


def needs_a_package(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    missing: Any = importlib.import_module("a_package_that_is_not_there")
    return missing.attention(q, k, v)  # type: ignore[no-any-return]


def needs_an_argument(ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, sauce: str) -> Tensor:
    return q


def one_is_missing(S: int, P: int) -> list[Tensor]:
    return [torch.arange(S - 1) for _ in range(P)]


claims_a_wrong_layout = Target(returns_text, layouts={"mine": one_is_missing}, causal=(False,))
claims_no_schedule = Target(returns_text, schedule="sometimes")


def _contiguous(ring: Ring, q: Tensor) -> Any:
    from ringlab import contiguous

    lengths = [int(x) for x in ring.all_gather(torch.tensor([q.shape[2]]))]
    return contiguous(sum(lengths), ring.world_size)
