"""Exercise 01: the checks of softmax, the causal mask, attention and grouped heads.

Inputs are float32, and the right values come from the float64 oracle. The plainest float32 implementation is
run with eight orders of its sums. A tolerance is twice its worst error, so that other correct formulas pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab import oracle
from ringlab_course.checking.answers import compare_with, expect_array, expect_tuple, relative_error
from ringlab_course.checking.diagnosis import Answered, compare_all
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.numbers import largest, rounding, roundings
from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.exercises.e01_naive_attention import plain

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Subject

mistake = mistakes_of("01")

NAMES = ("out", "lse")


def check_softmax_small(subject: Subject, rng: np.random.Generator) -> None:
    """Check weights and lse of a few scores."""
    for shape in ((1, 2), (2, 3), (2, 2, 5)):
        _compare_softmax(subject, _normal(rng, *shape))


def check_softmax_large(subject: Subject, rng: np.random.Generator) -> None:
    """Check that scores near ±1000 neither overflow nor vanish."""
    for shift in (100.0, 1000.0, -1000.0):
        _compare_softmax(subject, _normal(rng, 2, 3) + np.float32(shift), f"scores near {shift:g}, ")


def check_softmax_spread(subject: Subject, rng: np.random.Generator) -> None:
    """Check two rows whose scores are far from each other's, so that each row needs its own maximum."""
    # in this range, exp does not overflow even if the maximum is not subtracted
    scores = _normal(rng, 2, 3) + np.array([[60.0], [-60.0]], np.float32)
    _compare_softmax(subject, scores, "row 0 near 60 and row 1 near -60, ")


def check_softmax_masked(subject: Subject, rng: np.random.Generator) -> None:
    """Check that a row that sees no key has weights 0 and lse −inf."""
    for columns in (2, 4):
        scores = _normal(rng, 3, columns)
        scores[0, 1:] = scores[1] = -np.inf
        _compare_softmax(subject, scores, "row 0 sees one key and row 1 sees none (all -inf), ")


def check_softmax_mixed(subject: Subject, rng: np.random.Generator) -> None:
    """Check softmax on many shapes, with large scores and masked rows."""
    for shape in ((2, 1), (7, 64), (2, 3, 5, 9), (3, 1024)):
        scores = _normal(rng, *shape) * np.float32(20) + rng.choice([-900, 0, 900], (*shape[:-1], 1)).astype(
            np.float32
        )
        hidden = rng.random(shape) < 0.3
        hidden.reshape(-1, shape[-1])[0] = True
        scores[hidden] = -np.inf
        _compare_softmax(subject, scores, "large scores, some rows see no key, ")


def check_mask_origin(subject: Subject, rng: np.random.Generator) -> None:
    """Check masks for queries and keys that are in order and begin at the same position."""
    sizes = (2, 3), (4, 4)  # unequal sizes come first, because there a transposed mask has another shape
    _compare_masks(subject, rng, [(range(queries), range(keys)) for queries, keys in sizes])


def check_mask_positions(subject: Subject, rng: np.random.Generator) -> None:
    """Check masks for queries and keys that come from different places of the text."""
    cases = [
        ([4, 6], [1, 4, 5, 8]),  # here no two known mistakes give the same answer
        ([2, 3], [0, 1]),
        ([0, 1], [2, 3]),
        ([0, 1, 6, 7], [2, 3, 4, 5]),
        (np.sort(_some(rng, 20, 3)), np.sort(_some(rng, 20, 5))),
    ]
    _compare_masks(subject, rng, cases)


def check_mask_window(subject: Subject, rng: np.random.Generator) -> None:
    """Check masks with a window of positions, which includes the query's own position."""
    cases = [
        ([3, 5], [1, 2, 3, 4, 6], 2),
        ([9, 2, 5], [5, 1, 8, 4, 2, 7], 4),
        ([0, 1], [0, 1], 1),
        (_some(rng, 20, 4), _some(rng, 20, 6), int(rng.integers(2, 9))),
    ]
    _compare_masks(subject, rng, cases)


