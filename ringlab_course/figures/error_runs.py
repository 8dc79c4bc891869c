"""Attention in P blocks, folded as a ring folds them, with one thing rounded or wrong: where error curves come from.

Every run is real: blocks of keys are computed and merged one after the other, and the result is held
against the float64 oracle. One head; q is (rows, D), k and v are (S, D). Scores s = q·k / √D.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringlab import oracle
from ringlab.merge import Partial, merge

RANKS = (1, 2, 4, 8, 16, 32)
PROBES = ("plain", "large", "sloped")
"""Inputs: scores of size 1; scores of size `gain`; scores that rise along the keys by 2 · `slope`."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TILE = 32
"""Keys that a block's own accumulator adds at a time."""


@dataclass(frozen=True)
class Program:
    """What a blockwise attention rounds to `dtype`, beside its inputs and its blocks' outputs, and what it does wrong."""

    dtype: torch.dtype = torch.bfloat16
    lse: bool = False
    out: bool = False
    accumulator: bool = False
    q: bool = False
    fp16_exponentials: bool = False
    rescales: bool = True
    shuffles: bool = False

    def rounded(self, x: Tensor, really: bool) -> Tensor:
        """Return `x` as `dtype` keeps it, in float32; unchanged if not `really`."""
        return x.to(self.dtype).float() if really else x


FAULTS = {
    "sound": Program(),
    "bf16 lse": Program(lse=True),
    "bf16 out": Program(out=True),
    "bf16 accumulator": Program(accumulator=True),
    "bf16 q": Program(q=True),
    "fp16 overflow": Program(fp16_exponentials=True),
    "no rescale": Program(rescales=False),
    "arrival order": Program(shuffles=True),
}
"""Named programs in bfloat16, in the words of exercise 10."""


def inputs(
    probe: str,
    seed: int,
    *,
    rows: int = 64,
    S: int = 1024,
    D: int = 64,
    gain: float = 8.0,
    slope: float = 10.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return float32 q (rows, D), k and v (S, D) of one of PROBES. Raises: ValueError for another name."""
    if probe not in PROBES:
        raise ValueError(f"one of {', '.join(PROBES)}, not {probe!r}")
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, D, generator=generator) for n in (rows, S, S))
    if probe == "large":
        q = q * gain
    elif probe == "sloped":
        q[:, 0] = math.sqrt(D)
        k[:, 0] = torch.linspace(-slope, slope, S)
    return q, k, v


def run(
    program: Program, q: Tensor, k: Tensor, v: Tensor, P: int, generator: torch.Generator | None = None
) -> Tensor:
    """Return out (rows, D), float32, of attention in P blocks of keys, folded in order.

    Inputs are taken as they are; `generator` draws the order of a program that shuffles.
    """
    blocks = list(zip(k.float().tensor_split(P), v.float().tensor_split(P), strict=True))
    if program.shuffles:
        blocks = [blocks[i] for i in torch.randperm(P, generator=generator).tolist()]
    if not program.rescales:
        return _never_rescaled(program, q.float(), blocks)
    state = Partial(torch.zeros(q.shape), torch.full(q.shape[:1], -math.inf))
    for keys, values in blocks:
        out, lse = _block(program, q.float(), keys, values)
        part = Partial(program.rounded(out, True), program.rounded(lse, program.lse))
        state = merge(state, part)
        state = Partial(program.rounded(state.out, program.out), program.rounded(state.lse, program.lse))
    return state.out


def relative_error(x: Tensor, truth: np.ndarray) -> float:
    """Return ‖x − truth‖ / ‖truth‖ over all entries, and inf where x is not finite."""
    got = oracle.float64(x)
    if not np.isfinite(got).all():
        return math.inf
    return float(np.linalg.norm(got - truth) / np.linalg.norm(truth))


def truth(q: Tensor, k: Tensor, v: Tensor) -> np.ndarray:
    """Return the oracle's out (rows, D) for these inputs as they are."""
    return oracle.attention(q[None, None], k[None, None], v[None, None]).out[0, 0]


def errors(
    program: Program, probe: str, ranks: Sequence[int] = RANKS, *, seed: int = 0, **sizes: Any
) -> list[float]:
    """Return the relative error in P blocks for every P of `ranks`, on the inputs of `seed`; sizes as in `inputs`."""
    q, k, v = (x.to(program.dtype) for x in inputs(probe, seed, **sizes))
    right, order = truth(q, k, v), torch.Generator().manual_seed(seed)
    with _one_thread():
        return [relative_error(run(program, q, k, v, P, order), right) for P in ranks]


def curves(fault: str, ranks: Sequence[int] = RANKS, *, seed: int = 0, **sizes: Any) -> dict[str, np.ndarray]:
    """Return the error curves of a program out of FAULTS: an array over `ranks` for every probe, and "repeat".

    "repeat" is the relative difference of two runs on the same plain inputs. Sizes as in `inputs`.
    """
    program = FAULTS[fault]
    found = {probe: np.array(errors(program, probe, ranks, seed=seed, **sizes)) for probe in PROBES}
    q, k, v = (x.to(program.dtype) for x in inputs("plain", seed, **sizes))
    order = torch.Generator().manual_seed(seed)
    with _one_thread():
        pairs = [(run(program, q, k, v, P, order), run(program, q, k, v, P, order)) for P in ranks]
    return {
        **found,
        "repeat": np.array([relative_error(again, oracle.float64(once)) for once, again in pairs]),
    }


@contextmanager
def _one_thread() -> Iterator[None]:
    """Operations this small are not worth sharing out: on a busy machine the threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _block(program: Program, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of these queries over one block of keys."""
    scale = q.shape[-1] ** -0.5
    if program.q:  # scale and log2(e) folded into q, as kernels do, but rounded
        scores = program.rounded(q * (scale / math.log(2)), True) @ k.T * math.log(2)
    else:
        scores = q @ k.T * scale
    if program.fp16_exponentials:  # no maximum taken away
        powers = torch.exp(scores).half().float()
        total = powers.sum(-1)
        return powers @ v / total[:, None], total.log()
    maximum = scores.amax(-1)
    powers = torch.exp(scores - maximum[:, None])
    total, acc = powers.sum(-1), powers @ v
    if program.accumulator:
        total, acc = _added_up(program, powers, v)
    return acc / total[:, None], maximum + total.log()


def _added_up(program: Program, powers: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Σ powers and powers @ v, TILE keys at a time, rounded after every addition."""
    total, acc = torch.zeros(len(powers)), torch.zeros(len(powers), v.shape[-1])
    for weights, values in zip(powers.split(TILE, -1), v.split(TILE), strict=True):
        total = program.rounded(total + weights.sum(-1), True)
        acc = program.rounded(acc + weights @ values, True)
    return total, acc


def _never_rescaled(program: Program, q: Tensor, blocks: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """A running maximum whose sum is rescaled when it rises, and whose accumulator is forgotten."""
    maximum, total, acc = torch.full(q.shape[:1], -math.inf), torch.zeros(len(q)), torch.zeros(q.shape)
    for out, lse in _parts(program, q, blocks):
        new = torch.maximum(maximum, lse)
        total = total * torch.exp(maximum - new) + torch.exp(lse - new)
        acc = acc + torch.exp(lse - new)[:, None] * out
        maximum = new
    return acc / total[:, None]


def _parts(
    program: Program, q: Tensor, blocks: Sequence[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    for keys, values in blocks:
        out, lse = _block(program, q, keys, values)
        yield program.rounded(out, True), lse
