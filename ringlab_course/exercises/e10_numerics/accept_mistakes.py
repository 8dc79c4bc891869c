"""Exercise 10: the rule that `accept` should follow, and the common mistakes made in its place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.exercises.e10_numerics import mistakes as plain
from ringlab_course.figures import error_runs

mistake = mistakes_of("10.accept")

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


ACCEPT = (
    mistake("blind_to_nan", _blind_to_nan),
    mistake("atol_1e-2", _allclose(1e-2, 1e-5)),
    mistake("atol_and_rtol", _allclose(1e-2, 1e-2)),
    mistake("atol_0_1", _allclose(0.1, 1e-5)),
    mistake("fixed_relative", _fixed(1e-2)),
    mistake("eps_only", _eps_only),
    mistake("grows_with_S", _grows_with_length),
    mistake("truth_in_the_same_dtype", _same_dtype_truth),
    mistake("yardstick_in_float32", _float32_yardstick),
    mistake("yardstick_in_bf16", _bf16_yardstick),
    mistake("yardstick_is_wrong", _unscaled_yardstick),
    mistake("no_floor", _no_floor),
    mistake("too_wide"),
    mistake("always", lambda out, q, k, v: True),
    mistake("never", lambda out, q, k, v: False),
)