def check_mask_any(subject: Subject, rng: np.random.Generator) -> None:
    """Check masks for any positions in any order."""
    cases = [(_some(rng, 64, queries), _some(rng, 64, keys)) for queries, keys in ((5, 4), (17, 31), (40, 9))]
    _compare_masks(subject, rng, cases)


def check_attention_small(subject: Subject, rng: np.random.Generator) -> None:
    """Check attention with one head and a few tokens."""
    for lengths in ((1, 2), (2, 3), (5, 5)):
        _compare_attention(subject, rng, (1, 1, 1), lengths, 2)


def check_attention_heads(subject: Subject, rng: np.random.Generator) -> None:
    """Check that batch entries and heads are not mixed."""
    _compare_attention(subject, rng, (2, 3, 3), (4, 6), 16)


def check_attention_mask(subject: Subject, rng: np.random.Generator) -> None:
    """Check that hidden keys get no weight and that the other weights add up to 1."""
    for n in (2, 6):
        mask = np.tri(n, dtype=bool)
        _compare_attention(subject, rng, (1, 2, 2), (n, n), 4, mask=mask, note="causal mask, ")
    mask = np.stack([np.tri(3, dtype=bool), ~np.tri(3, k=-2, dtype=bool)])[:, None]
    _compare_attention(subject, rng, (2, 2, 2), (3, 3), 4, mask=mask, note="a mask per batch entry, ")


def check_attention_blind(subject: Subject, rng: np.random.Generator) -> None:
    """Check that a query that sees no key has out 0 and lse −inf."""
    for n in (2, 5):
        mask = np.tri(n, k=-1, dtype=bool)  # query 0 sees nothing
        _compare_attention(subject, rng, (1, 1, 1), (n, n), 4, mask=mask, note="query 0 sees no key, ")


def check_attention_sharp(subject: Subject, rng: np.random.Generator) -> None:
    """Check attention with large scores."""
    for n in (3, 33):
        _compare_attention(
            subject, rng, (1, 2, 2), (n, n), 8, gain=30, mask=np.tri(n, dtype=bool), note="large scores, "
        )


def check_attention_cap(subject: Subject, rng: np.random.Generator) -> None:
    """Check attention with capped scores, with and without a mask."""
    for n, cap in ((2, 5.0), (6, 3.0)):
        for mask in (None, np.tri(n, dtype=bool)):
            _compare_capped(subject, rng, n, cap, mask)


def check_attention_any(subject: Subject, rng: np.random.Generator) -> None:
    """Check attention where Lq differs from Lk and each batch entry has its own mask."""
    for lengths, D in (((1, 7), 3), ((13, 29), 5), ((40, 11), 64)):
        mask = rng.random((2, 1, *lengths)) < 0.6
        mask[:, :, 0] = False
        _compare_attention(subject, rng, (2, 3, 3), lengths, D, mask=mask, note="a mask per batch entry, ")


def check_grouped_pairs(subject: Subject, rng: np.random.Generator) -> None:
    """Check attention in which 4 query heads share 2 key/value heads."""
    for B, lengths in ((1, (1, 2)), (2, (3, 4))):
        _compare_attention(subject, rng, (B, 4, 2), lengths, 4)


def check_grouped_extremes(subject: Subject, rng: np.random.Generator) -> None:
    """Check the two extremes: K = H is plain attention, K = 1 is multi-query attention."""
    _compare_attention(subject, rng, (1, 3, 3), (2, 3), 4)
    _compare_attention(subject, rng, (1, 4, 1), (2, 3), 4)


def check_grouped_mask(subject: Subject, rng: np.random.Generator) -> None:
    """Check that the mask is applied to every head."""
    mask = np.tri(4, k=-1, dtype=bool)
    _compare_attention(subject, rng, (1, 4, 2), (4, 4), 4, mask=mask, note="causal without the diagonal, ")


