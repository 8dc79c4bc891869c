# expects: check=04.flash:heads misconception=head_offset_S_without_D
import torch
import triton
import triton.language as tl


@triton.jit
def flash_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, S, capacity, scale,
                 D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """One block of queries of one head, over all keys."""
    head = tl.program_id(1) * S
    rows, dims = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    here = head + rows[:, None] * D + dims
    q = tl.load(q_ptr + here, mask=rows[:, None] < S, other=0.0)
    m, total = tl.full((BLOCK_M,), -float("inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    for first in range(0, S, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        there = head + keys[:, None] * D + dims
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
    tl.store(lse_ptr + tl.program_id(1) * capacity + rows, m + tl.log(total), mask=rows < S)


def flash(q, k, v, out, lse, S, block_m, block_n):
    """Launch one program per block of queries and head; return (out, lse)."""
    H, capacity, D = q.shape
    grid = (triton.cdiv(S, block_m), H)
    flash_kernel[grid](q, k, v, out, lse, S, capacity, D**-0.5, D=D, BLOCK_M=block_m, BLOCK_N=block_n)
    return out, lse
