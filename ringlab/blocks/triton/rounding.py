"""Exact arithmetic for Triton's interpreter: the replacements that `interpreter.repair` installs.

The interpreter keeps a bfloat16 number as the 16 bits of a uint16 and computes with those bits as integers.
Here each operation widens the numbers to float32, which is exact. It computes in float32, and rounds once,
to nearest with ties to even. Handles are the interpreter's `TensorHandle`s.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Operation = Callable[..., Any]


def _widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the numbers with these bfloat16 bits; a bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _narrow(numbers: NDArray[Any]) -> NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 of each number, ties to even; NaN becomes 0x7FC0, as in torch.

    The float32 bits are rounded as integers. A carry then runs from the mantissa into the exponent, and from
    the largest number to infinity, which is the correct result.
    """
    single = np.ascontiguousarray(numbers, dtype=np.float32)
    bits = single.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(0x7FC0), rounded)


def _fused(x: NDArray[Any], y: NDArray[Any], z: NDArray[Any]) -> NDArray[np.float64]:
    """Return x·y + z in float64 for numbers of at most 32 bits. The caller rounds it once to their dtype.

    The product is exact in float64. The sum is rounded to odd: an inexact sum becomes the neighbour with an
    odd last bit, which a later rounding to half as many bits cannot mistake for a tie.
    """
    product, z = np.broadcast_arrays(np.multiply(x, y, dtype=np.float64), np.asarray(z, np.float64))
    total = product + z
    back = total - product
    error = (product - (total - back)) + (z - back)
    even = (total.view(np.int64) & 1) == 0
    inexact = np.isfinite(total) & (error != 0)
    return np.where(inexact & even, np.nextafter(total, np.copysign(np.inf, error)), total)


def _is_bfloat16(interpreter: ModuleType, *handles: Any) -> bool:
    return any(handle.dtype.scalar == interpreter.tl.bfloat16 for handle in handles)


def _widened(interpreter: ModuleType, handle: Any) -> Any:
    """Return the handle in float32 if it contains bfloat16, and otherwise unchanged."""
    if not _is_bfloat16(interpreter, handle):
        return handle
    return interpreter.TensorHandle(_widen(handle.data), interpreter.tl.float32)


def _cast(interpreter: ModuleType, original: Operation) -> Operation:
    """Return a cast that rounds numbers, including integers, to the nearest bfloat16, and widens exactly."""
    tl = interpreter.tl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        target = dst_type.scalar
        if src.dtype.scalar == target:
            return src
        src = _widened(interpreter, src)
        if target == tl.bfloat16:
            return interpreter.TensorHandle(_narrow(src.data), target)
        return original(self, src, dst_type) if src.dtype.scalar != target else src

    return cast_impl


def _binary(interpreter: ModuleType, original: Operation) -> Operation:
    """Return operations on two bfloat16 numbers. Comparisons return an int1, for all other dtypes too."""
    handle, tl = interpreter.TensorHandle, interpreter.tl

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if _is_bfloat16(interpreter, lhs, rhs):
            out = op(_widened(interpreter, lhs).data, _widened(interpreter, rhs).data)
            return handle(out, tl.int1) if out.dtype == np.bool_ else handle(_narrow(out), tl.bfloat16)
        result = original(self, lhs, rhs, op)
        return handle(result.data, tl.int1) if result.data.dtype == np.bool_ else result

    return binary_op


def _unary(interpreter: ModuleType, original: Operation) -> Operation:
    """Return operations on one bfloat16 number. Before Triton 3.8 the only one is |x|, which is correct."""

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        if _is_bfloat16(interpreter, arg):
            return interpreter.TensorHandle(_narrow(op(_widen(arg.data))), arg.dtype.scalar)
        return original(self, arg, op)

    return unary_op


def _dot(interpreter: ModuleType, original: Operation) -> Operation:
    """Return the matrix product of bfloat16 numbers.

    Products are exact in float32, and are added in float32.
    """

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, _widened(interpreter, a), _widened(interpreter, b), *rest)

    return create_dot


def _fma(interpreter: ModuleType, original: Operation) -> Operation:
    """Return a fused multiply-add that rounds once."""

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        kind = z.dtype.scalar
        if kind == interpreter.tl.float64 or not kind.is_floating():
            return original(self, x, y, z)
        total = _fused(*(_widened(interpreter, each).data for each in (x, y, z)))
        if kind != interpreter.tl.bfloat16:
            return interpreter.TensorHandle(total.astype(z.data.dtype), kind)
        return interpreter.TensorHandle(_narrow(_odd_single(total)), kind)

    return create_fma


