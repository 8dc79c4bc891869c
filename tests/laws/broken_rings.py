"""A ring attention written out by hand, as a learner would, and the ways in which it goes wrong.

The oracle as a subject of laws, and oracles with one thing wrong: plain implementations and spoiled results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringlab import oracle
from ringlab.comm.ring import Ring
from ringlab.layout import Layout

FAULTS = (
    "averages_the_blocks",
    "adds_the_blocks",
    "lse_of_the_last_block",
    "skips_the_last_block",
    "keeps_the_first_block",
    "mask_in_local_indices",
    "sees_one_too_many",
    "sees_one_too_few",
    "no_mask",
    "heads_in_turn",
    "values_squared",
    "no_scale",
    "origin_counted_the_other_way",
    "delta_of_the_block",
    "lse_of_the_block",
    "gradients_stay_where_computed",
    "gradients_one_hop_short",
    "gradient_of_keys_and_values_swapped",
    "no_scale_in_gradients",
    "float32_state",
)


def broken_ring(fault: str) -> Callable[..., Any]:
    """Return the program with this fault; "none" is right."""

    def program(ring: Ring, whole: tuple[Tensor, ...], layout: Layout, causal: bool) -> tuple[Tensor, ...]:
        return _Rank(fault, ring, layout, causal).run(*layout.shard(whole, ring.rank))

    return program


class _Rank:
    def __init__(self, fault: str, ring: Ring, layout: Layout, causal: bool) -> None:
        self.fault, self.ring, self.layout, self.causal = fault, ring, layout, causal

    def run(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        self.group, self.scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
        if self.fault == "values_squared":
            v = v * v
        out, lse = self.forward(q, k, v)
        dq, dk, dv = self.backward(q, k, v, dout, out, lse)
        return out, lse, dq, dk, dv

    def origin(self, step: int) -> int:
        sign = 1 if self.fault == "origin_counted_the_other_way" else -1
        return (self.ring.rank + sign * step) % self.ring.world_size

    def scores(self, q: Tensor, k: Tensor, step: int) -> Tensor:
        scores = q @ self.heads(k).mT * (1.0 if self.fault == "no_scale" else self.scale)
        if not self.causal or self.fault == "no_mask":
            return scores
        rows, keys = (torch.from_numpy(self.layout.positions(r)) for r in (self.ring.rank, self.origin(step)))
        if self.fault == "mask_in_local_indices":
            rows, keys = torch.arange(len(rows)), torch.arange(len(keys))
        reach = {"sees_one_too_many": 1, "sees_one_too_few": -1}.get(self.fault, 0)
        return scores.masked_fill(keys > rows[:, None] + reach, -math.inf)

    def heads(self, kv: Tensor) -> Tensor:
        if self.fault == "heads_in_turn":
            return kv.repeat(1, self.group, 1, 1)
        return kv.repeat_interleave(self.group, dim=1)

    def weights(self, scores: Tensor, lse: Tensor) -> Tensor:
        return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
        size = self.ring.world_size
        for step in range(size):
            scores = self.scores(q, k, step)
            block_lse = scores.logsumexp(-1)
            block_out = self.weights(scores, block_lse) @ self.heads(v)
            if not (step and step == size - 1 and self.fault == "skips_the_last_block"):
                out, lse = self.merge(out, lse, block_out, block_lse, step)
            if step < size - 1 and self.fault == "keeps_the_first_block":
                self.ring.shift(k, v)
            elif step < size - 1:
                k, v = self.ring.shift(k, v)
        return out, lse

    def merge(
        self, out: Tensor, lse: Tensor, new: Tensor, new_lse: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        total = torch.logaddexp(lse, new_lse)
        if self.fault == "averages_the_blocks":
            return (out * step + new) / (step + 1), total
        if self.fault == "adds_the_blocks":
            return out + new, total
        safe = total.masked_fill(total == -math.inf, 0.0)
        merged = out * torch.exp(lse - safe).unsqueeze(-1) + new * torch.exp(new_lse - safe).unsqueeze(-1)
        if self.fault == "float32_state":
            return merged.float().to(merged.dtype), total.float().to(total.dtype)
        if self.fault == "lse_of_the_last_block":
            total = torch.where(new_lse == -math.inf, lse, new_lse)
        return merged, total

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        size = self.ring.world_size
        for step in range(size):
            parts = self.pair(q, k, v, dout, out, lse, step)
            dq, dk, dv = dq + parts[0], dk + parts[1], dv + parts[2]
            stays = self.fault == "gradients_one_hop_short" and step == size - 1
            k, v = self.ring.shift(k, v)
            if not stays and self.fault != "gradients_stay_where_computed":
                dk, dv = self.ring.shift(dk, dv)
        return (dq, dv, dk) if self.fault == "gradient_of_keys_and_values_swapped" else (dq, dk, dv)

    def pair(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor, step: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What one block of queries and one of keys give each other."""
        scores = self.scores(q, k, step)
        own_lse = scores.logsumexp(-1)
        if self.fault == "delta_of_the_block":
            out = self.weights(scores, own_lse) @ self.heads(v)
        weights = self.weights(scores, own_lse if self.fault == "lse_of_the_block" else lse)
        delta = (dout * out).sum(-1, keepdim=True)
        dscores = weights * (dout @ self.heads(v).mT - delta)
        scale = 1.0 if self.fault == "no_scale_in_gradients" else self.scale
        return (
            scale * dscores @ self.heads(k),
            self.sum_group(scale * dscores.mT @ q),
            self.sum_group(weights.mT @ dout),
        )

    def sum_group(self, gradient: Tensor) -> Tensor:
        """The gradient of a key/value head: the sum over the query heads that read it."""
        if self.fault == "heads_in_turn":
            return gradient.unflatten(1, (self.group, -1)).sum(1)
        return gradient.unflatten(1, (-1, self.group)).sum(2)


