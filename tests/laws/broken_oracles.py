"""The oracle as a subject of laws, and oracles with one thing wrong: plain implementations and spoiled results."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ringlab import oracle


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
