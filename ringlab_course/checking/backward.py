"""The backward ring in float64: the gradients from each pair of shards, and the rounding error in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch

from ringlab import oracle
from ringlab.layout import Layout
from ringlab_course.checking.numbers import random

NAMES = ("dq", "dk", "dv")
Gradients: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
Parts: TypeAlias = list[list[Gradients]]
"""Gradients as [rank][owner]: the terms that a rank's rows add to their dq and to the owner's dk and dv."""


def pair(
    dout: Any, q: Any, k: Any, v: Any, lse: Any, delta: Any, mask: Any = None, scale: float | None = None
) -> Gradients:
    """Return the terms of (dq, dk, dv) from these query rows and keys, given the rows' lse and delta."""
    dout, q, k, v, lse, delta = map(oracle.float64, (dout, q, k, v, lse, delta))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    weights, (dout, q, delta) = weights_of(q, k, lse, mask, scale), (split(x, k) for x in (dout, q, delta))
    k, v = k[:, :, None], v[:, :, None]
    dscores = weights * (dout @ v.swapaxes(-1, -2) - delta[..., None])
    dq = scale * (dscores @ k)
    dk = scale * (dscores.swapaxes(-1, -2) @ q).sum(2)
    return _joined(dq), dk, (weights.swapaxes(-1, -2) @ dout).sum(2)


def weights_of(q: np.ndarray, k: np.ndarray, lse: np.ndarray, mask: Any, scale: float) -> np.ndarray:
    """Return the attention weights P of a pair, (B, K, H/K, Lq, Lk); 0 where a query does not see the key."""
    scores = scale * (split(q, k) @ k[:, :, None].swapaxes(-1, -2))
    total = split(lse, k)[..., None]
    seen = np.isfinite(total) & (True if mask is None else np.asarray(mask))
    with np.errstate(all="ignore"):
        return np.where(seen, np.exp(np.where(seen, scores - total, -np.inf)), 0.0)


