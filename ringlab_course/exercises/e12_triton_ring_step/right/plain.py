"""The kernels as the solution has them, with all stages in one file."""

import math

import triton
import triton.language as tl

from ringlab.blocks.triton.interpreter import repair

repair()
BLOCK_M, BLOCK_N = 32, 16
LOG2E = math.log2(math.e)


@triton.jit
def ends_kernel(ACC, M, TOTAL, OUT, LSE, N, D: tl.constexpr,
                BLOCK_M: tl.constexpr, START: tl.constexpr, LAST: tl.constexpr):
    at = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    wide, own = at[:, None] * D + tl.arange(0, D), at < N
    acc, m, total = begin(ACC, M, TOTAL, OUT, LSE, at, wide, own, BLOCK_M, D, START)
    finish(acc, m, total, ACC, M, TOTAL, OUT, LSE, at, wide, own, LAST)


def ends_step(acc, m, total, out, lse, start, last):
    N, tensors = total.numel(), (acc, m, total, out, lse)
    ends_kernel[(triton.cdiv(N, BLOCK_M),)](*tensors, N, acc.shape[-1], BLOCK_M, start, last)
    return tensors


def table_step(q, k, ks, v, vs, acc, m, total, out, lse, programs, segments, start, last):
    (B, H, Lq, D), tensors = q.shape, (q, k, ks, v, vs, acc, m, total, out, lse)
    sizes = H // k.shape[1], Lq, k.shape[2], LOG2E / math.sqrt(D), D, BLOCK_M, BLOCK_N
    table_kernel[(len(programs), B * H)](*tensors, programs, segments, *sizes, start, last)
    return acc, m, total, out, lse


@triton.jit
def one_tile(acc, m, total, q, k, ks, v, vs, visible, scale2):
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * (ks * scale2)[None, :]
    scores = tl.where(visible, scores, -float("inf"))
    top = tl.maximum(m, tl.max(scores, 1))
    safe = tl.where(top == -float("inf"), 0.0, top)
    weights, old = tl.math.exp2(scores - safe[:, None]), tl.math.exp2(m - safe)
    scaled = (weights * vs[None, :]).to(q.dtype)
    acc = acc * old[:, None] + tl.dot(scaled, v.to(q.dtype), input_precision="ieee")
    return acc, top, total * old + tl.sum(weights, 1)


