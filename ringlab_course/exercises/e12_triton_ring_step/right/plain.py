"""The kernels as the solution has them, with all stages in one file."""

import math

import triton
import triton.language as tl

from ringlab.blocks.triton.interpreter import repair

repair()
BLOCK_M, BLOCK_N = 16, 16
LOG2E = math.log2(math.e)


@triton.jit
def one_tile(acc, m, total, q, k, v, visible, scale2):
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale2
    scores = tl.where(visible, scores, -float("inf"))
    top = tl.maximum(m, tl.max(scores, 1))
    safe = tl.where(top == -float("inf"), 0.0, top)
    weights, old = tl.math.exp2(scores - safe[:, None]), tl.math.exp2(m - safe)
    acc = acc * old[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return acc, top, total * old + tl.sum(weights, 1)


@triton.jit
def tile_kernel(Q, K, V, VISIBLE, ACC, M, TOTAL, scale2, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows, keys, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    acc, m, total = tl.load(ACC + rows[:, None] * D + d), tl.load(M + rows), tl.load(TOTAL + rows)
    q, k, v = tl.load(Q + rows[:, None] * D + d), tl.load(K + keys[:, None] * D + d), tl.load(V + keys[:, None] * D + d)
    visible = tl.load(VISIBLE + rows[:, None] * BLOCK_N + keys) != 0
    acc, m, total = one_tile(acc, m, total, q, k, v, visible, scale2)
    tl.store(ACC + rows[:, None] * D + d, acc)
    tl.store(M + rows, m)
    tl.store(TOTAL + rows, total)


def tile_step(q, k, v, visible, acc, m, total):
    D = q.shape[-1]
    tile_kernel[(1,)](q, k, v, visible, acc, m, total, LOG2E / math.sqrt(D), D, BLOCK_M, BLOCK_N)
    return acc, m, total


@triton.jit
def begin(ACC, M, TOTAL, at, wide, own, BLOCK_M: tl.constexpr, D: tl.constexpr, FIRST: tl.constexpr):
    acc, total = tl.zeros((BLOCK_M, D), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
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


@triton.jit
def visit(acc, m, total, q, K, V, base, start, stop, scale2, D: tl.constexpr, BLOCK_N: tl.constexpr):
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        wide, here = (base + keys)[:, None] * D + tl.arange(0, D), keys < stop
        k = tl.load(K + wide, mask=here[:, None], other=0.0)
        v = tl.load(V + wide, mask=here[:, None], other=0.0)
        acc, m, total = one_tile(acc, m, total, q, k, v, here[None, :], scale2)
    return acc, m, total


@triton.jit
def step_kernel(Q, K, V, ACC, M, TOTAL, OUT, LSE, group, Lq, Lk, scale2, D: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    head, rows = tl.program_id(1), tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at, own, base = head * Lq + rows, rows < Lq, head // group * Lk
    wide = at[:, None] * D + tl.arange(0, D)
    acc, m, total = begin(ACC, M, TOTAL, at, wide, own, BLOCK_M, D, FIRST)
    q = tl.load(Q + wide, mask=own[:, None], other=0.0)
    acc, m, total = visit(acc, m, total, q, K, V, base, 0, Lk, scale2, D, BLOCK_N)
    finish(acc, m, total, ACC, M, TOTAL, OUT, LSE, at, wide, own, LAST)


def ring_step(q, k, v, acc, m, total, out, lse, first, last):
    B, H, Lq, D = q.shape
    grid, group, scale2 = (triton.cdiv(Lq, BLOCK_M), B * H), H // k.shape[1], LOG2E / math.sqrt(D)
    step_kernel[grid](q, k, v, acc, m, total, out, lse, group, Lq, k.shape[2], scale2, D, BLOCK_M, BLOCK_N, first, last)
    return acc, m, total, out, lse


@triton.jit
def visit_masked(acc, m, total, q, K, V, base, start, stop, rows, shift, scale2, D: tl.constexpr, BLOCK_N: tl.constexpr):
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        wide, here = (base + keys)[:, None] * D + tl.arange(0, D), keys < stop
        k = tl.load(K + wide, mask=here[:, None], other=0.0)
        v = tl.load(V + wide, mask=here[:, None], other=0.0)
        visible = here[None, :] & (keys[None, :] <= rows[:, None] + shift)
        acc, m, total = one_tile(acc, m, total, q, k, v, visible, scale2)
    return acc, m, total


@triton.jit
def table_kernel(Q, K, V, ACC, M, TOTAL, OUT, LSE, PROGRAMS, SEGMENTS, group, Lq, Lk, scale2, D: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    head, program = tl.program_id(1), PROGRAMS + 4 * tl.program_id(0)
    rows = tl.load(program) + tl.arange(0, BLOCK_M)
    at, own, base = head * Lq + rows, rows < tl.load(program + 1), head // group * Lk
    wide = at[:, None] * D + tl.arange(0, D)
    acc, m, total = begin(ACC, M, TOTAL, at, wide, own, BLOCK_M, D, FIRST)
    q = tl.load(Q + wide, mask=own[:, None], other=0.0)
    for number in range(tl.load(program + 2), tl.load(program + 3)):
        segment = SEGMENTS + 4 * number
        k_full, shift = tl.load(segment + 1), tl.load(segment + 3)
        acc, m, total = visit(acc, m, total, q, K, V, base, tl.load(segment), k_full, scale2, D, BLOCK_N)
        acc, m, total = visit_masked(acc, m, total, q, K, V, base, k_full, tl.load(segment + 2), rows, shift, scale2, D, BLOCK_N)
    finish(acc, m, total, ACC, M, TOTAL, OUT, LSE, at, wide, own, LAST)


def table_step(q, k, v, acc, m, total, out, lse, programs, segments, first, last):
    B, H, Lq, D = q.shape
    table_kernel[(len(programs), B * H)](q, k, v, acc, m, total, out, lse, programs, segments, H // k.shape[1], Lq, k.shape[2],
                                         LOG2E / math.sqrt(D), D, BLOCK_M, BLOCK_N, first, last)
    return acc, m, total, out, lse
