# Every tile is an attention of its own, merged into (out, lse) as in lesson 02; softmax with several rows a program.


@triton.jit
def rows_kernel(x_ptr, out_ptr, rows, columns, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    inside = (r < rows) & (c < columns)
    x = tl.load(x_ptr + r * stride + c, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 1)[:, None]
    p = tl.where(top == float("-inf"), 0.0, tl.exp(x - top))
    total = tl.sum(p, 1)[:, None]
    tl.store(out_ptr + r * stride + c, tl.where(total > 0, p / total, 0.0), mask=inside)


def softmax(x, out, columns):
    rows, stride = x.shape
    rows_kernel[(triton.cdiv(rows, 2),)](
        x, out, rows, columns, stride, ROWS=2, BLOCK=triton.next_power_of_2(columns)
    )
    return out


@triton.jit
def merge(out_a, lse_a, out_b, lse_b):
    top = tl.maximum(lse_a, lse_b)
    top = tl.where(top == float("-inf"), 0.0, top)
    a, b = tl.exp(lse_a - top), tl.exp(lse_b - top)
    both = tl.where(a + b == 0, 1.0, a + b)
    lse = tl.where(a + b == 0, float("-inf"), top + tl.log(both))
    return (out_a * a[:, None] + out_b * b[:, None]) / both[:, None], lse


@triton.jit
def kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, S, capacity, group, reach, scale,
           D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    q_ptr += tl.program_id(1) * group * capacity * D
    k_ptr += tl.program_id(1) * capacity * D
    v_ptr += tl.program_id(1) * capacity * D
    out_ptr += tl.program_id(1) * group * capacity * D
    lse_ptr += tl.program_id(1) * group * capacity
    first = tl.program_id(0) * BLOCK_M
    packed, dims = first + tl.arange(0, BLOCK_M), tl.arange(0, D)
    rows, head = packed // group, packed % group
    at = head * capacity + rows
    q = tl.load(q_ptr + at[:, None] * D + dims, mask=(rows < S)[:, None], other=0.0).to(tl.float32)
    out = tl.zeros((BLOCK_M, D), tl.float32)
    lse = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    last = tl.minimum(S, tl.minimum(S, (first + BLOCK_M - 1) // group + 1) + reach)
    begin = first * 0
    while begin < last:
        keys = begin + tl.arange(0, BLOCK_N)
        inside = (keys < S)[:, None]
        k = tl.load(k_ptr + keys[:, None] * D + dims, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + keys[:, None] * D + dims, mask=inside, other=0.0).to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where((keys[None, :] <= rows[:, None] + reach) & (keys[None, :] < S), s, float("-inf"))
        top = tl.max(s, 1)
        safe = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp(s - safe[:, None])
        total = tl.sum(p, 1)
        some = tl.where(total == 0, 1.0, total)
        here = tl.dot(p / some[:, None], v, input_precision="ieee")
        out, lse = merge(out, lse, here, tl.where(total == 0, float("-inf"), safe + tl.log(some)))
        begin += BLOCK_N
    tl.store(out_ptr + at[:, None] * D + dims, out, mask=(rows < S)[:, None])
    tl.store(lse_ptr + at, lse, mask=rows < S)


def causal_flash(q, k, v, out, lse, S, shift, block_m, block_n):
    H, capacity, D = q.shape
    group = H // k.shape[0]
    kernel[(triton.cdiv(S * group, block_m), k.shape[0])](
        q, k, v, out, lse, S, capacity, group, shift, D**-0.5, D=D, BLOCK_M=block_m, BLOCK_N=block_n
    )
    return out, lse


def flash(q, k, v, out, lse, S, block_m, block_n):
    return causal_flash(q, k, v, out, lse, S, S, block_m, block_n)
