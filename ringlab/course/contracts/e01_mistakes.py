"""Exercise 01: the plain implementation in NumPy, and the common mistakes as small changes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringlab.course.contract import Misconception

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
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = np.where(mask, scores, q.dtype.type(hidden))
    weights, lse = rows(scores)
    return weights @ v, lse


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


def _nan_row(scores: np.ndarray) -> Pair:
    top = scores.max(-1, keepdims=True)
    powers = np.exp(scores - top)
    total = powers.sum(-1, keepdims=True)
    return powers / total, (np.log(total) + top)[..., 0]


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


def _mask_after(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, mask: np.ndarray | None = None) -> Pair:
    if mask is None:
        return grouped(q, k, v)
    _, lse = grouped(q, k, v)
    return grouped(q, k, v, rows=lambda scores: (softmax(scores)[0] * mask, softmax(scores)[1]))[0], lse


def _multiplied(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, mask: np.ndarray | None = None) -> Pair:
    return grouped(q, k, v, rows=lambda scores: softmax(scores if mask is None else scores * mask))


def _inverted(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, mask: np.ndarray | None = None) -> Pair:
    return grouped(q, k, v, mask=None if mask is None else ~mask)


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


BLIND_IS_MEAN = (
    "A query that sees no key got the mean of all values. A large finite number in place of -inf cancels when it is "
    "the maximum of its own row, and softmax turns it into equal weights; use -inf and handle that row: out 0, lse -inf."
)
BLIND_IS_NAN = (
    "A row that sees no key came out as NaN: its maximum is -inf, and -inf - (-inf) is NaN. "
    "Take 0 for such a maximum, and do not divide by a sum that is 0: weights (and out) 0, lse -inf."
)

SOFTMAX = (
    Misconception(
        "zero_by_zero",
        "The weights of a row that sees no key are NaN, though its lse is right. Either you take away its own maximum, "
        "and -inf - (-inf) is NaN; or its terms are all 0, and so is their sum: 0/0. Such a row has weights 0.",
        _zero_by_zero,
    ),
    Misconception(
        "no_maximum",
        "You take exp of the scores as they are: exp overflows to inf above 88 in float32 and "
        "is 0 below -104. Take each row's maximum away first; the weights do not change.",
        _no_maximum,
    ),
    Misconception(
        "one_maximum_for_all",
        "You take away one maximum for all rows. A row far below it underflows to 0/0; "
        "every row needs its own maximum (axis=-1, keepdims=True).",
        _one_maximum,
    ),
    Misconception("masked_row_is_nan", BLIND_IS_NAN, _nan_row),
    Misconception(
        "masked_row_is_uniform",
        "A row that sees no key got equal weights. A large finite number in place of "
        "-inf cancels with the row's own maximum; such a row has weights 0 and lse -inf.",
        _uniform_row,
    ),
    *(
        Misconception(
            "adds_to_the_sum" if number == 1e-9 else f"adds_{number:.0e}_to_the_sum",
            "You add a small number to the sum. It keeps the division from failing, but lse then has a finite value "
            "where no key was seen, as if there were mass. Leave the sum alone, and treat a sum of 0 apart.",
            _added_to_the_sum(number),
        )
        for number in (1e-9, 1e-5, 1e-6, 1e-7, 1e-8, 1e-10, 1e-12, 1e-16, 1e-20, 1e-30)
    ),
    Misconception(
        "wrong_axis",
        "Your weights add up to 1 over the queries, not over the keys. The keys are the last axis.",
        _wrong_axis,
    ),
    Misconception(
        "lse_without_maximum",
        "The weights are right, but lse misses the maximum that you took away: "
        "lse = m + ln of the sum of exp(s - m).",
        _bare_lse,
    ),
    Misconception("lse_in_base_two", "lse is a natural logarithm here; you used log2.", _base_two),
    Misconception(
        "maximum_at_least_zero",
        "Your maximum starts at 0, so a row whose scores are all far below 0 "
        "underflows and counts as masked. Only a maximum of -inf may be replaced by 0.",
        _maximum_from_zero,
    ),
)

CAUSAL = (
    Misconception(
        "strict",
        "Your queries cannot see themselves: a token may see keys at its own position too (<=).",
        lambda queries, keys: (keys < queries[:, None]).astype(float),
    ),
    Misconception(
        "upper_triangular",
        "You show each query the keys at and after its position. Causal is the lower "
        "triangle: keys at or before the query.",
        lambda queries, keys: (keys >= queries[:, None]).astype(float),
    ),
    Misconception(
        "true_means_hidden",
        "Your mask is True where a key is hidden. Here True means: may be seen.",
        lambda queries, keys: (keys > queries[:, None]).astype(float),
    ),
    Misconception(
        "transposed",
        "Your mask has a row for every key. It should have a row for every query and a column for every key.",
        lambda queries, keys: (keys[:, None] <= queries).astype(float),
    ),
    Misconception(
        "indices_for_positions",
        "You compare places in the block, not positions in the text. Query 0 of a block "
        "is not token 0 once the sequence is cut: compare the positions you are given.",
        lambda queries, keys: np.tri(len(queries), len(keys)),
    ),
)

WINDOW = (
    Misconception(
        "window_ignored",
        "The window changes nothing in your mask: keys further back than it are hidden too.",
        lambda queries, keys, window: (keys <= queries[:, None]).astype(float),
    ),
    Misconception(
        "window_one_too_wide",
        "Your window is one too wide. The query's own position counts: with window 1 a token sees itself only.",
        lambda queries, keys, window: _within(queries, keys, window + 1),
    ),
    Misconception(
        "window_to_both_sides",
        "Your window lets queries look ahead. It only takes away: causal as before, and not too far back.",
        lambda queries, keys, window: (np.abs(keys - queries[:, None]) < window).astype(float),
    ),
)

ATTENTION = (
    Misconception(
        "no_scale",
        "The scores are not divided by √D. Their spread grows as √D, and softmax becomes too sharp.",
        _scaled(lambda D: 1.0),
    ),
    Misconception("scale_by_D", "You divide the scores by D; it should be √D.", _scaled(lambda D: 1 / D)),
    Misconception(
        "mask_inverted",
        "You hide the keys that may be seen. The mask is True where a query MAY see a key.",
        _inverted,
    ),
    Misconception(
        "mask_ignored",
        "The mask changes nothing in your result: hidden keys still get weight.",
        lambda q, k, v, *, mask=None: grouped(q, k, v),
    ),
    Misconception(
        "mask_after_softmax",
        "You set hidden weights to 0 after softmax, so the rest no longer adds up to 1 and "
        "lse still counts hidden keys. Hide the scores before softmax.",
        _mask_after,
    ),
    Misconception(
        "mask_times_scores",
        "You multiply the scores by the mask. A hidden score becomes 0, and e^0 = 1: that key still gets weight. "
        "Hidden scores must be -inf.",
        _multiplied,
    ),
    Misconception("finite_number_for_hidden", BLIND_IS_MEAN, _finite_hidden(-1e9)),
    *(
        Misconception(f"finite_number_{number:.0e}", BLIND_IS_MEAN, _finite_hidden(number))
        for number in (-1e4, -1e10, -1e20, -1e30, float(np.finfo(np.float32).min))
    ),
    Misconception("blind_row_is_nan", BLIND_IS_NAN, _with(_nan_row)),
    Misconception(
        "mask_of_first_batch",
        "You use the mask of batch entry 0 for all. A mask may have a batch and a head "
        "axis: let it broadcast.",
        lambda q, k, v, *, mask=None: grouped(q, k, v, mask=mask[:1]),
    ),
    Misconception(
        "softmax_without_maximum",
        "exp overflows for large scores: use a softmax that takes each row's maximum away first.",
        _with(_no_maximum),
    ),
)

CAP = (
    Misconception(
        "cap_ignored",
        "The cap changes nothing in your result: scores go through cap · tanh(score / cap) before softmax.",
        lambda q, k, v, *, mask, cap: grouped(q, k, v, mask=mask),
    ),
    Misconception(
        "cap_after_hiding",
        "You cap after hiding: tanh(-inf) is -1, so a hidden score becomes -cap and its key gets weight. "
        "Cap the scores first, then hide.",
        lambda q, k, v, *, mask, cap: grouped(
            q, k, v, mask=mask, rows=lambda scores: softmax(cap * np.tanh(scores / cap))
        ),
    ),
    Misconception(
        "cap_before_scale",
        "You cap the scores before they are divided by √D. Divide first: the cap holds for the scores that softmax sees.",
        lambda q, k, v, *, mask, cap: grouped(
            q,
            k,
            v,
            scale=1.0,
            rows=lambda scores: softmax(_hide(cap * np.tanh(scores / cap) * q.shape[-1] ** -0.5, mask)),
        ),
    ),
    Misconception(
        "clips_at_the_cap",
        "You clip at the cap, so that all scores beyond it become equal. tanh keeps their order: cap · tanh(score / cap).",
        lambda q, k, v, *, mask, cap: grouped(
            q, k, v, rows=lambda scores: softmax(_hide(np.clip(scores, -cap, cap), mask))
        ),
    ),
)

GROUPED = (
    Misconception(
        "copies_for_every_head",
        "You copy k and v for every query head, but grouped heads are there to keep keys and values small. Give q an "
        "axis for the group and let (B, K, H/K, Lq, D) broadcast against (B, K, 1, Lk, D): nothing is copied.",
    ),
    Misconception(
        "heads_dealt_round_robin",
        "You deal query heads to K/V heads round-robin (h mod K, as np.tile does). "
        "Neighbouring query heads share a K/V head: h // (H/K), as np.repeat does.",
        _choose(lambda h, K: h % K),
    ),
    Misconception(
        "first_kv_head_for_all", "All your query heads use K/V head 0.", _choose(lambda h, K: 0 * h)
    ),
    Misconception(
        "first_batch_for_all",
        "All your batch entries use the keys and values of entry 0.",
        lambda q, k, v, *, mask=None: grouped(q, k[[0] * len(k)], v[[0] * len(k)], mask=mask),
    ),
    Misconception(
        "forgets_the_mask",
        "The heads are grouped rightly, but the mask does not reach the scores.",
        lambda q, k, v, *, mask=None: grouped(q, k, v),
    ),
    Misconception("finite_number_for_hidden", BLIND_IS_MEAN, _finite_hidden(-1e9)),
    Misconception("blind_row_is_nan", BLIND_IS_NAN, _with(_nan_row)),
)
