"""Kernels whose loads and stores are easy to list by hand.

One is a small attention-like kernel, which tests the offline compiler with tiles that fit and tiles that do
not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ringlab.blocks.triton.compiling import Source
from ringlab.blocks.triton.interpreter import repair
from ringlab.blocks.triton.offline import Job

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


NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@triton.jit
def toy(
    Q,
    K,
    V,
    Out,
    keys,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
    P: tl.constexpr,
):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, D)
    q = tl.load(Q + rows[:, None] * D + d[None, :])
    out = tl.zeros((M, D), tl.float32)
    for start in tl.range(0, keys, N, num_stages=STAGES):
        n = start + tl.arange(0, N)
        k = tl.load(K + n[:, None] * D + d[None, :], mask=n[:, None] < keys, other=0.0)
        v = tl.load(V + n[:, None] * D + d[None, :], mask=n[:, None] < keys, other=0.0)
        p = tl.math.exp2(tl.dot(q, tl.trans(k), input_precision=P))
        out = tl.dot(p.to(v.dtype), v, out, input_precision=P)
    tl.store(Out + rows[:, None] * D + d[None, :], out)


@triton.jit
def wrong(Q, keys, D: tl.constexpr):
    tl.store(Q + tl.arange(0, D), tl.no_such_function(keys))


def source(job: Job) -> Source:
    pointer = f"*{NAMES[job.dtype]}"
    if job.kernel == "wrong":
        return Source(wrong, {"Q": pointer, "keys": "i32"}, {"D": job.head_dim})
    if job.kernel == "crashes":
        import os

        os._exit(7)
    config = job.config
    sizes = {"D": job.head_dim, "M": config.block_m, "N": config.block_n}
    return Source(
        toy,
        {"Q": pointer, "K": pointer, "V": pointer, "Out": "*fp32", "keys": "i32"},
        sizes | {"STAGES": config.num_stages, "P": config.precision},
        frozenset({"Q", "K", "V", "Out"}),
    )


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n, other=0.0), mask=at < n)
