# expects: check=12.tile:state misconception=low_precision_state
"""acc in the dtype of v."""

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
    acc = (acc * old[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")).to(v.dtype).to(tl.float32)
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
