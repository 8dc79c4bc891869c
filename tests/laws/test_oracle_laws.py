"""The oracle agrees with the definition itself: with sums written out in Python, and with differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlab import oracle
from tests.laws.draw import SEEDS, Shape, refute, shapes

EPSILON = float(np.finfo(np.float64).eps)
Problem = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class Oracle:
    """The functions that the laws test; mutants override a method."""

    def attention(self, q: Any, k: Any, v: Any, **options: Any) -> oracle.Result:
        return oracle.attention(q, k, v, **options)

    def gradients(self, q: Any, k: Any, v: Any, dout: Any, **options: Any) -> oracle.Gradients:
        return oracle.gradients(q, k, v, dout, **options)


def problem(shape: Shape, seed: int) -> Problem:
    draw = np.random.default_rng(seed).standard_normal
    rows, keys = (shape.B, shape.H, shape.Lq, shape.D), (shape.B, shape.K, shape.Lk, shape.D)
    return draw(rows), draw(keys), draw(keys), draw(rows)


def random_mask(shape: Shape, seed: int) -> np.ndarray:
    """Return a mask in which about half of the pairs are visible and some rows see nothing."""
    generator = np.random.default_rng(seed)
    mask = generator.random((shape.B, shape.H, shape.Lq, shape.Lk)) < 0.5
    mask[:, :, generator.random(shape.Lq) < 0.2] = False
    return mask


def one_row(
    q: np.ndarray, keys: list[np.ndarray], values: list[np.ndarray], scale: float
) -> tuple[list[float], float]:
    """Return the attention of one query, term by term; math.fsum adds without intermediate rounding."""
    if not keys:
        return [0.0] * len(q), -math.inf
    scores = [scale * math.fsum(float(a) * float(b) for a, b in zip(q, key, strict=True)) for key in keys]
    top = max(scores)
    powers = [math.exp(score - top) for score in scores]
    total = math.fsum(powers)
    out = [
        math.fsum(p * float(v[d]) for p, v in zip(powers, values, strict=True)) / total for d in range(len(q))
    ]
    return out, top + math.log(total)


def law_equals_the_definition(
    subject: Oracle, shape: Shape, seed: int, causal: bool, masked: bool, temperature: float
) -> None:
    q, k, v, _ = problem(shape, seed)
    mask = random_mask(shape, seed) if masked else None
    scale = temperature * shape.D**-0.5
    out, lse = subject.attention(q, k, v, causal=causal, mask=mask, scale=scale)
    # The rounding of a score, D·ε of its absolute terms, is also the relative error of p; rows add Lk terms.
    rounding = EPSILON * (
        8 + shape.Lk + 2 * shape.D * scale * shape.D * np.abs(q).max() * np.abs(k).max(initial=0)
    )
    for b, h, i in np.ndindex(q.shape[:3]):
        g = h // (shape.H // shape.K)
        seen = [j for j in range(shape.Lk) if (not causal or j <= i) and (mask is None or mask[b, h, i, j])]
        row, row_lse = one_row(q[b, h, i], [k[b, g, j] for j in seen], [v[b, g, j] for j in seen], scale)
        assert np.abs(out[b, h, i] - row).max() <= rounding * np.abs(v).max(initial=0)
        assert lse[b, h, i] == row_lse or abs(lse[b, h, i] - row_lse) <= rounding


def law_gradient_is_the_slope(
    subject: Oracle, shape: Shape, seed: int, causal: bool, masked: bool, more: bool = False
) -> None:
    """The gradient along a random direction is the central difference of the loss Σ dout·out + Σ dlse·lse.

    more: cap scores and drop weights.
    """
    inputs = problem(shape, seed)
    q, k, v, dout = inputs
    options: dict[str, Any] = {"causal": causal, "mask": random_mask(shape, seed) if masked else None}
    if more:
        options |= {"softcap": 2.0, "factors": 1.25 * random_mask(shape, seed + 2)}
    generator = np.random.default_rng(seed + 1)
    dlse = generator.standard_normal(q.shape[:3])
    directions = [generator.standard_normal(x.shape) for x in (q, k, v)]

    def loss(step: float) -> float:
        moved = [x + step * d for x, d in zip((q, k, v), directions, strict=True)]
        out, lse = subject.attention(*moved, **options)
        return float((dout * out).sum() + (dlse * np.where(np.isfinite(lse), lse, 0.0)).sum())

    gradients = subject.gradients(q, k, v, dout, dlse=dlse, **options)
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))
    step = EPSILON ** (1 / 5)  # error of the five-point rule: step⁴ from the series, ε/step from rounding
    measured = (8 * (loss(step) - loss(-step)) - (loss(2 * step) - loss(-2 * step))) / (12 * step)
    size = (
        sum(float(np.abs(g * d).sum()) for g, d in zip(gradients, directions, strict=True))
        + np.abs(dout).sum()
    )
    fifth = 1 + max(float(np.abs(d).max(initial=0)) for d in directions[:2]) ** 5
    assert abs(slope - measured) <= 100 * fifth * size * EPSILON ** (4 / 5)


def law_caps_and_drops(subject: Oracle, shape: Shape, seed: int, causal: bool, cap: float) -> None:
    """The lse is that of all capped scores, and out sums only the kept weights, entry by entry."""
    q, k, v, _ = problem(shape, seed)
    kept = 1.25 * random_mask(shape, seed + 2)
    out, lse = subject.attention(q, k, v, causal=causal, softcap=cap, factors=kept)
    for b, h, i in np.ndindex(q.shape[:3]):
        g = h // (shape.H // shape.K)
        seen = [j for j in range(shape.Lk) if not causal or j <= i]
        scores = [cap * math.tanh(float(q[b, h, i] @ k[b, g, j]) * shape.D**-0.5 / cap) for j in seen]
        total = math.fsum(map(math.exp, scores))
        row = sum(
            kept[b, h, i, j] * math.exp(s) / total * v[b, g, j] for s, j in zip(scores, seen, strict=True)
        )
        assert lse[b, h, i] == pytest.approx(math.log(total), rel=1e-12, abs=1e-12)
        assert out[b, h, i] == pytest.approx(row, rel=1e-12, abs=1e-12)


def law_hidden_keys_do_not_matter(subject: Oracle, shape: Shape, seed: int, poison: float) -> None:
    """Results are bit for bit the same with any values at masked positions, even NaN."""
    q, k, v, dout = problem(shape, seed)
    hidden = np.random.default_rng(seed).random(shape.Lk) < 0.5
    mask = np.broadcast_to(~hidden, (shape.Lq, shape.Lk))
    clean = subject.attention(q, k, v, mask=mask), subject.gradients(q, k, v, dout, mask=mask)
    k, v = (np.where(hidden[:, None], poison, x) for x in (k, v))
    poisoned = subject.attention(q, k, v, mask=mask), subject.gradients(q, k, v, dout, mask=mask)
    for before, after in zip((*clean[0], *clean[1]), (*poisoned[0], *poisoned[1]), strict=True):
        assert np.array_equal(before, after)


def law_a_blind_row_is_zero(subject: Oracle, shape: Shape, seed: int) -> None:
    q, k, v, dout = problem(shape, seed)
    mask = np.ones((shape.Lq, shape.Lk), bool)
    mask[0] = False
    out, lse = subject.attention(q, k, v, mask=mask)
    assert (out[:, :, 0] == 0).all()
    assert (lse[:, :, 0] == -np.inf).all()
    only_row = np.where(np.arange(shape.Lq)[:, None] == 0, dout, 0.0)
    assert all((gradient == 0).all() for gradient in subject.gradients(q, k, v, only_row, mask=mask))


def law_a_nan_reaches_who_sees_it(subject: Oracle, shape: Shape, seed: int, token: int) -> None:
    """A NaN in k or v at key j reaches exactly the rows i ≥ j of the heads that read this key."""
    q, k, v, _ = problem(shape, seed)
    j, group = token % shape.Lk, shape.H // shape.K
    for poisoned in ("k", "v"):
        arrays = {"k": k.copy(), "v": v.copy()}
        arrays[poisoned][0, 0, j] = np.nan
        out, _ = subject.attention(q, arrays["k"], arrays["v"], causal=True)
        expected = np.zeros(q.shape[:3], bool)
        expected[0, :group, j:] = True
        assert np.array_equal(np.isnan(out).any(-1), expected)


def law_survives_loud_logits(subject: Oracle, shape: Shape, seed: int, loudness: float) -> None:
    """Scores in the thousands do not overflow, and the weights of each row still sum to 1."""
    q, k, _, _ = problem(shape, seed)
    ones = np.ones(k.shape)
    out, lse = subject.attention(q * loudness, k, ones)
    assert np.abs(out - 1).max() <= EPSILON * (8 + shape.Lk)
    assert np.isfinite(lse).all()


CASES = {"shape": shapes(8), "seed": SEEDS}


@given(**CASES, causal=st.booleans(), masked=st.booleans(), temperature=st.sampled_from([0.3, 1.0, 20.0]))
def test_equals_the_definition(
    shape: Shape, seed: int, causal: bool, masked: bool, temperature: float
) -> None:
    law_equals_the_definition(Oracle(), shape, seed, causal, masked, temperature)


@given(**CASES, causal=st.booleans(), masked=st.booleans(), more=st.booleans())
def test_gradient_is_the_slope(shape: Shape, seed: int, causal: bool, masked: bool, more: bool) -> None:
    law_gradient_is_the_slope(Oracle(), shape, seed, causal, masked, more)


@given(**CASES, causal=st.booleans(), cap=st.sampled_from([0.5, 3.0, 50.0]))
def test_capped_and_dropped_as_defined(shape: Shape, seed: int, causal: bool, cap: float) -> None:
    law_caps_and_drops(Oracle(), shape, seed, causal, cap)


@given(**CASES, poison=st.sampled_from([1e30, math.inf, -math.inf, math.nan]))
def test_hidden_keys_do_not_matter(shape: Shape, seed: int, poison: float) -> None:
    law_hidden_keys_do_not_matter(Oracle(), shape, seed, poison)
    law_a_blind_row_is_zero(Oracle(), shape, seed)


@given(**CASES, token=st.integers(0, 7), loudness=st.sampled_from([1.0, 100.0, 1e4]))
def test_nan_and_loud_logits(shape: Shape, seed: int, token: int, loudness: float) -> None:
    law_a_nan_reaches_who_sees_it(Oracle(), shape, seed, token)
    law_survives_loud_logits(Oracle(), shape, seed, loudness)


# Oracles with one fault each.


class Plain(Oracle):
    """softmax(scale·qkᵀ)v with the mask as an added number, and its gradient; mutants override methods."""

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


class NoMaximum(Plain):
    subtract_top = False


class BottomRight(Plain):
    def visible(self, q: Any, k: Any, causal: bool, mask: Any) -> np.ndarray:
        sees = np.tri(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], dtype=bool)
        return super().visible(q, k, False, mask) & (sees if causal else True)


class HeadsInTurn(Plain):
    """A mutant in which query head h reads key/value head h % K."""

    def heads(self, kv: np.ndarray, group: int) -> np.ndarray:
        return np.tile(kv, (1, group, 1, 1))


class NoDelta(Oracle):
    """A mutant in which dS = p·dP, without subtracting delta."""

    def gradients(self, q: Any, k: Any, v: Any, dout: Any, **options: Any) -> oracle.Gradients:
        out = oracle.attention(q, k, v, **{name: x for name, x in options.items() if name != "dlse"}).out
        options["dlse"] = options.get("dlse", 0.0) + (dout * out).sum(-1)
        return super().gradients(q, k, v, dout, **options)


class NoCapBackward(Oracle):
    def gradients(
        self, q: Any, k: Any, v: Any, dout: Any, softcap: Any = None, **options: Any
    ) -> oracle.Gradients:
        return super().gradients(q, k, v, dout, **options)


class DropsFromLse(Oracle):
    """A mutant that masks dropped keys, so that the other keys get their weight."""

    def attention(self, q: Any, k: Any, v: Any, factors: Any = None, **options: Any) -> oracle.Result:
        return super().attention(q, k, v, mask=None if factors is None else factors > 0, **options)


class LeaksToBlindRows(Oracle):
    def gradients(
        self, q: Any, k: Any, v: Any, dout: Any, mask: Any = None, **options: Any
    ) -> oracle.Gradients:
        return super().gradients(q, k, v, dout, **options)


SHAPES = [Shape(1, 4, 2, 5, 6, 4), Shape(2, 2, 1, 3, 5, 4), Shape(1, 1, 1, 4, 2, 4)]
DEFINITION = [
    (shape, 0, causal, masked, 2.0)
    for shape in SHAPES
    for causal in (True, False)
    for masked in (True, False)
]
MORE = [(shape, 0, causal, False, True) for shape in SHAPES for causal in (True, False)]
CAPPED = [(shape, 0, causal, 0.5) for shape in SHAPES for causal in (True, False)]
SLOPE = [(shape, 0, causal, False) for shape in SHAPES for causal in (True, False)]


@pytest.mark.parametrize(
    ("law", "mutant", "examples"),
    [
        (law_equals_the_definition, BottomRight(), DEFINITION),
        (law_equals_the_definition, HeadsInTurn(), DEFINITION),
        (law_gradient_is_the_slope, NoDelta(), SLOPE),
        (law_gradient_is_the_slope, NoCapBackward(), MORE),
        (law_caps_and_drops, DropsFromLse(), CAPPED),
        (law_hidden_keys_do_not_matter, Plain(), [(SHAPES[0], 0, math.nan)]),
        (law_a_blind_row_is_zero, LeaksToBlindRows(), [(SHAPES[0], 0)]),
        (law_a_nan_reaches_who_sees_it, Plain(), [(SHAPES[0], 0, 3)]),
        (law_survives_loud_logits, NoMaximum(), [(SHAPES[0], 0, 1e4)]),
    ],
)
def test_the_law_notices(law: Callable[..., None], mutant: Oracle, examples: list[Any]) -> None:
    refute(law, Oracle(), mutant, examples)


def test_the_plain_implementation_is_no_mutant_by_itself() -> None:
    for example in DEFINITION:
        law_equals_the_definition(Plain(), *example)