def _odd_single(numbers: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return float64 numbers rounded to odd in float32, so that they can be rounded again."""
    single = numbers.astype(np.float32)
    error = numbers - single
    even = (single.view(np.int32) & 1) == 0
    inexact = np.isfinite(single) & np.isfinite(error) & (error != 0)
    toward = np.copysign(np.float32(np.inf), error).astype(np.float32)
    return np.where(inexact & even, np.nextafter(single, toward), single)


def _nan_loses(operation: np.ufunc) -> Callable[[ModuleType, Operation], Operation]:
    """Return the repair that makes tl.maximum or tl.minimum prefer a number to NaN, as on a GPU."""

    def make(interpreter: ModuleType, original: Operation) -> Operation:
        return lambda self, lhs, rhs: self.binary_op(lhs, rhs, operation)

    return make


def _clamp(interpreter: ModuleType, original: Operation) -> Operation:
    """Return tl.clamp as a maximum and a minimum, also for bfloat16.

    NaN becomes the lower bound or propagates.
    """

    def create_clampf(self: Any, arg: Any, lo: Any, hi: Any, propagate_nans: Any) -> Any:
        silent = propagate_nans == interpreter._ir.PROPAGATE_NAN.NONE
        bigger, smaller = (np.fmax, np.fmin) if silent else (np.maximum, np.minimum)
        return self.binary_op(self.binary_op(arg, lo, bigger), hi, smaller)

    return create_clampf


def _sum(interpreter: ModuleType, original: Operation) -> Operation:
    """Return a sum that adds 16-bit numbers in float32 and rounds once."""
    tl = interpreter.tl

    def reduce_sum(self: Any, numbers: Any) -> Any:
        if numbers.dtype not in (tl.float16, tl.bfloat16):
            return original(self, numbers)
        return _retyped(
            interpreter, original(self, _retyped(interpreter, numbers, tl.float32)), numbers.dtype
        )

    return reduce_sum


def _min_max(interpreter: ModuleType, original: Operation) -> Operation:
    """Return maximum and minimum along an axis, with index, also for bfloat16.

    There is no warning if all are NaN.
    """
    quiet = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}
    tl = interpreter.tl

    def min_max(self: Any, numbers: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        if numbers.dtype != tl.bfloat16:
            return original(self, numbers, quiet.get(val_reduce_op, val_reduce_op), idx_reduce_op)
        best, index = original(self, _retyped(interpreter, numbers, tl.float32), val_reduce_op, idx_reduce_op)
        return _retyped(interpreter, best, tl.bfloat16), index

    return min_max


def _retyped(interpreter: ModuleType, tensor: Any, kind: Any) -> Any:
    """Return a tensor, a block or a number, cast to another dtype."""
    tl = interpreter.tl
    handle = interpreter.interpreter_builder.cast_impl(tensor.handle, kind)
    return tl.tensor(handle, tl.block_type(kind, tensor.shape) if tensor.type.is_block() else kind)


_BUILDER = "InterpreterBuilder"
_PAIR = ("self", "lhs", "rhs")
_CLAMPED = ("self", "arg", "lo", "hi", "propagate_nans")
_EVER = (0, 0)
REPAIRS: tuple[tuple[Any, ...], ...] = (  # the fields of interpreter.Repair
    ("casts", _BUILDER, "cast_impl", ("self", "src", "dst_type"), _cast),
    ("two operands", _BUILDER, "binary_op", (*_PAIR, "op"), _binary),
    ("one operand", _BUILDER, "unary_op", ("self", "arg", "op"), _unary, (3, 8)),
    ("dots", _BUILDER, "create_dot", ("self", "a", "b", "d"), _dot),
    ("fused multiply-add", _BUILDER, "create_fma", ("self", "x", "y", "z"), _fma),
    ("maximum", _BUILDER, "create_maxnumf", _PAIR, _nan_loses(np.fmax), _EVER, (3, 8)),
    ("minimum", _BUILDER, "create_minnumf", _PAIR, _nan_loses(np.fmin), _EVER, (3, 8)),
    ("clamp of NaN", _BUILDER, "create_clampf", _CLAMPED, _clamp, _EVER, (3, 8)),
    ("clamp of bfloat16", _BUILDER, "create_clampf", _CLAMPED, _clamp, (3, 9)),
    ("sums", "ReduceOps", "sum", ("self", "input"), _sum),
    ("maxima", "ReduceOps", "min_max", ("self", "input", "val_reduce_op", "idx_reduce_op"), _min_max),
)
