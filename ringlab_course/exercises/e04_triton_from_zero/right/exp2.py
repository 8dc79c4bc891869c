# Powers of two inside, one device function for a tile, the diagonal in a loop of its own.

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def softmax_kernel(x_ptr, out_ptr, n, stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    mine = tl.arange(0, BLOCK) < n
    x = tl.load(x_ptr + at, mask=mine, other=-float("inf")).to(tl.float32) * LOG2E
    top = tl.maximum(tl.max(x, 0), -1e30)
    p = tl.exp2(x - top)
    tl.store(out_ptr + at, p / tl.maximum(tl.sum(p, 0), 1e-30), mask=mine)


def softmax(x, out, columns):
    softmax_kernel[(x.shape[0],)](x, out, columns, x.stride(0), BLOCK=triton.next_power_of_2(columns))
    return out


@triton.jit
def tile(acc, m, l, q, k_ptr, v_ptr, at, there, seen, scale):
    k = tl.load(k_ptr + at, mask=there, other=0.0)
    v = tl.load(v_ptr + at, mask=there, other=0.0)
    s = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E), -float("inf"))
    top = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(top == -float("inf"), 0.0, top)
    p = tl.exp2(s - safe[:, None])
    old = tl.exp2(m - safe)
    acc = acc * old[:, None] + tl.dot(p, v.to(tl.float32), input_precision="ieee")
    return acc, top, l * old + tl.sum(p, 1)


@triton.jit
def kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, S, capacity, shift, scale, CAUSAL: tl.constexpr,
           GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    key_head = tl.program_id(1)
    start = key_head * capacity
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = r // GROUP
    at_q = (key_head * GROUP + r - rows * GROUP) * capacity + rows
    d = tl.arange(0, D)
    own = r < S * GROUP
    q = tl.load(q_ptr + at_q[:, None] * D + d, mask=own[:, None], other=0.0)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    first, last = tl.min(rows, 0), tl.minimum(tl.max(rows, 0), S - 1)
    open_until = S if not CAUSAL else tl.minimum(S, first + shift + 1)
    open_until = tl.maximum(open_until, 0) // BLOCK_N * BLOCK_N
    stop = S if not CAUSAL else tl.minimum(S, last + 1 + shift)
    for begin in range(0, open_until, BLOCK_N):
        keys = begin + tl.arange(0, BLOCK_N)
        at = (start + keys)[:, None] * D + d
        acc, m, l = tile(acc, m, l, q, k_ptr, v_ptr, at, keys[:, None] >= 0, keys[None, :] >= 0, scale)
    for begin in range(open_until, stop, BLOCK_N):
        keys = begin + tl.arange(0, BLOCK_N)
        at = (start + keys)[:, None] * D + d
        seen = keys[None, :] < S
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None] + shift)
        acc, m, l = tile(acc, m, l, q, k_ptr, v_ptr, at, keys[:, None] < S, seen, scale)
    blind = l == 0.0
    l = tl.where(blind, 1.0, l)
    tl.store(out_ptr + at_q[:, None] * D + d, acc / l[:, None], mask=own[:, None])
    lse = tl.where(blind, -float("inf"), (m + tl.log2(l)) / LOG2E)
    tl.store(lse_ptr + at_q, lse, mask=own)


def launch(q, k, v, out, lse, S, shift, causal, block_m, block_n):
    H, capacity, D = q.shape
    group = H // len(k)
    kernel[(triton.cdiv(S * group, block_m), len(k))](
        q, k, v, out, lse, S, capacity, shift, D**-0.5,
        CAUSAL=causal, GROUP=group, D=D, BLOCK_M=block_m, BLOCK_N=block_n,
    )
    return out, lse


def flash(q, k, v, out, lse, S, block_m, block_n):
    return launch(q, k, v, out, lse, S, 0, False, block_m, block_n)


def causal_flash(q, k, v, out, lse, S, shift, block_m, block_n):
    return launch(q, k, v, out, lse, S, shift, True, block_m, block_n)
