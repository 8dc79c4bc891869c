"""Exercise 10: the rule that `accept` should follow, and the common mistakes made in its place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ringlab.course.contract import Misconception
from ringlab.course.contracts import e10_mistakes as plain
from ringlab.viz import error_runs

FACTOR = 2.0
"""How many times the plainest implementation's error is allowed."""


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax(q kᵀ / √D) v with every tensor in q's dtype: the plainest implementation."""
    return torch.softmax(q @ k.T * q.shape[-1] ** -0.5, -1) @ v


def allowed_for(q: Tensor, k: Tensor, v: Tensor) -> float:
    """Return the relative error that the rule allows: FACTOR times the plainest's, and at least one rounding."""
    return max(FACTOR * error_of(naive(q, k, v), q, k, v), torch.finfo(q.dtype).eps)


def error_of(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Return the relative error of `out` against the float64 oracle."""
    return plain.relative_error(out, torch.from_numpy(error_runs.truth(q, k, v)))


def _same_dtype_truth(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    right = naive(q, k, v)
    return plain.relative_error(out, right.double()) <= 4 * torch.finfo(q.dtype).eps


def _unscaled_yardstick(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    unscaled = torch.softmax(q @ k.T, -1) @ v
    return error_of(out, q, k, v) <= FACTOR * error_of(unscaled, q, k, v)


def _no_floor(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    return error_of(out, q, k, v) <= FACTOR * error_of(naive(q, k, v), q, k, v)


def _eps_only(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    return error_of(out, q, k, v) <= torch.finfo(q.dtype).eps


def _grows_with_length(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    return error_of(out, q, k, v) <= len(k) * torch.finfo(q.dtype).eps


def _float32_yardstick(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    return error_of(out, q, k, v) <= max(
        FACTOR * error_of(naive(q.float(), k.float(), v.float()), q, k, v), 1e-6
    )


def _bf16_yardstick(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    narrow = naive(q.bfloat16(), k.bfloat16(), v.bfloat16())
    return error_of(out, q, k, v) <= FACTOR * error_of(narrow, q, k, v)


def _allclose(atol: float, rtol: float) -> Callable[..., bool]:
    def imitate(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
        right = torch.from_numpy(error_runs.truth(q, k, v))
        return torch.allclose(out.double(), right, atol=atol, rtol=rtol)

    return imitate


def _fixed(bound: float) -> Callable[..., bool]:
    return lambda out, q, k, v: error_of(out, q, k, v) <= bound


def _blind_to_nan(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    right = torch.from_numpy(error_runs.truth(q, k, v))
    return not float((out.double() - right).norm() / right.norm()) > allowed_for(q, k, v)


ATOL = (
    "You compare with a fixed absolute tolerance. How large attention's output is depends on v and on how many keys share the "
    "weight: where it is small, wrong results pass, even zeros; where it is large, no right one does."
)
ACCEPT = (
    Misconception(
        "blind_to_nan",
        "A result with NaN was accepted: `error > bound` is false for NaN. Ask for `error <= bound`.",
        _blind_to_nan,
    ),
    Misconception("atol_1e-2", ATOL, _allclose(1e-2, 1e-5)),
    Misconception(
        "atol_and_rtol",
        "An absolute and a relative tolerance, both guessed: float32 results that were rounded to bfloat16 on the way pass, and so "
        "do small ones that are simply wrong. Derive the tolerance from the dtype and these inputs.",
        _allclose(1e-2, 1e-2),
    ),
    Misconception(
        "atol_0_1",
        "With an absolute tolerance of 0.1, zeros pass as the attention over some hundred keys: their outputs are that small.",
        _allclose(0.1, 1e-5),
    ),
    Misconception(
        "fixed_relative",
        "A relative tolerance, but the same for every dtype and input: in float32 it lets results pass that somebody rounded to "
        "bfloat16 on the way, and in bfloat16 large scores exceed it honestly.",
        _fixed(1e-2),
    ),
    Misconception(
        "eps_only",
        "You allow one rounding of the dtype. But every score is rounded before it stands in an exponent: an honest "
        "implementation is off by several roundings, by more the larger the scores are. Measure one.",
        _eps_only,
    ),
    Misconception(
        "grows_with_S",
        "A tolerance of S · eps is a worst case in which all roundings point the same way. They do not; with 1,000 keys in "
        "bfloat16 it accepts anything, zeros too.",
        _grows_with_length,
    ),
    Misconception(
        "truth_in_the_same_dtype",
        "You compare with an attention in the dtype of the inputs. In bfloat16 that is further from the truth than the result it "
        "judges. The truth is the float64 oracle; the plain attention only says how far off is honest.",
        _same_dtype_truth,
    ),
    Misconception(
        "yardstick_in_float32",
        "Your yardstick is a float32 attention, also for bfloat16 inputs: then no bfloat16 result is good enough. Run the plainest "
        "implementation in the dtype of q.",
        _float32_yardstick,
    ),
    Misconception(
        "yardstick_in_bf16",
        "Your yardstick is a bfloat16 attention, also for float32 inputs: then whoever rounds to bfloat16 on the way passes as float32. "
        "Run the plainest implementation in the dtype of q.",
        _bf16_yardstick,
    ),
    Misconception(
        "yardstick_is_wrong",
        "Your yardstick is no attention: without 1/√D in its scores it is off by tens of percent, and so much you then allow.",
        _unscaled_yardstick,
    ),
    Misconception(
        "no_floor",
        "The plainest implementation was right here by luck, and any multiple of no error is none. Allow one rounding always.",
        _no_floor,
    ),
    Misconception(
        "too_wide",
        "Your tolerance is many times the error of the plainest implementation, and wrong results fit into it. Twice is enough.",
    ),
    Misconception("always", "You accept everything.", lambda out, q, k, v: True),
    Misconception("never", "You reject everything, right results too.", lambda out, q, k, v: False),
)
