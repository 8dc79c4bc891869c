"""Kernels whose loads and stores are easy to list by hand."""

from __future__ import annotations

import triton
import triton.language as tl

from ringlab.blocks.triton.interpreter import repair

repair()


@triton.jit
def copy(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def unmasked_copy(x, y, shift, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i + shift))


@triton.jit
def add_rows(q, k, out, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = rows[:, None] * stride + columns[None, :]
    total = tl.load(q + inside) + tl.load(k + inside)
    tl.store(out + rows[:, None] * 2 * COLUMNS + columns[None, :], total)


@triton.jit
def count(bounds, x, total):
    begin, end = tl.load(bounds), tl.load(bounds + 1)
    found = 0.0
    for i in tl.range(begin, end):
        found += tl.load(x + i)
    tl.atomic_add(total, found)