def split(x: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Return `x` with an additional axis for the query heads that share a K/V head."""
    return x.reshape(x.shape[0], k.shape[1], x.shape[1] // k.shape[1], *x.shape[2:])


def _joined(x: np.ndarray) -> np.ndarray:
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def allowed(truth: Gradients, sizes: Gradients, terms: float) -> float:
    """Return the relative error that a float32 answer may have, whatever the order of its sums.

    `sizes` are the gradients that result if every summand is replaced by its absolute value. The rounding of
    an element is proportional to its size. `terms` counts the roundings that add up; roundings inside a sum
    of n terms count as √n, like a random walk. The factor 4 allows four standard deviations.
    """
    base = 4 * float(np.finfo(np.float32).eps) * terms
    return max(
        base * float(np.max(size, initial=0.0)) / _largest(right)
        for size, right in zip(sizes, truth, strict=True)
    )


def _largest(part: np.ndarray) -> float:
    """Return the scale by which `compare_with` measures the error of `part`."""
    return float(np.abs(part).max(initial=0.0)) or 1.0


def sizes_of(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, mask: Any = None
) -> tuple[Gradients, float]:
    """Return the `sizes` and `terms` that `allowed` takes, for these query rows and these keys.

    The relative error of a weight e^(s − lse) is the absolute error of its exponent, which grows with Σ|q||k|
    and |lse|.
    """
    dout, q, k, v, out, lse = map(oracle.float64, (dout, q, k, v, out, lse))
    scale = q.shape[-1] ** -0.5
    weights = weights_of(q, k, lse, mask, scale)
    dout, q, out = (np.abs(split(x, k)) for x in (dout, q, out))
    k, v = np.abs(k[:, :, None]), np.abs(v[:, :, None])
    dscores = weights * (dout @ v.swapaxes(-1, -2) + (dout * out).sum(-1, keepdims=True))
    exponent = scale * (q @ k.swapaxes(-1, -2)).max(initial=0.0) + np.abs(lse[np.isfinite(lse)]).max(
        initial=0.0
    )
    terms = float(exponent + math.sqrt(k.shape[-2]) + math.sqrt(q.shape[-2]) + math.sqrt(q.shape[-1]) + 4)
    dk = scale * (dscores.swapaxes(-1, -2) @ q).sum(2)
    return (_joined(scale * (dscores @ k)), dk, (weights.swapaxes(-1, -2) @ dout).sum(2)), terms


@dataclass(frozen=True)
class Problem:
    """The tensors that every rank holds when the backward begins.

    `positions` holds one int64 tensor of global positions per rank.
    """

    douts: list[torch.Tensor]
    qs: list[torch.Tensor]
    ks: list[torch.Tensor]
    vs: list[torch.Tensor]
    outs: list[torch.Tensor]
    lses: list[torch.Tensor]
    positions: list[torch.Tensor]
    text: str
    window: int | None = None
    """The number of keys that a query sees, counted back from its own key, or None for all of them."""

    @property
    def world_size(self) -> int:
        return len(self.qs)

    @property
    def per_rank(self) -> tuple[list[torch.Tensor], ...]:
        """The arguments of `ring_backward` that differ from rank to rank."""
        return self.douts, self.qs, self.ks, self.vs, self.outs, self.lses

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of every rank."""
        return [len(own) for own in self.positions]

    def mask(self, rank: int, owner: int) -> np.ndarray:
        """Return a mask that is True where a query of `rank` sees a key of `owner`."""
        return seen(self.positions[rank], self.positions[owner], self.window)

    @cached_property
    def deltas(self) -> list[np.ndarray]:
        """The delta of every rank, rowsum(dO ⊙ O)."""
        pairs = zip(self.douts, self.outs, strict=True)
        return [(oracle.float64(dout) * oracle.float64(out)).sum(-1) for dout, out in pairs]

    @cached_property
    def truth(self) -> list[Gradients]:
        """The gradients that every rank should return, from the oracle on the whole sequence."""
        whole = [
            np.concatenate([oracle.float64(x) for x in xs], axis=-2)
            for xs in (self.qs, self.ks, self.vs, self.douts)
        ]
        places = torch.cat(self.positions)
        found = oracle.gradients(*whole, mask=seen(places, places, self.window))
        cuts = np.cumsum(self.lengths)[:-1]
        dq, dk, dv = (np.split(x, cuts, axis=-2) for x in found)
        return list(zip(dq, dk, dv, strict=True))

    @cached_property
    def parts(self) -> Parts:
        """The gradients that every rank contributes to every block, as parts[rank][owner]."""
        return [
            [self._pair(rank, owner) for owner in range(self.world_size)] for rank in range(self.world_size)
        ]

    def _pair(self, rank: int, owner: int) -> Gradients:
        of_rank, of_owner = (self.douts[rank], self.qs[rank]), (self.ks[owner], self.vs[owner])
        return pair(*of_rank, *of_owner, self.lses[rank], self.deltas[rank], self.mask(rank, owner))

    @cached_property
    def _sizes(self) -> tuple[Gradients, float]:
        """The `sizes` and `terms` that `allowed` takes, for the whole sequence."""
        dout, q, k, v, out = (torch.cat(xs, dim=-2) for xs in self.per_rank[:-1])
        places = torch.cat(self.positions)
        mask = seen(places, places, self.window)
        return sizes_of(dout, q, k, v, out, torch.cat(self.lses, dim=-1), mask)

    def bound(self, rank: int) -> float:
        """Return the relative error that a float32 answer of `rank` may have."""
        sizes, terms = self._sizes
        begin = sum(self.lengths[:rank])
        rows = slice(begin, begin + self.lengths[rank])
        dq, dk, dv = (size[..., rows, :] for size in sizes)
        return allowed(self.truth[rank], (dq, dk, dv), terms)


def seen(rows: torch.Tensor, keys: torch.Tensor, window: int | None = None) -> np.ndarray:
    """Return a mask that is True where a row's position sees a key's position.

    A row sees the keys at or before its own position that are within the window.
    """
    distance = rows.numpy()[:, None] - keys.numpy()[None, :]
    return (distance >= 0) & (distance < (math.inf if window is None else window))


def problem(
    rng: np.random.Generator,
    layout: Layout,
    H: int = 1,
    K: int = 1,
    D: int = 2,
    *,
    lift: float = 0.0,
    narrow: bool = False,
    window: int | None = None,
    text: str = "",
) -> Problem:
    """Return a random problem on this layout, in float32, or in bfloat16 if `narrow`.

    out and lse come from the oracle and are float32. `lift` is added to all scores through one column of q
    and k. `window` is that of `Problem`.
    """
    positions = [torch.from_numpy(layout.positions(rank)) for rank in range(layout.P)]
    S, dtype = layout.S, torch.bfloat16 if narrow else torch.float32
    q, dout = (random(rng, 1, H, S, D).to(dtype) for _ in range(2))
    k, v = (random(rng, 1, K, S, D).to(dtype) for _ in range(2))
    if lift:
        q[..., 0], k[..., 0] = 4.0 * D**0.5, lift / 4
    places = torch.arange(S)
    state = oracle.attention(q, k, v, mask=seen(places, places, window))
    out, lse = (torch.from_numpy(x).float() for x in state)
    douts, qs, ks, vs, outs, lses = (
        [x[:, :, own].contiguous() for own in positions] for x in (dout, q, k, v, out, lse)
    )
    heads = "" if H == K == 1 else f", {H} query and {K} K/V heads"
    limit = "" if window is None else f", window {window}"
    label = f"{layout.name}, S={S}, P={layout.P}, D={D}{heads}{limit}{', bfloat16' if narrow else ''}{text}"
    return Problem(douts, qs, ks, vs, outs, lses, positions, label, window)


def sum_over(parts: Sequence[Gradients], which: int, like: Any) -> np.ndarray:
    """Return the sum of one gradient over the parts; zeros if there are no parts.

    `which` is 0 for dq, 1 for dk and 2 for dv; `like` has the shape of the sum.
    """
    return sum((part[which] for part in parts), np.zeros(tuple(like.shape)))
