"""Exercise 01: the plain implementation in NumPy, and the common mistakes as small changes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("01")

Pair = tuple[np.ndarray, np.ndarray]
Softmax = Callable[[np.ndarray], Pair]


def softmax(scores: np.ndarray) -> Pair:
    """Return the weights and lse of every row of `scores`, in their dtype."""
    top = scores.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, np.zeros_like(top))
    return _divide(np.exp(scores - top), top)


def grouped(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    scale: float | None = None,
    rows: Softmax = softmax,
    hidden: float = -np.inf,
) -> Pair:
    """Return plain attention in the dtype of q; `rows` is the softmax and `hidden` the score of hidden keys."""
    of_groups = (*k.shape[:2], -1)  # all rows of the query heads that share a K/V head
    scores = q.reshape(*of_groups, q.shape[-1]) @ k.swapaxes(-1, -2)
    scores = scores.reshape(*q.shape[:3], -1) * q.dtype.type(q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = np.where(mask, scores, q.dtype.type(hidden))
    weights, lse = rows(scores)
    out = weights.reshape(*of_groups, k.shape[2]) @ v
    return out.reshape(*q.shape[:3], -1), lse


def _divide(powers: np.ndarray, top: Any) -> Pair:
    total = powers.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    return powers / np.where(total == 0, np.ones_like(total), total), lse[..., 0]


def _no_maximum(scores: np.ndarray) -> Pair:
    powers = np.exp(scores)
    total = powers.sum(-1, keepdims=True)
    return powers / total, np.log(total)[..., 0]


def _one_maximum(scores: np.ndarray) -> Pair:
    top = scores.max()
    powers = np.exp(scores - top)
    total = powers.sum(-1, keepdims=True)
    return powers / total, (np.log(total) + top)[..., 0]


def _one_maximum_guarded(scores: np.ndarray) -> Pair:
    return _divide(np.exp(scores - scores.max()), scores.max())


def _nan_row(scores: np.ndarray) -> Pair:
    top = scores.max(-1, keepdims=True)
    powers = np.exp(scores - top)
    total = powers.sum(-1, keepdims=True)
    return powers / total, (np.log(total) + top)[..., 0]


def _nan_to_num(scores: np.ndarray) -> Pair:
    weights, lse = _nan_row(scores)
    return np.nan_to_num(weights), np.nan_to_num(lse)


def _zero_by_zero(scores: np.ndarray) -> Pair:
    top = scores.max(-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isfinite(top), top, np.zeros_like(top)))
    return powers / powers.sum(-1, keepdims=True), softmax(scores)[1]


def _added_to_the_sum(number: float) -> Softmax:
    def imitate(scores: np.ndarray) -> Pair:
        top = scores.max(-1, keepdims=True)
        top = np.where(np.isfinite(top), top, np.zeros_like(top))
        powers = np.exp(scores - top)
        total = powers.sum(-1, keepdims=True) + scores.dtype.type(number)
        return powers / total, (top + np.log(total))[..., 0]

    return imitate


def _uniform_row(scores: np.ndarray) -> Pair:
    return softmax(np.where(np.isinf(scores), np.float32(-1e9), scores))


def _wrong_axis(scores: np.ndarray) -> Pair:
    weights, _ = softmax(scores.swapaxes(-1, -2))
    return weights.swapaxes(-1, -2), softmax(scores)[1]


def _bare_lse(scores: np.ndarray) -> Pair:
    top = scores.max(-1)
    return softmax(scores)[0], softmax(scores)[1] - np.where(np.isfinite(top), top, 0)


def _base_two(scores: np.ndarray) -> Pair:
    top = scores.max(-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isfinite(top), top, 0))
    return softmax(scores)[0], (np.log2(powers.sum(-1, keepdims=True)) + top)[..., 0]


def _maximum_from_zero(scores: np.ndarray) -> Pair:
    top = scores.max(-1, keepdims=True, initial=0)
    return _divide(np.exp(scores - top), top)


def _mask_repeated(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, mask: np.ndarray | None = None) -> Pair:
    """A group's heads stacked along the tokens meet a mask that was not stacked as a whole."""
    if mask is None:
        return grouped(q, k, v)
    K, group = k.shape[1], q.shape[1] // k.shape[1]
    stacked = np.repeat(mask, group, axis=0).reshape(group, *mask.shape)
    return grouped(q, k, v, mask=np.tile(stacked, (K, 1, 1)))