def check_grouped_memory(subject: Subject, rng: np.random.Generator) -> None:
    """Check that keys and values are not copied for every query head."""
    H, Lk, D = 32, 1024, 64
    for K in (1, 2):  # np.broadcast_to followed by reshape copies with K = 2, but not with K = 1
        q, k, v = (_normal(rng, 1, heads, length, D) for heads, length in ((H, 1), (K, Lk), (K, Lk)))
        measured, copy = subject.measure(q, k, v), H * Lk * D * k.itemsize
        sizes = f"B=1, H={H}, K={K}, Lq=1, Lk={Lk}, D={D}"
        _expect_attention(measured.answer, q, k, v, None, sizes)
        if measured.peak_bytes >= copy // 2:
            raise mistake("copies_for_every_head").failure(
                f"{sizes}: {measured.peak_bytes / 1e6:.1f} MB at once; k has {k.nbytes / 1e6:.1f} MB, and a copy for "
                f"every query head would have {copy / 1e6:.1f} MB"
            )


def check_grouped_any(subject: Subject, rng: np.random.Generator) -> None:
    """Check grouped attention with other numbers of heads and batches, and random masks."""
    for heads, lengths in (((2, 6, 3), (5, 9)), ((1, 8, 2), (16, 16)), ((3, 6, 2), (7, 2))):
        mask = rng.random(lengths) < 0.6
        _compare_attention(subject, rng, heads, lengths, 8, gain=5, mask=mask, note="a random mask, ")


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _compare_softmax(subject: Subject, scores: np.ndarray, note: str = "") -> None:
    truth = softmax_truth(scores)
    orders = _orders(scores.shape[-1])
    results = ((plain.softmax(scores[..., order]), (truth[0][..., order], truth[1])) for order in orders)
    answer = expect_tuple(subject.call(scores), ("weights", "lse"))
    compare_with(
        answer,
        truth,
        bound=_bounds(results, truth, scores.shape[-1]),
        names=("weights", "lse"),
        case=f"{note}scores of shape {scores.shape}",
    )


def _bounds(results: Iterable[tuple[Any, Any]], truth: tuple[Any, Any], keys: int) -> list[float]:
    """Return the allowed errors of out (or weights) and lse: twice the worst error among `results`.

    results: pairs (result, truth). An allowed error is never below four units in the last place of lse,
    because adding the maximum rounds lse. np.logaddexp rounds lse by up to half a unit at every key, and
    these errors add up like a random walk. An honest answer may compute weights as e^(score − lse), and such
    weights are as inexact as lse.
    """
    worst = [[relative_error(*part) for part in zip(*pair, strict=True)] for pair in results]
    least = roundings(truth, max(4.0, math.sqrt(keys) / 2) * max(8.0, largest(truth[1])))
    return [max(low, *(2 * error for error in errors)) for low, *errors in zip(least, *worst, strict=True)]


