"""Common mistakes in one step of the ring, each with a function that makes the same one, in float64."""

from __future__ import annotations

import numpy as np

from ringlab import oracle
from ringlab_course.checking.partials import State, attend, merged
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("05.step")


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
    mistake("averages_partials", _averages),
    mistake("adds_partials", _adds),
    mistake("drops_the_state", _drops_state),
    mistake("forgets_the_scale", _no_scale),
    mistake("nan_in_blind_rows"),
    mistake("mask_inverted", _inverted),
    mistake("finite_mask"),
    mistake("ignores_groups", _wrong_groups),
    mistake("overflows"),
    mistake("low_precision_state"),
)
