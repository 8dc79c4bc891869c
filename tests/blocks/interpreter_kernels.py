"""Kernels of one operation each, for checks of Triton's interpreter."""

from __future__ import annotations

import threading

import triton
import triton.language as tl

from ringlab.blocks.triton.interpreter import repair

repair()

# The next names tell the test that a kernel is running; the interpreter can call any Python function.
inside, both_running = threading.Event(), threading.Barrier(2)
PATIENCE = 0.2
"""Seconds that a kernel waits for one of another thread, which never comes where launches take turns."""


def meet() -> None:
    """Wait a moment for a kernel of another thread to arrive here."""
    inside.set()
    try:
        both_running.wait(PATIENCE)
    except threading.BrokenBarrierError:
        return  # no other kernel runs, as it should be


@triton.jit
def convert(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(x + i, mask=i < n, other=0)
    tl.store(y + i, number.to(y.dtype.element_ty), mask=i < n)


@triton.jit
def arithmetic(x, y, out, n, OPERATION: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n, other=0)
    b = tl.load(y + i, mask=i < n, other=0)
    if OPERATION == "add":
        c = a + b
    if OPERATION == "sub":
        c = a - b
    if OPERATION == "mul":
        c = a * b
    if OPERATION == "div":
        c = a / b
    if OPERATION == "neg":
        c = -a
    if OPERATION == "abs":
        c = tl.abs(a)
    if OPERATION == "lt":
        c = a < b
    if OPERATION == "le":
        c = a <= b
    if OPERATION == "eq":
        c = a == b
    if OPERATION == "ne":
        c = a != b
    if OPERATION == "where":
        c = tl.where(a > b, a, b)
    if OPERATION == "fmax":
        c = tl.maximum(a, b)
    if OPERATION == "fmin":
        c = tl.minimum(a, b)
    if OPERATION == "maximum":
        c = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    if OPERATION == "clamp":
        c = tl.clamp(a, -b, b)
    if OPERATION == "clamp all":
        c = tl.clamp(a, -b, b, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + i, c.to(out.dtype.element_ty), mask=i < n)


@triton.jit
def fused(x, y, z, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.fma(tl.load(x + i), tl.load(y + i), tl.load(z + i)))


@triton.jit
def product(x, y, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(x + m[:, None] * K + k[None, :])
    b = tl.load(y + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(a, b, input_precision="ieee"))


@triton.jit
def reduced(x, out, OPERATION: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    a = tl.load(x + m[:, None] * N + n[None, :])
    if OPERATION == "sum":
        tl.store(out + m, tl.sum(a, 1))
    if OPERATION == "sum of columns":
        tl.store(out + n, tl.sum(a, 0))
    if OPERATION == "max":
        tl.store(out + m, tl.max(a, 1).to(out.dtype.element_ty))
    if OPERATION == "min":
        tl.store(out + m, tl.min(a, 1).to(out.dtype.element_ty))
    if OPERATION == "argmax":
        value, place = tl.max(a, 1, return_indices=True)
        tl.store(out + m, value.to(out.dtype.element_ty))
        tl.store(out + M + m, place.to(out.dtype.element_ty))


@triton.jit
def scaled(out, scale):
    tl.store(out, scale * scale * 3.0)


@triton.jit
def partly_loaded(x, out, n, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    if OTHER:
        tl.store(out + i, tl.load(x + i, mask=i < n, other=7))
    else:
        tl.store(out + i, tl.load(x + i, mask=i < n))


@triton.jit
def looping(bounds, out):
    begin = tl.load(bounds)
    end = tl.load(bounds + 1)
    total = 0
    for i in tl.range(begin, end, 2):
        total += i
    for _ in range(begin, end):
        total += 1000
    while begin < end:
        begin += 1
        total += 100000
    tl.store(out, total)


@triton.jit
def summing(x, out, times, BLOCK: tl.constexpr):
    total = 0.0
    for _ in tl.range(0, times):
        total += tl.sum(tl.load(x + tl.arange(0, BLOCK)), 0)
    tl.store(out, total)


@triton.jit
def numbered(out):
    meet()
    tl.store(out + tl.program_id(0), tl.program_id(0) + 1)
    meet()


@triton.jit
def doubled(x, out):
    number = tl.load(x + tl.arange(0, 2))
    tl.store(out + tl.arange(0, 2), number + number)