class Oracle:
    """What the laws hold to account; mutants override a method."""

    def attention(self, q: Any, k: Any, v: Any, **options: Any) -> oracle.Result:
        return oracle.attention(q, k, v, **options)

    def gradients(self, q: Any, k: Any, v: Any, dout: Any, **options: Any) -> oracle.Gradients:
        return oracle.gradients(q, k, v, dout, **options)


class Plain(Oracle):
    """softmax(scale·qkᵀ)v with the mask as an additive number, and its gradient; overridden below."""

    hidden_score = -math.inf
    subtract_top = True

    def heads(self, kv: np.ndarray, group: int) -> np.ndarray:
        return np.repeat(kv, group, axis=1)

    def visible(self, q: np.ndarray, k: np.ndarray, causal: bool, mask: np.ndarray | None) -> np.ndarray:
        shape = (q.shape[2], k.shape[2])
        return (
            np.ones(shape, bool)
            & (True if mask is None else mask)
            & (np.tri(*shape, dtype=bool) if causal else True)
        )

    def weights(
        self, q: np.ndarray, k: np.ndarray, causal: bool, mask: Any, scale: float | None
    ) -> tuple[np.ndarray, np.ndarray]:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        k = self.heads(k, q.shape[1] // k.shape[1])
        scores = np.where(self.visible(q, k, causal, mask), scale * q @ k.swapaxes(2, 3), self.hidden_score)
        top = scores.max(-1, keepdims=True) if self.subtract_top else np.zeros((*scores.shape[:-1], 1))
        top = np.where(np.isfinite(top), top, 0.0)
        powers = np.exp(scores - top)
        total = powers.sum(-1, keepdims=True)
        return powers / np.where(total == 0, 1.0, total), (np.log(total) + top).squeeze(-1)

    def attention(
        self, q: Any, k: Any, v: Any, causal: bool = False, mask: Any = None, scale: Any = None
    ) -> oracle.Result:
        with np.errstate(all="ignore"):
            weights, lse = self.weights(q, k, causal, mask, scale)
            return oracle.Result(weights @ self.heads(v, q.shape[1] // k.shape[1]), lse)


class MasksWithALargeNumber(Plain):
    hidden_score = -1e9


class NoMaximum(Plain):
    subtract_top = False


class BottomRight(Plain):
    def visible(self, q: Any, k: Any, causal: bool, mask: Any) -> np.ndarray:
        sees = np.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=bool)
        return super().visible(q, k, False, mask) & (sees if causal else True)


class HeadsInTurn(Plain):
    """Query head h reads head h % K."""

    def heads(self, kv: np.ndarray, group: int) -> np.ndarray:
        return np.tile(kv, (1, group, 1, 1))


class IgnoresScale(Plain):
    def weights(self, q: Any, k: Any, causal: bool, mask: Any, scale: Any) -> tuple[np.ndarray, np.ndarray]:
        return super().weights(q, k, causal, mask, None)


class Log2(Oracle):
    def attention(self, q: Any, k: Any, v: Any, **options: Any) -> oracle.Result:
        out, lse = super().attention(q, k, v, **options)
        return oracle.Result(out, lse / math.log(2))


class NoDelta(Oracle):
    """dS = p·dP, without taking the row's mean off."""

    def gradients(self, q: Any, k: Any, v: Any, dout: Any, **options: Any) -> oracle.Gradients:
        out = oracle.attention(q, k, v, **{name: x for name, x in options.items() if name != "dlse"}).out
        options["dlse"] = options.get("dlse", 0.0) + (dout * out).sum(-1)
        return super().gradients(q, k, v, dout, **options)


class NoScaleInKeys(Oracle):
    def gradients(self, q: Any, k: Any, v: Any, dout: Any, **options: Any) -> oracle.Gradients:
        dq, dk, dv = super().gradients(q, k, v, dout, **options)
        return oracle.Gradients(dq, dk * q.shape[-1] ** 0.5, dv)


class NoCapBackward(Oracle):
    def gradients(
        self, q: Any, k: Any, v: Any, dout: Any, softcap: Any = None, **options: Any
    ) -> oracle.Gradients:
        return super().gradients(q, k, v, dout, **options)


class KeepsAllBackward(Oracle):
    def gradients(
        self, q: Any, k: Any, v: Any, dout: Any, factors: Any = None, **options: Any
    ) -> oracle.Gradients:
        return super().gradients(q, k, v, dout, **options)


class KeepsAll(Oracle):
    def attention(self, q: Any, k: Any, v: Any, factors: Any = None, **options: Any) -> oracle.Result:
        return super().attention(q, k, v, **options)


class DropsFromLse(Oracle):
    """Keys that are dropped are masked: the others share what they had."""

    def attention(self, q: Any, k: Any, v: Any, factors: Any = None, **options: Any) -> oracle.Result:
        return super().attention(q, k, v, mask=None if factors is None else factors > 0, **options)


class HeadsAveraged(Oracle):
    """The mean over the query heads of a key/value head, where the sum belongs."""

    def gradients(self, q: Any, k: Any, v: Any, dout: Any, **options: Any) -> oracle.Gradients:
        dq, dk, dv = super().gradients(q, k, v, dout, **options)
        group = q.shape[1] // k.shape[1]
        return oracle.Gradients(dq, dk / group, dv / group)


class LeaksToBlindRows(Oracle):
    def gradients(
        self, q: Any, k: Any, v: Any, dout: Any, mask: Any = None, **options: Any
    ) -> oracle.Gradients:
        return super().gradients(q, k, v, dout, **options)
