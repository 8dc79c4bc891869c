"""Targets that do the wrong thing when a neighbour is gone, or that send nothing; and one that leaves a process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringlab import plain_ring
from ringlab.comm.ring import Ring
from ringlab.conformance import Target


def _guarded(instead: Callable[[Tensor], Any]) -> Target:
    """The plain ring, with `instead` of an error."""

    def attend(
        ring: Ring, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, positions: list[Tensor]
    ) -> tuple[Tensor, Tensor] | Any:
        try:
            return plain_ring.attend(ring, q, k, v, causal=causal, positions=positions)
        except Exception:
            return instead(q)

    return Target(attend)


def _waits(q: Tensor) -> None:
    while True:
        time.sleep(0.05)


def _prints(q: Tensor) -> None:
    while True:
        print("trying again " * 1000)


def _ends(q: Tensor) -> None:
    os._exit(7)


zeros_instead = _guarded(lambda q: q * 0)
nothing_instead = _guarded(lambda q: None)
text_instead = _guarded(lambda q: "a rank is gone")
waits_instead = _guarded(_waits)
prints_instead = _guarded(_prints)
ends_instead = _guarded(_ends)


def _alone(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def _one_message(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = ring.shift(k.detach(), v.detach())
    return torch.nn.functional.scaled_dot_product_attention(q, keys, values) + 0 * (k.sum() + v.sum())


sends_nothing = Target(_alone, grouped=False, causal=(False,), schedule="any")
sends_once = Target(_one_message, grouped=False, causal=(False,), schedule="any", backward=False)


def segfaults(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if ring.world_size == 2:
        ctypes.string_at(0)
    return q


def leaves_a_process(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if ring.rank == 0:
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"left behind: {left.pid}.", flush=True)
        os._exit(3)
    return q
