"""Read a learner's answer: check its type, compare its values, and name the mistake behind wrong values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ringlab.errors import apart
from ringlab_course.checking.failures import Failure

Arrays = dict[str, np.ndarray]
Bound = float | Sequence[float]
"""The relative error that is allowed: one for all parts of an answer, or one for each."""
WHOLE = 1e15
"""Whole numbers below this are printed with all their digits."""


def expect_array(
    answer: Any, shape: Sequence[int], *, name: str = "the result", dtype: Any = None
) -> np.ndarray:
    """Return `answer` as a NumPy array (bfloat16 as float32).

    Raises: Failure if `answer` is None, is not an array, or has another shape or dtype than expected.
    """
    if answer is None:
        raise Failure(f"{name} is None: is the `return` missing?")
    if isinstance(answer, (tuple, list)):
        raise Failure(f"{name} should be one array, but is a {type(answer).__name__} of {len(answer)}.")
    if not hasattr(answer, "shape") or not hasattr(answer, "dtype"):
        raise Failure(f"{name} should be an array, but is a {type(answer).__name__}.")
    if tuple(answer.shape) != tuple(shape):
        raise Failure(
            f"{name} has the wrong shape.", f"shape {tuple(answer.shape)}, should be {tuple(shape)}"
        )
    if dtype is not None and _dtype_name(answer.dtype) != _dtype_name(dtype):
        raise Failure(f"{name} should be {_dtype_name(dtype)}, but is {_dtype_name(answer.dtype)}.")
    return to_numpy(answer)


def expect_tuple(answer: Any, names: Sequence[str], *, name: str = "the result") -> tuple[Any, ...]:
    """Return `answer` as a tuple of `len(names)` parts. Raises: Failure if it is anything else."""
    wanted = f"a tuple ({', '.join(names)})"
    if answer is None:
        raise Failure(f"{name} is None, should be {wanted}: is the `return` missing?")
    parts = _parts(answer)
    if parts is None or (not isinstance(answer, (tuple, list)) and not dataclasses.is_dataclass(answer)):
        raise Failure(f"{name} should be {wanted}, but is one {type(answer).__name__}.")
    if len(parts) != len(names):
        raise Failure(f"{name} should be {wanted}, but has {len(parts)} parts.")
    return tuple(parts.values())


def expect_arrays(answer: Any, like: Sequence[Any], names: Sequence[str]) -> tuple[np.ndarray, ...]:
    """Return `answer` as arrays with the shapes of `like`. Raises: Failure if it is anything else."""
    parts = expect_tuple(answer, names)
    return tuple(
        expect_array(part, each.shape, name=name) for part, each, name in zip(parts, like, names, strict=True)
    )


def has_nan(*parts: Any) -> bool:
    """Return whether an array among `parts` holds NaN. Parts that are not arrays are ignored."""
    return any(np.isnan(array).any() for array in _floats(parts))


def is_finite(*parts: Any) -> bool:
    """Return whether the arrays among `parts` hold only finite numbers."""
    return all(np.isfinite(array).all() for array in _floats(parts))


def relative_error(got: Any, expected: Any) -> float:
    """Return the largest max |got − expected| / max |expected| of the parts; inf for a wrong NaN or inf."""
    left, right = named_arrays(got), named_arrays(expected)
    if len(left) != len(right):
        return float("inf")
    return max((_error(a, b) for a, b in zip(left.values(), right.values(), strict=True)), default=0.0)


def is_close(got: Any, expected: Any, bound: Bound) -> bool:
    """Return whether the relative error of each part of `got` is at most `bound`."""
    left, right = named_arrays(got), named_arrays(expected)
    limits = _of_parts(bound, right).values()
    triples = zip(left.values(), right.values(), limits, strict=False)
    return len(left) == len(right) and all(_error(a, b) <= limit for a, b, limit in triples)


def bound_from(plain: Any, truth: Any) -> float:
    """Return the tolerance for an answer: twice the error of the plainest implementation.

    `plain` is the result of that implementation in the learner's dtype, and `truth` is the result of the
    float64 oracle. The tolerance is never below four roundings of the dtype, because the plain result may be
    exact by luck.
    """
    eps = max(_epsilon(a) for a in named_arrays(plain, widen=False).values())
    return max(2 * relative_error(plain, truth), 4 * eps)


def compare_with(
    answer: Any,
    truth: Any,
    *,
    bound: Bound,
    names: Sequence[str] = (),
    case: str = "",
) -> None:
    """Return None if `answer` equals `truth` up to the relative error `bound`.

    `bound` is one number for all parts, or one for each part. `answer` and `truth` are arrays or tuples of
    arrays, and `names` names their parts. `case` describes the input in the counterexample. Compare small cases
    before large ones, so that the reported failure is the smallest. Raises: Failure.
    """
    got, expected = _aligned(answer, truth, names)
    bounds = _of_parts(bound, expected)
    if all(_error(got[name], expected[name]) <= bounds[name] for name in expected):
        return
    failure = Failure(_generic(got, expected, bounds), _counterexample(got, expected, bounds, case))
    failure.allowed = [*bounds.values()]
    raise failure


def resembles(got: Any, expected: Any, bound: Bound) -> bool:
    """Return whether `got` equals `expected` up to 4 · `bound`, the tolerance for known mistakes."""
    parts = named_arrays(expected)
    if not isinstance(bound, (int, float)) and len(bound) != len(parts):
        return False
    nears = _of_parts(bound, parts).values()
    return is_close(got, expected, [max(4 * each, 1e-6) for each in nears])


def named_arrays(value: Any, names: Sequence[str] = (), *, widen: bool = True) -> Arrays:
    """Return the arrays in `value` (an array, tuple, list or dataclass of arrays) by name, as float64."""
    parts = _parts(value)
    if parts is None:
        parts = {"the result": value}
    if names and len(names) == len(parts):
        parts = dict(zip(names, parts.values(), strict=True))
    arrays = {name: to_numpy(part) if widen else part for name, part in parts.items()}
    return {n: a.astype(np.float64) if widen and a.dtype.kind in "fiub" else a for n, a in arrays.items()}


def to_numpy(array: Any) -> np.ndarray:
    """Return `array` (torch or NumPy) as a NumPy array; bfloat16 and float16 tensors become float32."""
    if hasattr(array, "detach"):
        tensor = array.detach().cpu()
        return (tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor).numpy()
    return np.asarray(array)


def _floats(parts: Iterable[Any]) -> list[np.ndarray]:
    arrays = [to_numpy(part) for part in parts if hasattr(part, "shape") and hasattr(part, "dtype")]
    return [array for array in arrays if array.dtype.kind == "f"]


def _parts(value: Any) -> dict[str, Any] | None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, (tuple, list)):
        return {f"part {i}": part for i, part in enumerate(value)}
    return None


def _aligned(answer: Any, truth: Any, names: Sequence[str]) -> tuple[Arrays, Arrays]:
    expected = named_arrays(truth, names)
    if len(expected) > 1:
        parts = expect_tuple(answer, list(expected))
    else:
        parts = (answer,) if not isinstance(answer, (tuple, list)) or len(answer) != 1 else tuple(answer)
    got = {
        name: expect_array(part, expected[name].shape, name=name).astype(np.float64)
        for name, part in zip(expected, parts, strict=True)
    }
    return got, expected


def _of_parts(bound: Bound, parts: Iterable[str]) -> dict[str, float]:
    names = list(parts)
    bounds = [bound] * len(names) if isinstance(bound, (int, float)) else bound
    return dict(zip(names, map(float, bounds), strict=True))


def _error(got: np.ndarray, expected: np.ndarray) -> float:
    if got.shape != expected.shape:
        return float("inf")
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(got)):
        return float("inf")
    if not np.array_equal(got[~finite], expected[~finite], equal_nan=True):
        return float("inf")
    scale = np.max(np.abs(expected[finite]), initial=0.0)
    return float(np.max(np.abs(got[finite] - expected[finite]), initial=0.0) / (scale or 1.0))


def _generic(got: Arrays, expected: Arrays, bounds: Mapping[str, float]) -> str:
    wrong = [name for name in expected if _error(got[name], expected[name]) > bounds[name]]
    label = " and ".join(wrong)
    held = [name for name in expected if name not in wrong]
    rest = f"; {' and '.join(held)} {'is' if len(held) == 1 else 'are'} right" if held else ""
    if any(np.isnan(got[n]).any() and not np.isnan(expected[n]).any() for n in wrong):
        return f"{label}: there is a NaN where there should be none."
    if any(not np.array_equal(np.isinf(got[n]), np.isinf(expected[n])) for n in wrong):
        return f"{label}: an infinity is missing, or there is one where there should be none."
    return f"{label}: wrong values{rest}."


def _counterexample(got: Arrays, expected: Arrays, bounds: Mapping[str, float], case: str) -> str:
    lines = [case] if case else []
    for name, right in expected.items():
        error = _error(got[name], right)
        if error <= bounds[name]:
            continue
        where = _worst(got[name], right)
        index = ", ".join(map(str, where))
        place = f"{name}[{index}]" if where else name
        left, should = _told_apart(got[name][where], right[where])
        lines.append(f"{place}: got {left}, expected {should}")
        finite = right[np.isfinite(right)]
        # If all right values are whole numbers, as for counts and masks, there is no tolerance to report.
        if np.isfinite(error) and (finite != np.round(finite)).any():
            allowed = bounds[name] * (np.max(np.abs(finite)) or 1.0)
            off, most = apart(abs(got[name][where] - right[where]), allowed, digits=1, kind="e")
            lines.append(f"off by {off}, at most {most} allowed")
    return "\n".join(lines)


def _worst(got: np.ndarray, expected: np.ndarray) -> tuple[int, ...]:
    """Return the index of the first largest error. A wrong NaN or inf counts as the largest.

    Errors that differ only by rounding count as equal, so that every machine names the same element. Among whole
    numbers, such as slots and labels, the size of an error says little, so the first error is returned.
    """
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    if _are_whole(got) and _are_whole(expected):
        return tuple(int(i) for i in np.argwhere(~same)[0])
    with np.errstate(invalid="ignore"):
        distance = np.where(np.isfinite(got) & np.isfinite(expected), np.abs(got - expected), np.inf)
    distance[same] = 0.0
    near = distance >= (1 - 1e-6) * distance.max()
    return tuple(int(i) for i in np.argwhere(near)[0])


def _are_whole(array: np.ndarray) -> bool:
    return bool((array == np.round(array)).all())


def _told_apart(got: Any, expected: Any) -> tuple[str, str]:
    """Return both numbers as text with four digits, or with more digits if they would look equal.

    Whole numbers are printed with all their digits.
    """
    if all(float(x).is_integer() and abs(x) < WHOLE for x in (got, expected)):
        return f"{int(got):,}", f"{int(expected):,}"
    left, right = apart(got, expected, digits=4)
    return left, right


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.") if "torch" in str(dtype) else np.dtype(dtype).name


def _epsilon(array: Any) -> float:
    if hasattr(array, "detach"):
        import torch

        return float(torch.finfo(array.dtype).eps) if array.is_floating_point() else 0.0
    kind = np.asarray(array).dtype
    return float(np.finfo(kind).eps) if kind.kind == "f" else 0.0