@triton.jit
def tile_kernel(Q, K, KS, V, VS, VISIBLE, ACC, M, TOTAL, scale2,
                D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows, keys, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    at, place = rows[:, None] * D + d, keys[:, None] * D + d
    visible = tl.load(VISIBLE + rows[:, None] * BLOCK_N + keys) != 0
    acc, m, total = one_tile(
        tl.load(ACC + at), tl.load(M + rows), tl.load(TOTAL + rows), tl.load(Q + at),
        tl.load(K + place), tl.load(KS + keys), tl.load(V + place), tl.load(VS + keys),
        visible, scale2,
    )
    tl.store(ACC + at, acc)
    tl.store(M + rows, m)
    tl.store(TOTAL + rows, total)


def tile_step(q, k, ks, v, vs, visible, acc, m, total):
    D, scale2 = q.shape[-1], LOG2E / math.sqrt(q.shape[-1])
    tile_kernel[(1,)](q, k, ks, v, vs, visible, acc, m, total, scale2, D, BLOCK_M, BLOCK_N)
    return acc, m, total


@triton.jit
def begin(ACC, M, TOTAL, OUT, LSE, at, wide, own,
          BLOCK_M: tl.constexpr, D: tl.constexpr, START: tl.constexpr):
    acc, total = tl.zeros((BLOCK_M, D), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    if START == 1:
        acc = tl.load(ACC + wide, mask=own[:, None], other=0.0)
        m = tl.load(M + at, mask=own, other=-float("inf"))
        total = tl.load(TOTAL + at, mask=own, other=0.0)
    if START == 2:
        acc = tl.load(OUT + wide, mask=own[:, None], other=0.0)
        m = tl.load(LSE + at, mask=own, other=-float("inf")) * 1.4426950408889634
        total = tl.where(m == -float("inf"), 0.0, 1.0)
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
def visit(acc, m, total, q, K, KS, V, VS, base, start, stop, scale2,
          D: tl.constexpr, BLOCK_N: tl.constexpr):
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        here, at = keys < stop, base + keys
        inside, wide = here[:, None], at[:, None] * D + tl.arange(0, D)
        k, v = tl.load(K + wide, mask=inside, other=0), tl.load(V + wide, mask=inside, other=0)
        ks, vs = tl.load(KS + at, mask=here, other=0.0), tl.load(VS + at, mask=here, other=0.0)
        acc, m, total = one_tile(acc, m, total, q, k, ks, v, vs, here[None, :], scale2)
    return acc, m, total


@triton.jit
def step_kernel(Q, K, KS, V, VS, ACC, M, TOTAL, OUT, LSE, group, Lq, Lk, scale2,
                D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                START: tl.constexpr, LAST: tl.constexpr):
    head, rows = tl.program_id(1), tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at, own, base = head * Lq + rows, rows < Lq, head // group * Lk
    wide = at[:, None] * D + tl.arange(0, D)
    acc, m, total = begin(ACC, M, TOTAL, OUT, LSE, at, wide, own, BLOCK_M, D, START)
    q = tl.load(Q + wide, mask=own[:, None], other=0.0)
    acc, m, total = visit(acc, m, total, q, K, KS, V, VS, base, 0, Lk, scale2, D, BLOCK_N)
    finish(acc, m, total, ACC, M, TOTAL, OUT, LSE, at, wide, own, LAST)


def ring_step(q, k, ks, v, vs, acc, m, total, out, lse, start, last):
    B, H, Lq, D = q.shape
    grid, group, Lk = (triton.cdiv(Lq, BLOCK_M), B * H), H // k.shape[1], k.shape[2]
    sizes = group, Lq, Lk, LOG2E / math.sqrt(D), D, BLOCK_M, BLOCK_N
    step_kernel[grid](q, k, ks, v, vs, acc, m, total, out, lse, *sizes, start, last)
    return acc, m, total, out, lse


@triton.jit
def visit_masked(acc, m, total, q, K, KS, V, VS, base, start, stop, rows, low, high, scale2,
                 D: tl.constexpr, BLOCK_N: tl.constexpr):
    for first in range(start, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        here, at = keys < stop, base + keys
        inside, wide = here[:, None], at[:, None] * D + tl.arange(0, D)
        k, v = tl.load(K + wide, mask=inside, other=0), tl.load(V + wide, mask=inside, other=0)
        ks, vs = tl.load(KS + at, mask=here, other=0.0), tl.load(VS + at, mask=here, other=0.0)
        ahead = keys[None, :] - rows[:, None]
        visible = here[None, :] & (ahead >= low) & (ahead <= high)
        acc, m, total = one_tile(acc, m, total, q, k, ks, v, vs, visible, scale2)
    return acc, m, total


@triton.jit
def table_kernel(Q, K, KS, V, VS, ACC, M, TOTAL, OUT, LSE, PROGRAMS, SEGMENTS, group, Lq, Lk,
                 scale2, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 START: tl.constexpr, LAST: tl.constexpr):
    head, program = tl.program_id(1), PROGRAMS + 4 * tl.program_id(0)
    rows = tl.load(program) + tl.arange(0, BLOCK_M)
    at, own, base = head * Lq + rows, rows < tl.load(program + 1), head // group * Lk
    wide = at[:, None] * D + tl.arange(0, D)
    acc, m, total = begin(ACC, M, TOTAL, OUT, LSE, at, wide, own, BLOCK_M, D, START)
    q = tl.load(Q + wide, mask=own[:, None], other=0.0)
    for number in range(tl.load(program + 2), tl.load(program + 3)):
        segment = SEGMENTS + 6 * number
        k_begin, full, tail = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
        k_end, low, high = tl.load(segment + 3), tl.load(segment + 4), tl.load(segment + 5)
        acc, m, total = visit_masked(acc, m, total, q, K, KS, V, VS, base, k_begin, full,
                                     rows, low, high, scale2, D, BLOCK_N)
        acc, m, total = visit(acc, m, total, q, K, KS, V, VS, base, full, tail, scale2, D, BLOCK_N)
        acc, m, total = visit_masked(acc, m, total, q, K, KS, V, VS, base, tail, k_end,
                                     rows, low, high, scale2, D, BLOCK_N)
    finish(acc, m, total, ACC, M, TOTAL, OUT, LSE, at, wide, own, LAST)
