"""The solution in the notebook, without its docstrings."""

import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x_ptr, out_ptr, columns, stride, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * stride + column, mask=inside, other=-float("inf")).to(tl.float32)
    maximum = tl.max(x, 0)
    powers = tl.exp(x - tl.where(maximum == -float("inf"), 0.0, maximum))
    total = tl.sum(powers, 0)
    result = powers / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * stride + column, result, mask=inside)


def softmax(x, out, columns):
    rows, stride = x.shape
    softmax_kernel[(rows,)](x, out, columns, stride, BLOCK=triton.next_power_of_2(columns))
    return out


@triton.jit
def flash_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, S, capacity, group, scale,
                 D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    packed, dims = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    tokens, heads = packed // group, tl.program_id(1) * group + packed % group
    rows, base = heads * capacity + tokens, tl.program_id(1) * capacity
    q = tl.load(q_ptr + rows[:, None] * D + dims, mask=tokens[:, None] < S, other=0.0)
    m, total = tl.full((BLOCK_M,), -float("inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    for first in range(0, S, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        there = (base + keys)[:, None] * D + dims
        k = tl.load(k_ptr + there, mask=keys[:, None] < S, other=0.0)
        v = tl.load(v_ptr + there, mask=keys[:, None] < S, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(keys < S, scores, -float("inf"))
        new = tl.maximum(m, tl.max(scores, 1))
        factor, powers = tl.exp(m - new), tl.exp(scores - new[:, None])
        total = total * factor + tl.sum(powers, 1)
        acc = acc * factor[:, None] + tl.dot(powers.to(v.dtype), v, input_precision="ieee")
        m = new
    tl.store(out_ptr + rows[:, None] * D + dims, acc / total[:, None], mask=tokens[:, None] < S)
    tl.store(lse_ptr + rows, m + tl.log(total), mask=tokens < S)


def flash(q, k, v, out, lse, S, block_m, block_n):
    H, capacity, D = q.shape
    group = H // len(k)
    grid = (triton.cdiv(S * group, block_m), len(k))
    flash_kernel[grid](q, k, v, out, lse, S, capacity, group, D**-0.5,
                       D=D, BLOCK_M=block_m, BLOCK_N=block_n)
    return out, lse


@triton.jit
def causal_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, S, capacity, group, shift, scale,
                  D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    packed, dims = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    tokens, heads = packed // group, tl.program_id(1) * group + packed % group
    rows, base = heads * capacity + tokens, tl.program_id(1) * capacity
    q = tl.load(q_ptr + rows[:, None] * D + dims, mask=tokens[:, None] < S, other=0.0)
    m, total = tl.full((BLOCK_M,), -float("inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    last = tl.minimum(S - 1, ((tl.program_id(0) + 1) * BLOCK_M - 1) // group)
    stop = tl.minimum(S, last + shift + 1)
    for first in range(0, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        there = (base + keys)[:, None] * D + dims
        k = tl.load(k_ptr + there, mask=keys[:, None] < S, other=0.0)
        v = tl.load(v_ptr + there, mask=keys[:, None] < S, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where((keys < S) & (keys <= tokens[:, None] + shift), scores, -float("inf"))
        new = tl.maximum(m, tl.max(scores, 1))
        anchor = tl.where(new == -float("inf"), 0.0, new)
        factor, powers = tl.exp(m - anchor), tl.exp(scores - anchor[:, None])
        total = total * factor + tl.sum(powers, 1)
        acc = acc * factor[:, None] + tl.dot(powers.to(v.dtype), v, input_precision="ieee")
        m = new
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + rows[:, None] * D + dims, acc / total[:, None], mask=tokens[:, None] < S)
    tl.store(lse_ptr + rows, m + tl.log(total), mask=tokens < S)


def causal_flash(q, k, v, out, lse, S, shift, block_m, block_n):
    H, capacity, D = q.shape
    group = H // len(k)
    grid = (triton.cdiv(S * group, block_m), len(k))
    causal_kernel[grid](q, k, v, out, lse, S, capacity, group, shift, D**-0.5,
                        D=D, BLOCK_M=block_m, BLOCK_N=block_n)
    return out, lse
