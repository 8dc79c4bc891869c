"""Exercise 01: the plain NumPy implementation whose errors determine the tolerances."""

from __future__ import annotations

import numpy as np

Pair = tuple[np.ndarray, np.ndarray]


def softmax(scores: np.ndarray) -> Pair:
    """Return the weights and lse of every row of `scores`, in the dtype of `scores`."""
    top = scores.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, np.zeros_like(top))
    powers = np.exp(scores - top)
    total = powers.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    return powers / np.where(total == 0, np.ones_like(total), total), lse[..., 0]


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, mask: np.ndarray | None, scale: float) -> Pair:
    """Return (out, lse) of attention with grouped heads, in the dtype of q."""
    of_groups = (*k.shape[:2], -1)  # all rows of the query heads that share a K/V head
    scores = q.reshape(*of_groups, q.shape[-1]) @ k.swapaxes(-1, -2)
    scores = scores.reshape(*q.shape[:3], -1) * q.dtype.type(scale)
    if mask is not None:
        scores = np.where(mask, scores, q.dtype.type(-np.inf))
    weights, lse = softmax(scores)
    out = weights.reshape(*of_groups, k.shape[2]) @ v
    return out.reshape(*q.shape[:3], -1), lse
