"""Common mistakes in one step of the ring, each with a function that makes the same one, in float64."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ringlab import oracle
from ringlab.course.contract import Misconception

State = tuple[np.ndarray, np.ndarray]


def attend(q, k, v, mask=None, scale=None) -> State:
    """The partial (out, lse) of one block."""
    return tuple(oracle.attention(q, k, v, mask=mask, scale=scale))


def merged(a: State, b: State) -> State:
    """The partial over the keys of both."""
    with np.errstate(all="ignore"):
        lse = np.logaddexp(a[1], b[1])
        weights = [np.where(np.isneginf(part[1]), 0.0, np.exp(part[1] - lse))[..., None] for part in (a, b)]
    return a[0] * weights[0] + b[0] * weights[1], lse


def fold(parts: Iterable[State]) -> State:
    """All partials merged in order."""
    first, *rest = parts
    for part in rest:
        first = merged(first, part)
    return first


def _averages(q, k, v, out, lse, mask=None) -> State:
    here = attend(q, k, v, mask)
    return (oracle.float64(out) + here[0]) / 2, np.logaddexp(oracle.float64(lse), here[1])


def _adds(q, k, v, out, lse, mask=None) -> State:
    here = attend(q, k, v, mask)
    return oracle.float64(out) + here[0], np.logaddexp(oracle.float64(lse), here[1])


def _drops_state(q, k, v, out, lse, mask=None) -> State:
    return attend(q, k, v, mask)


def _no_scale(q, k, v, out, lse, mask=None) -> State:
    return merged((oracle.float64(out), oracle.float64(lse)), attend(q, k, v, mask, scale=1.0))


def _inverted(q, k, v, out, lse, mask=None) -> State:
    here = attend(q, k, v, None if mask is None else ~np.asarray(mask))
    return merged((oracle.float64(out), oracle.float64(lse)), here)


def _wrong_groups(q, k, v, out, lse, mask=None) -> State:
    group = q.shape[1] // k.shape[1]
    k, v = (np.tile(oracle.float64(x), (1, group, 1, 1)) for x in (k, v))
    return merged((oracle.float64(out), oracle.float64(lse)), attend(q, k, v, mask))


STEP = (
    Misconception(
        "averages_partials",
        "You averaged the two outputs. A block in which the query found heavier keys must count for more: "
        "the weight of a partial is e^(its lse − the joint lse), and the two weights add up to one.",
        _averages,
    ),
    Misconception(
        "adds_partials",
        "You added the two outputs. Both are already normalised, so their sum weighs every key as if the "
        "other block did not exist; scale each by e^(its lse − the joint lse) first.",
        _adds,
    ),
    Misconception(
        "drops_the_state",
        "You returned the result of this block alone: what earlier steps found is lost. Merge the block's "
        "partial into (out, lse).",
        _drops_state,
    ),
    Misconception(
        "forgets_the_scale",
        "The scores are not divided by √D: this is what you get with scale 1.",
        _no_scale,
    ),
    Misconception(
        "nan_in_blind_rows",
        "There is a NaN in a row that sees no key of this block. There the largest score and the joint lse can "
        "be −inf, and −inf − (−inf) is NaN. Such a row must come out as it went in.",
    ),
    Misconception(
        "mask_inverted",
        "The mask is taken the wrong way round: the keys that should be hidden are seen, and the others are not. True "
        "means that the query may see the key, so what gets −inf is where the mask is False: masked_fill(~mask, −inf).",
        _inverted,
    ),
    Misconception(
        "finite_mask",
        "A row that has seen no key at all came out as a finite number: masking with a large negative number "
        "instead of −inf makes all its weights equal. It must stay (0, −inf), the identity of the merge.",
    ),
    Misconception(
        "ignores_groups",
        "With fewer K/V heads than query heads, heads were paired in the wrong order: query head h reads K/V head "
        "h // (H // K), so neighbours share one.",
        _wrong_groups,
    ),
    Misconception(
        "overflows",
        "Large scores overflow: exp of a raw score or of a raw lse is infinite beyond 88 in float32. Subtract a "
        "maximum before exp, and join with logaddexp.",
    ),
    Misconception(
        "low_precision_state",
        "out or lse were rounded to bfloat16 on the way. Every step rounds again, and a step of bfloat16 near 4 is "
        "0.03: convert q, k and v with .float() first and keep the state in float32.",
    ),
)
