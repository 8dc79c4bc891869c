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
def flash_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, S, capacity, scale,
                 D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    base = tl.program_id(1) * capacity
    rows, dims = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    here = (base + rows)[:, None] * D + dims
    q = tl.load(q_ptr + here, mask=rows[:, None] < S, other=0.0)
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
    tl.store(out_ptr + here, acc / total[:, None], mask=rows[:, None] < S)
    tl.store(lse_ptr + base + rows, m + tl.log(total), mask=rows < S)


def flash(q, k, v, out, lse, S, block_m, block_n):
    H, capacity, D = q.shape
    grid = (triton.cdiv(S, block_m), H)
    flash_kernel[grid](q, k, v, out, lse, S, capacity, D**-0.5, D=D, BLOCK_M=block_m, BLOCK_N=block_n)
    return out, lse


@triton.jit
def causal_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, S, capacity, shift, scale,
                  D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    base = tl.program_id(1) * capacity
    rows, dims = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    here = (base + rows)[:, None] * D + dims
    q = tl.load(q_ptr + here, mask=rows[:, None] < S, other=0.0)
    m, total = tl.full((BLOCK_M,), -float("inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    stop = tl.minimum(S, (tl.program_id(0) + 1) * BLOCK_M + shift)
    for first in range(0, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        there = (base + keys)[:, None] * D + dims
        k = tl.load(k_ptr + there, mask=keys[:, None] < S, other=0.0)
        v = tl.load(v_ptr + there, mask=keys[:, None] < S, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where((keys < S) & (keys <= rows[:, None] + shift), scores, -float("inf"))
        new = tl.maximum(m, tl.max(scores, 1))
        anchor = tl.where(new == -float("inf"), 0.0, new)
        factor, powers = tl.exp(m - anchor), tl.exp(scores - anchor[:, None])
        total = total * factor + tl.sum(powers, 1)
        acc = acc * factor[:, None] + tl.dot(powers.to(v.dtype), v, input_precision="ieee")
        m = new
    tl.store(out_ptr + here, acc / tl.where(total == 0.0, 1.0, total)[:, None], mask=rows[:, None] < S)
    tl.store(lse_ptr + base + rows, m + tl.log(tl.where(total == 0.0, 1.0, total)), mask=rows < S)


def causal_flash(q, k, v, out, lse, S, shift, block_m, block_n):
    H, capacity, D = q.shape
    grid = (triton.cdiv(S, block_m), H)
    causal_kernel[grid](
        q, k, v, out, lse, S, capacity, shift, D**-0.5, D=D, BLOCK_M=block_m, BLOCK_N=block_n
    )
    return out, lse
