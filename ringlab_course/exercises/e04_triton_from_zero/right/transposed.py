# K is loaded transposed, D first; every row's state is kept as columns; the softmax streams over its row in pieces.

NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def softmax_kernel(x_ptr, out_ptr, columns, stride, BLOCK: tl.constexpr):
    x_ptr += tl.program_id(0) * stride
    out_ptr += tl.program_id(0) * stride
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < columns, other=NEG_INF).to(tl.float32)
    z = x - tl.max(x, axis=0)
    numerator = tl.where(x == NEG_INF, 0.0, tl.exp(z))
    denominator = tl.sum(numerator, axis=0)
    y = numerator / tl.maximum(denominator, 1e-30)
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=offsets < columns)


def softmax(x, out, columns):
    block = 1
    while block < columns:
        block *= 2
    softmax_kernel[(x.size(0),)](x, out, columns, x.stride(0), BLOCK=block)
    return out


@triton.jit
def attention_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, S, capacity, group, shift, scale,
                     CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    block, head = tl.program_id(0), tl.program_id(1)
    r = block * BLOCK_M + tl.arange(0, BLOCK_M)
    i = r // group
    place = (head * group + (r - i * group)) * capacity + i
    d = tl.arange(0, D)
    own = i < S
    q = tl.load(q_ptr + place[:, None] * D + d[None, :], mask=own[:, None], other=0)
    m = tl.zeros([BLOCK_M, 1], tl.float32) + NEG_INF
    l = tl.zeros([BLOCK_M, 1], tl.float32)
    o = tl.zeros([BLOCK_M, D], tl.float32)
    end = S
    if CAUSAL:
        end = tl.minimum(S, tl.minimum(S, tl.max(i, axis=0) + 1) + shift)
    for j0 in range(0, tl.cdiv(tl.maximum(end, 0), BLOCK_N)):
        j = j0 * BLOCK_N + tl.arange(0, BLOCK_N)
        kt = tl.load(k_ptr + (head * capacity + j[None, :]) * D + d[:, None], mask=j[None, :] < S, other=0)
        v = tl.load(v_ptr + (head * capacity + j[:, None]) * D + d[None, :], mask=j[:, None] < S, other=0)
        s = tl.dot(q, kt, input_precision="ieee") * scale
        seen = j[None, :] < S
        if CAUSAL:
            seen = seen & (i[:, None] + shift >= j[None, :])
        s = tl.where(seen, s, NEG_INF)
        m_new = tl.maximum(m, tl.max(s, axis=1)[:, None])
        alpha = tl.where(m == NEG_INF, 0.0, tl.exp(m - m_new))
        p = tl.where(seen, tl.exp(s - m_new), 0.0)
        l = l * alpha + tl.sum(p, axis=1)[:, None]
        o = o * alpha
        o += tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
    nothing = l == 0
    o = tl.where(nothing, 0.0, o / tl.where(nothing, 1.0, l))
    lse = tl.where(nothing, NEG_INF, m + tl.log(tl.where(nothing, 1.0, l)))
    tl.store(out_ptr + place[:, None] * D + d[None, :], o.to(out_ptr.dtype.element_ty), mask=own[:, None])
    tl.store(lse_ptr + place[:, None], lse, mask=own[:, None])


def _launch(q, k, v, out, lse, S, shift, block_m, block_n, causal):
    group = q.shape[0] // k.shape[0]
    grid = lambda meta: (triton.cdiv(S * group, meta["BLOCK_M"]), k.shape[0])
    attention_kernel[grid](q, k, v, out, lse, S, q.stride(0) // q.stride(1), group, shift, q.shape[2] ** -0.5,
                           CAUSAL=causal, D=q.shape[2], BLOCK_M=block_m, BLOCK_N=block_n)
    return out, lse


def flash(q, k, v, out, lse, S, block_m, block_n):
    return _launch(q, k, v, out, lse, S, 0, block_m, block_n, False)


def causal_flash(q, k, v, out, lse, S, shift, block_m, block_n):
    return _launch(q, k, v, out, lse, S, shift, block_m, block_n, True)
