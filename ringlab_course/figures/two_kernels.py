"""A ring step as two kernels: attention on one block (lesson 04) and the merge (lesson 02), for lesson 12.

Import this module after TRITON_INTERPRET is set, because the lesson runs it in Triton's interpreter, which
counts the bytes that it moves.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import triton
import triton.language as tl

BLOCK = 64


@triton.jit
def block_kernel(Q, K, V, PART, PART_LSE, group, R, N, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    """Attention of 64 rows of one head on one block of keys: its out and lse, in float32."""
    head, rows = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own, at, base = rows < R, head * R + rows, head // group * N
    wide = at[:, None] * D + tl.arange(0, D)
    q = tl.load(Q + wide, mask=own[:, None], other=0.0)
    acc = tl.zeros((BLOCK, D), tl.float32)
    m = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for key in range(0, N, BLOCK):
        keys = key + tl.arange(0, BLOCK)
        place = (base + keys)[:, None] * D + tl.arange(0, D)
        k = tl.load(K + place, mask=keys[:, None] < N, other=0.0)
        v = tl.load(V + place, mask=keys[:, None] < N, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(keys[None, :] < N, scores, -float("inf"))
        new = tl.maximum(m, tl.max(scores, 1))
        weights, old = tl.exp(scores - new[:, None]), tl.exp(m - new)
        acc = acc * old[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        m, total = new, total * old + tl.sum(weights, 1)
    tl.store(PART + wide, acc / total[:, None], mask=own[:, None])
    tl.store(PART_LSE + at, m + tl.log(total), mask=own)


@triton.jit
def merge_kernel(RUN, RUN_LSE, PART, PART_LSE, count, D: tl.constexpr, BLOCK: tl.constexpr):
    """The running out and lse of 64 rows after one more block: both are weighted by their lse."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own, wide = at < count, at[:, None] * D + tl.arange(0, D)
    run = tl.load(RUN + wide, mask=own[:, None], other=0.0)
    part = tl.load(PART + wide, mask=own[:, None], other=0.0)
    a, b = tl.load(RUN_LSE + at, mask=own, other=0.0), tl.load(PART_LSE + at, mask=own, other=0.0)
    top = tl.maximum(a, b)
    wa, wb = tl.exp(a - top), tl.exp(b - top)
    merged = (run * wa[:, None] + part * wb[:, None]) / (wa + wb)[:, None]
    tl.store(RUN + wide, merged, mask=own[:, None])
    tl.store(RUN_LSE + at, top + tl.log(wa + wb), mask=own)


def separate(q: torch.Tensor, blocks: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return out, in the dtype of q, after all blocks (k, v), with two launches for each block.

    q: (1, H, rows, D), k and v: (1, K, keys, D), contiguous. Every key is visible.
    """
    _, H, R, D = q.shape
    run, run_lse = torch.zeros(q.shape), torch.full(q.shape[:-1], -math.inf)
    part, part_lse = torch.empty(q.shape), torch.empty(q.shape[:-1])
    for k, v in blocks:
        sizes = H // k.shape[1], R, k.shape[2], D**-0.5, D, BLOCK
        block_kernel[(triton.cdiv(R, BLOCK), H)](q, k, v, part, part_lse, *sizes)
        merge_kernel[(triton.cdiv(H * R, BLOCK),)](run, run_lse, part, part_lse, H * R, D, BLOCK)
    return run.to(q.dtype)
