"""One check for each repair of Triton's interpreter: it passes with the repair and fails without."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import triton.runtime.interpreter as interpreter
from torch import Tensor

from tests.blocks import interpreter_kernels as kernels

BLOCK = 4096
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EDGES = (0.0, 1.0, 1e-45, 2.0**-126, 3.3895e38, 3.4e38, 3.4028235e38, torch.inf, torch.nan, 65504.0, 65520.0)


def same(got: Tensor, wanted: Tensor, *, zeros_alike: bool = False) -> bool:
    """Return whether two tensors have the same bits; all bit patterns of NaN count as equal.

    With `zeros_alike`, 0 and −0 count as equal, since no rule says which of the two is the maximum.
    """
    if got.dtype.is_floating_point and zeros_alike:
        got, wanted = got + 0, wanted + 0
    number = ~torch.isnan(wanted.double())
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[wanted.element_size()]
    equal = torch.equal(got[number].view(bits), wanted[number].view(bits))
    return got.dtype == wanted.dtype and equal and bool(torch.isnan(got[~number].double()).all())


def floats(dtype: torch.dtype, count: int = 2**14, seed: int = 0) -> Tensor:
    """Return numbers of every size: random bits, some of them near ties of a rounding, and edge cases."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    bits[: count // 4] &= np.uint32(0xFFFF8000)  # halfway between two bfloat16 numbers, or equal to one
    numbers = np.concatenate([bits.view(np.float32), np.float32(EDGES), -np.float32(EDGES)])
    numbers[np.isnan(numbers)] = np.nan  # quiet NaNs only; torch.fmax prefers a signaling NaN to a number
    return torch.from_numpy(numbers).to(dtype)