def softmax_truth(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the oracle's weights and lse, from attention whose keys and values are the unit vectors."""
    visible, unit = (
        np.isfinite(scores).reshape(1, 1, -1, scores.shape[-1]),
        np.eye(scores.shape[-1])[None, None],
    )
    rows = np.where(visible, scores.reshape(visible.shape), 0.0)
    weights, lse = oracle.attention(rows, unit, unit, mask=visible, scale=1.0)
    return weights.reshape(scores.shape), lse.reshape(scores.shape[:-1])


def _some(rng: np.random.Generator, below: int, count: int) -> np.ndarray:
    """Return `count` different positions below `below`, in any order."""
    return rng.choice(below, count, replace=False)


def _compare_masks(
    subject: Subject,
    rng: np.random.Generator,
    cases: Iterable[tuple[Any, ...]],
) -> None:
    """Compare the learner's masks with the right ones.

    A case is (queries, keys) or (queries, keys, window). Its positions are moved to a random place of a long
    text.
    """
    compare_all(_mask_case(subject, int(rng.integers(1000)), *case) for case in cases)


def _mask_case(subject: Subject, start: int, queries: Any, keys: Any, window: int | None = None) -> Answered:
    queries, keys = start + np.asarray(queries), start + np.asarray(keys)
    keywords = {} if window is None else {"window": window}
    case = f"queries at positions {queries.tolist()}, keys at {keys.tolist()}"
    case += "" if window is None else f", window {window}"
    answer, shape = subject.call(queries, keys, **keywords), (len(queries), len(keys))
    if shape[0] != shape[1] and getattr(answer, "shape", ()) == shape[::-1]:
        raise mistake("transposed").failure(f"{case}: shape {answer.shape}, should be {shape}")
    answer = expect_array(answer, shape, name="the mask")
    if answer.dtype != np.bool_:
        raise Failure(
            "The mask should be boolean: True where a query may see a key.", f"{case}: dtype {answer.dtype}"
        )
    truth = _mask_truth(queries, keys, window)
    return Answered(answer.astype(float), truth, 0.0, names=("mask",), text=case)


def _mask_truth(queries: np.ndarray, keys: np.ndarray, window: int | None) -> np.ndarray:
    back = queries[:, None] - keys
    return ((back >= 0) & (back < (np.inf if window is None else window))).astype(float)


def _compare_capped(
    subject: Subject, rng: np.random.Generator, n: int, cap: float, mask: np.ndarray | None
) -> None:
    """Compare the learner's capped attention with the oracle.

    The oracle gets the capped scores as queries and unit vectors as keys and values, so that it returns the
    weights.
    """
    q, k, v = _normal(rng, 1, 2, n, 8) * np.float32(8), _normal(rng, 1, 2, n, 8), _normal(rng, 1, 2, n, 8)
    scores = q.astype(float) @ k.astype(float).swapaxes(-1, -2) / 8**0.5
    unit = np.broadcast_to(np.eye(n), scores.shape)
    weights, lse = oracle.attention(cap * np.tanh(scores / cap), unit, unit, mask=mask, scale=1.0)
    truth = weights @ v, lse
    keywords = {"mask": mask, "cap": cap}
    compare_with(
        subject.call(q, k, v, **keywords),
        truth,
        # the slope of tanh is at most 1, so it does not magnify the error of a score
        bound=rounding(truth, 4 * largest(scores)),
        names=NAMES,
        case=f"cap={cap:g}, {'no' if mask is None else 'causal'} mask, L={n}, D=8",
    )


def _compare_attention(
    subject: Subject,
    rng: np.random.Generator,
    heads: tuple[int, int, int],
    lengths: tuple[int, int],
    D: int,
    *,
    mask: np.ndarray | None = None,
    gain: float = 1.0,
    note: str = "",
) -> None:
    """Compare the learner's attention with the oracle on random q, k and v.

    `heads` is (B, H, K), and `lengths` is (Lq, Lk).
    """
    (B, H, K), (Lq, Lk) = heads, lengths
    q, k, v = (
        _normal(rng, B, H, Lq, D) * np.float32(gain),
        _normal(rng, B, K, Lk, D),
        _normal(rng, B, K, Lk, D),
    )
    case = f"{note}B={B}, H={H}, K={K}, Lq={Lq}, Lk={Lk}, D={D}"
    _expect_attention(subject.call(q, k, v, mask=mask), q, k, v, mask, case)


def _expect_attention(answer: Any, q: Any, k: Any, v: Any, mask: Any, case: str) -> None:
    truth = oracle.attention(q, k, v, mask=mask)
    results = ((_reordered(q, k, v, mask, order), truth) for order in _orders(k.shape[2]))
    compare_with(
        answer,
        truth,
        bound=_bounds(results, truth, k.shape[2]),
        names=NAMES,
        case=case,
    )


def _reordered(q: Any, k: Any, v: Any, mask: Any, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the plain float32 result with all sums, over keys and over the head dim, in another order."""
    seen = mask if mask is None else mask[..., order]
    dims = np.random.default_rng(int(order[0])).permutation(q.shape[-1])
    scale = np.float32(q.shape[-1] ** -0.5)
    return plain.attention(
        (q * scale)[..., dims], k[:, :, order][..., dims], v[:, :, order], mask=seen, scale=1.0
    )


def _orders(n: int) -> list[np.ndarray]:
    """Return eight orders of n keys. The rounding of a sum depends on the order, the truth does not."""
    ahead, shuffle = np.arange(n), np.random.default_rng(n)
    return [ahead, ahead[::-1], *(shuffle.permutation(n) for _ in range(6))]
