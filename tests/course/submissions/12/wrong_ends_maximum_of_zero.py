# expects: check=12.ends:first misconception=-
"""m begins at 0."""

import math

import triton
import triton.language as tl

from ringlab.blocks.triton.interpreter import repair

repair()
BLOCK_M, BLOCK_N = 16, 16
LOG2E = math.log2(math.e)


@triton.jit
def begin(ACC, M, TOTAL, at, wide, own, BLOCK_M: tl.constexpr, D: tl.constexpr, FIRST: tl.constexpr):
    acc, total = tl.zeros((BLOCK_M, D), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    m = tl.zeros((BLOCK_M,), tl.float32)
    if not FIRST:
        acc = tl.load(ACC + wide, mask=own[:, None], other=0.0)
        m, total = tl.load(M + at, mask=own, other=-float("inf")), tl.load(TOTAL + at, mask=own, other=0.0)
    return acc, m, total


@triton.jit
def finish(acc, m, total, ACC, M, TOTAL, OUT, LSE, at, wide, own, LAST: tl.constexpr):
    if LAST:
        total = tl.where(total == 0.0, 1.0, total)
        tl.store(OUT + wide, acc / total[:, None], mask=own[:, None])
        tl.store(LSE + at, (m + tl.math.log2(total)) * 0.6931471805599453, mask=own)
    else:
        tl.store(ACC + wide, acc, mask=own[:, None])
        tl.store(M + at, m, mask=own)
        tl.store(TOTAL + at, total, mask=own)


@triton.jit
def ends_kernel(ACC, M, TOTAL, OUT, LSE, N, D: tl.constexpr, BLOCK_M: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    at = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    wide, own = at[:, None] * D + tl.arange(0, D), at < N
    acc, m, total = begin(ACC, M, TOTAL, at, wide, own, BLOCK_M, D, FIRST)
    finish(acc, m, total, ACC, M, TOTAL, OUT, LSE, at, wide, own, LAST)


def ends_step(acc, m, total, out, lse, first, last):  # given: a step that sees no key
    N, D = total.numel(), acc.shape[-1]
    ends_kernel[(triton.cdiv(N, BLOCK_M),)](acc, m, total, out, lse, N, D, BLOCK_M, first, last)
    return acc, m, total, out, lse