def launch(kernel: Any, *args: Any, count: int, **options: Any) -> None:
    kernel[(-(-count // BLOCK),)](*args, BLOCK=BLOCK, **options)


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    launch(kernels.convert, x, out, x.numel(), count=x.numel())
    return out


def computed(operation: str, x: Tensor, y: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype or x.dtype)
    launch(kernels.arithmetic, x, y, out, x.numel(), count=x.numel(), OPERATION=operation)
    return out


def casts() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16)
    for dtype in (FP32, FP64, FP16):
        assert same(converted(every, dtype), every.to(dtype)), f"bfloat16 to {dtype}"
    for dtype in (FP32, FP64, FP16):
        numbers = floats(FP32).to(dtype)
        assert same(converted(numbers, BF16), numbers.to(BF16)), f"{dtype} to bfloat16"
    whole = torch.arange(-70000, 70000, 7, dtype=torch.int32)
    assert same(converted(whole, BF16), whole.to(BF16)), "int32 to bfloat16"
    assert same(converted(whole.to(BF16), torch.int32), whole.to(BF16).to(torch.int32)), "bfloat16 to int32"


def two_operands() -> None:
    x, y = floats(BF16, seed=1), floats(BF16, seed=2)
    y[::3] = x[::3]
    for name in ("add", "sub", "mul", "div"):
        assert same(computed(name, x, y), getattr(torch, name)(x, y)), name
    assert same(computed("maximum", x, y), torch.maximum(x, y), zeros_alike=True)
    for name in ("lt", "le", "eq", "ne"):
        for dtype in (torch.bool, torch.float32, BF16):
            wanted = getattr(torch, name)(x, y).to(dtype)
            assert same(computed(name, x, y, dtype), wanted), f"{name} as {dtype}"
    assert same(computed("where", x, y), torch.where(x > y, x, y)), "where"
    single, other = x.float(), y.float()
    assert same(computed("lt", single, other, BF16), (single < other).to(BF16)), "a comparison of float32"


def one_operand() -> None:
    x = floats(BF16)
    x = x[x != 0]  # Triton before 3.8 negates by subtracting from 0, so −0 is excluded
    assert same(computed("neg", x, x), -x)
    assert same(computed("abs", x, x), x.abs())


def dots() -> None:
    draw = torch.Generator().manual_seed(0)
    # Whole numbers below 2¹²: every sum of their products is exact in float32, in any order.
    x = torch.randint(-64, 64, (32, 64), generator=draw)
    y = torch.randint(-64, 64, (64, 16), generator=draw)
    for dtype in (BF16, FP16, FP32):
        out = torch.empty(32, 16)
        kernels.product[(1,)](x.to(dtype), y.to(dtype), out, M=32, N=16, K=64)
        assert same(out, (x @ y).float()), f"{dtype}"


def nearest(exact: Fraction, dtype: torch.dtype) -> float:
    """Return the number of `dtype` nearest to a fraction, and the even one of two at the same distance."""
    guess = torch.tensor(float(exact), dtype=dtype)
    around = [
        guess,
        *(torch.nextafter(guess.float(), torch.tensor(s * torch.inf)).to(dtype) for s in (1, -1)),
    ]
    if dtype != FP32:  # torch has no nextafter for 16-bit dtypes, so add 1 to their bits
        bits = guess.view(torch.int16)
        around = [guess, (bits + 1).view(dtype), (bits - 1).view(dtype)]
    bits_of = torch.int32 if dtype == FP32 else torch.int16
    around = [number for number in around if torch.isfinite(number)]
    return float(min(around, key=lambda n: (abs(Fraction(float(n)) - exact), int(n.view(bits_of)) & 1)))


def fused_multiply_add() -> None:
    for dtype in (FP32, FP16, BF16):
        draw = torch.Generator().manual_seed(3)
        x, y, z = torch.randn(3, BLOCK, generator=draw).to(dtype)
        # x·y is on a tie or close to one, and z breaks the tie only in the last place.
        x[::2] = 1 + torch.finfo(dtype).eps
        y[::2] = 1 + torch.finfo(dtype).eps * torch.arange(BLOCK // 2).remainder(8) / 2
        z[::2] = torch.where(z[::2] > 0, 1, -1) * torch.finfo(dtype).eps ** 3
        out = torch.empty_like(x)
        launch(kernels.fused, x, y, z, out, count=BLOCK)
        for i in range(0, BLOCK, 5):
            a, b, c = (Fraction(float(t[i])) for t in (x, y, z))
            assert float(out[i]) == nearest(a * b + c, dtype), f"{dtype}: {x[i]}·{y[i]} + {z[i]}"


def _with_nan(operation: str, wanted: Callable[[Tensor, Tensor], Tensor]) -> None:
    for dtype in (FP32, FP16, BF16):
        x, y = floats(dtype, seed=1), floats(dtype, seed=2)
        x[::5], y[::7] = torch.nan, torch.nan
        x[::9], y[::9] = 1.0, torch.nan
        assert same(computed(operation, x, y, dtype), wanted(x, y), zeros_alike=True), f"{dtype}"


def maximum() -> None:
    _with_nan("fmax", torch.fmax)


def minimum() -> None:
    _with_nan("fmin", torch.fmin)


def clamp() -> None:
    for dtype in (FP32, FP16, BF16):
        x, y = floats(dtype, seed=1), floats(dtype, seed=2).abs().nan_to_num(1.0) + 1
        assert same(computed("clamp", x, y, dtype), torch.fmin(torch.fmax(x, -y), y)), f"{dtype}"
        assert same(computed("clamp all", x, y, dtype), torch.clamp(x, -y, y)), f"{dtype}, NaN kept"


def along_an_axis(operation: str, x: Tensor, count: int = 1) -> Tensor:
    out = torch.empty(count * x.shape[0], dtype=x.dtype)
    kernels.reduced[(1,)](x, out, OPERATION=operation, M=x.shape[0], N=x.shape[1])
    return out


def sums() -> None:
    """Sums are taken in float32: a 16-bit sum would lose every number after the big first one."""
    x = torch.ones(32, 32)
    x[:, 0] = x[0] = 4096 + 32 * torch.arange(32)
    for dtype in (FP16, BF16):
        for axis, name in ((1, "sum"), (0, "sum of columns")):
            rounded = x.to(dtype)
            assert same(along_an_axis(name, rounded), rounded.float().sum(axis).to(dtype)), (
                f"{name} in {dtype}"
            )


def maxima() -> None:
    for dtype in (FP32, FP16, BF16):
        x = floats(dtype, count=64 * 32 - 2 * len(EDGES)).reshape(64, 32).nan_to_num(0.0)
        both = torch.cat([x.max(1).values, x.max(1).indices.to(dtype)])
        assert same(along_an_axis("argmax", x, 2), both), f"index in {dtype}"
    for dtype in (FP32, FP16, BF16):
        x = floats(dtype, count=64 * 32 - 2 * len(EDGES)).reshape(64, 32)
        x[::2, ::3] = torch.nan
        x[5] = torch.nan
        for name, worst in (("max", -torch.inf), ("min", torch.inf)):
            wanted = getattr(torch.where(torch.isnan(x), worst, x), name)(1).values
            wanted[5] = torch.nan
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert same(along_an_axis(name, x), wanted), f"{name} in {dtype}"


def threads() -> None:
    """Two kernels can run at once: each waits, in the middle of its program, for the other one to run.

    Without the repair, the kernel that ends first removes the functions that the other kernel still needs.
    """
    kernels.both_running.reset()
    kernels.inside.clear()
    outs = [torch.zeros(1 + 2 * i, dtype=torch.int32) for i in range(2)]
    failures: list[BaseException] = []

    def run(out: Tensor) -> None:
        try:
            kernels.numbered[(out.numel(),)](out)
        except Exception as failure:
            failures.append(failure)
        finally:
            kernels.both_running.abort()  # frees a thread whose partner has failed

    started = [threading.Thread(target=run, args=(out,)) for out in outs]
    for thread in started:
        thread.start()
        assert kernels.inside.wait(60)
    for thread in started:
        thread.join()
    assert not failures
    for out in outs:
        assert out.tolist() == list(range(1, out.numel() + 1))


def device_calls() -> None:
    """The changes that a launch makes to triton.language do not grow with its number of `tl.sum`s."""
    counts = []
    original = interpreter._patch_builtin
    for times in (1, 2, 8):  # the first launch meets functions that are not yet rewritten
        calls: list[Any] = []
        interpreter._patch_builtin = lambda *args, calls=calls: (calls.append(args), original(*args))[1]
        try:
            out = torch.empty(1)
            kernels.summing[(1,)](torch.ones(8), out, times, BLOCK=8)
        finally:
            interpreter._patch_builtin = original
        assert out.item() == 8 * times
        counts.append(len(calls))
    assert counts[1] == counts[2]


def overflow_checks() -> None:
    """A sum of integers takes one addition and no overflow check; 2³¹ − 1 + 1 wraps, as on a GPU."""
    x = torch.tensor([1, 2**31 - 1], dtype=torch.int32)
    steps: list[Any] = []
    original = interpreter.InterpreterBuilder.binary_op

    def counted(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        steps.append(op)
        return original(self, lhs, rhs, op)

    interpreter.InterpreterBuilder.binary_op = counted
    try:
        out = torch.empty_like(x)
        kernels.doubled[(1,)](x, out)
    finally:
        interpreter.InterpreterBuilder.binary_op = original
    assert out.tolist() == [2, -2]
    assert steps == [np.add]


def loop_bounds() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    kernels.looping[(1,)](torch.tensor([3, 8], dtype=torch.int32), out)
    assert out.item() == 3 + 5 + 7 + 5 * 1000 + 5 * 100000


def float_arguments() -> None:
    """A float argument is a float32 number: three times its square differs between float32 and float64."""
    out = torch.empty(1)
    for scale in torch.linspace(0.05, 0.95, 10, dtype=FP64).tolist():
        kernels.scaled[(1,)](out, scale)
        single = torch.tensor(scale, dtype=FP32)
        assert same(out, (single * single * 3.0)[None]), f"{scale}"


def masked_loads() -> None:
    for dtype in (FP32, FP16, BF16, FP64, torch.int32):
        x, out = torch.arange(1, 9).to(dtype), torch.empty(8, dtype=dtype)
        kernels.partly_loaded[(1,)](x, out, 5, OTHER=True, BLOCK=8)
        assert out.tolist() == [1, 2, 3, 4, 5, 7, 7, 7], f"{dtype} with other"
        kernels.partly_loaded[(1,)](x, out, 8, OTHER=False, BLOCK=8)
        assert same(out, x), f"{dtype}, nothing masked"
        kernels.partly_loaded[(1,)](x, out, 5, OTHER=False, BLOCK=8)
        assert same(out[:5], x[:5])
        assert not dtype.is_floating_point or torch.isnan(out[5:]).all(), f"{dtype} without other"


CHECKS: dict[str, Callable[[], None]] = {
    "threads": threads,
    "device calls": device_calls,
    "overflow checks": overflow_checks,
    "loop bounds": loop_bounds,
    "float arguments": float_arguments,
    "masked loads": masked_loads,
    "casts": casts,
    "two operands": two_operands,
    "one operand": one_operand,
    "dots": dots,
    "fused multiply-add": fused_multiply_add,
    "maximum": maximum,
    "minimum": minimum,
    "clamp of NaN": clamp,
    "clamp of bfloat16": clamp,
    "sums": sums,
    "maxima": maxima,
}