def _mask_after(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, mask: np.ndarray | None = None) -> Pair:
    if mask is None:
        return grouped(q, k, v)
    _, lse = grouped(q, k, v)
    return grouped(q, k, v, rows=lambda scores: (softmax(scores)[0] * mask, softmax(scores)[1]))[0], lse


def _multiplied(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, mask: np.ndarray | None = None) -> Pair:
    return grouped(q, k, v, rows=lambda scores: softmax(scores if mask is None else scores * mask))


def _inverted(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, mask: np.ndarray | None = None) -> Pair:
    return grouped(q, k, v, mask=None if mask is None else ~mask)


def _first_mask(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, mask: np.ndarray | None = None) -> Pair:
    return grouped(q, k, v, mask=mask if mask is None or mask.ndim == 2 else mask[:1])


def _finite_hidden(number: float) -> Callable[..., Pair]:
    return lambda q, k, v, *, mask=None: grouped(q, k, v, mask=mask, hidden=number)


def _scaled(scale: Callable[[int], float]) -> Callable[..., Pair]:
    return lambda q, k, v, *, mask=None: grouped(q, k, v, mask=mask, scale=scale(q.shape[-1]))


def _with(rows: Softmax) -> Callable[..., Pair]:
    return lambda q, k, v, *, mask=None: grouped(q, k, v, mask=mask, rows=rows)


def _choose(head: Callable[[np.ndarray, int], np.ndarray]) -> Callable[..., Pair]:
    """Return attention in which query head h uses K/V head `head(h, K)`."""

    def imitate(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, mask: np.ndarray | None = None) -> Pair:
        chosen = head(np.arange(q.shape[1]), k.shape[1])
        return grouped(q, k[:, chosen], v[:, chosen], mask=mask)

    return imitate


def _hide(scores: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    return scores if mask is None else np.where(mask, scores, scores.dtype.type(-np.inf))


def _within(queries: np.ndarray, keys: np.ndarray, window: int) -> np.ndarray:
    back = queries[:, None] - keys
    return ((back >= 0) & (back < window)).astype(float)


SOFTMAX = (
    mistake("zero_by_zero", _zero_by_zero),
    mistake("no_maximum", _no_maximum),
    mistake("one_maximum_for_all", _one_maximum),
    mistake("one_maximum_guarded", _one_maximum_guarded),
    mistake("masked_row_is_nan", _nan_row),
    mistake("lse_of_nothing_is_zero", _nan_to_num),
    mistake("masked_row_is_uniform", _uniform_row),
    mistake("adds_to_the_sum", _added_to_the_sum(1e-9)),
    *(
        replace(
            mistake("adds_to_the_sum"),
            name=f"adds_{number:.0e}_to_the_sum",
            imitate=_added_to_the_sum(number),
        )
        for number in (1e-5, 1e-6, 1e-7, 1e-8, 1e-10, 1e-12, 1e-16, 1e-20, 1e-30)
    ),
    mistake("wrong_axis", _wrong_axis),
    mistake("lse_without_maximum", _bare_lse),
    mistake("lse_in_base_two", _base_two),
    mistake(
        "all_of_lse_in_base_two",
        lambda scores: (softmax(scores)[0], softmax(scores)[1] / np.log(2)),
    ),
    mistake("maximum_at_least_zero", _maximum_from_zero),
)

CAUSAL = (
    mistake("strict", lambda queries, keys: (keys < queries[:, None]).astype(float)),
    mistake("upper_triangular", lambda queries, keys: (keys >= queries[:, None]).astype(float)),
    mistake("true_means_hidden", lambda queries, keys: (keys > queries[:, None]).astype(float)),
    mistake("transposed", lambda queries, keys: (keys[:, None] <= queries).astype(float)),
    mistake("indices_for_positions", lambda queries, keys: np.tri(len(queries), len(keys))),
    mistake(
        "triangle_shifted",
        lambda queries, keys: np.tri(len(queries), len(keys), int(queries[0] - keys[0])),
    ),
)

WINDOW = (
    mistake("window_ignored", lambda queries, keys, window: (keys <= queries[:, None]).astype(float)),
    mistake("window_one_too_wide", lambda queries, keys, window: _within(queries, keys, window + 1)),
    mistake(
        "window_to_both_sides",
        lambda queries, keys, window: (np.abs(keys - queries[:, None]) < window).astype(float),
    ),
    mistake(
        "window_by_index",
        lambda queries, keys, window: _within(np.arange(len(queries)), np.arange(len(keys)), window),
    ),
)

ATTENTION = (
    mistake("no_scale", _scaled(lambda D: 1.0)),
    mistake("scale_by_D", _scaled(lambda D: 1 / D)),
    mistake("mask_inverted", _inverted),
    mistake("mask_ignored", lambda q, k, v, *, mask=None: grouped(q, k, v)),
    mistake("mask_after_softmax", _mask_after),
    mistake("mask_times_scores", _multiplied),
    mistake("finite_number_for_hidden", _finite_hidden(-1e9)),
    *(
        replace(
            mistake("finite_number_for_hidden"),
            name=f"finite_number_{number:.0e}",
            imitate=_finite_hidden(number),
        )
        for number in (-1e4, -1e10, -1e20, -1e30, float(np.finfo(np.float32).min))
    ),
    mistake("blind_row_is_nan", _with(_nan_row)),
    mistake("mask_of_first_batch", _first_mask),
    mistake("softmax_without_maximum", _with(_no_maximum)),
)

CAP = (
    mistake("cap_ignored", lambda q, k, v, *, mask, cap: grouped(q, k, v, mask=mask)),
    mistake(
        "cap_after_hiding",
        lambda q, k, v, *, mask, cap: grouped(
            q, k, v, mask=mask, rows=lambda scores: softmax(cap * np.tanh(scores / cap))
        ),
    ),
    mistake(
        "cap_before_scale",
        lambda q, k, v, *, mask, cap: grouped(
            q,
            k,
            v,
            scale=1.0,
            rows=lambda scores: softmax(_hide(cap * np.tanh(scores / cap) * q.shape[-1] ** -0.5, mask)),
        ),
    ),
    mistake(
        "cap_without_its_factor",
        lambda q, k, v, *, mask, cap: grouped(
            q, k, v, rows=lambda scores: softmax(_hide(np.tanh(scores / cap), mask))
        ),
    ),
    mistake(
        "clips_at_the_cap",
        lambda q, k, v, *, mask, cap: grouped(
            q, k, v, rows=lambda scores: softmax(_hide(np.clip(scores, -cap, cap), mask))
        ),
    ),
)

GROUPED = (
    mistake("copies_for_every_head"),
    mistake("heads_dealt_round_robin", _choose(lambda h, K: h % K)),
    mistake("first_kv_head_for_all", _choose(lambda h, K: 0 * h)),
    mistake(
        "first_batch_for_all",
        lambda q, k, v, *, mask=None: grouped(q, k[[0] * len(k)], v[[0] * len(k)], mask=mask),
    ),
    mistake("forgets_the_mask", lambda q, k, v, *, mask=None: grouped(q, k, v)),
    mistake("mask_repeated", _mask_repeated),
    mistake("finite_number_for_hidden", _finite_hidden(-1e9)),
    mistake("blind_row_is_nan", _with(_nan_row)),
)
