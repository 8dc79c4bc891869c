"""Another way at every stage: keys and values widened first, each tile a partial of its own, one masked walk."""


@triton.jit
def one_tile(acc, m, total, q, k, ks, v, vs, visible, scale2):
    keys, values = (k.to(tl.float32) * ks[:, None]).to(q.dtype), (v.to(tl.float32) * vs[:, None]).to(q.dtype)
    hidden = tl.where(visible, 0.0, -float("inf"))
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale2 + hidden
    mine = tl.max(scores, 1)
    weights = tl.math.exp2(scores - tl.where(mine == -float("inf"), 0.0, mine)[:, None])
    part, mass = tl.dot(weights.to(q.dtype), values, input_precision="ieee"), tl.sum(weights, 1)
    top = tl.maximum(m, mine)
    safe = tl.where(top == -float("inf"), 0.0, top)
    old, new = tl.math.exp2(m - safe), tl.math.exp2(mine - safe)
    return acc * old[:, None] + part * new[:, None], top, total * old + mass * new


@triton.jit
def tile_kernel(Q, K, KS, V, VS, VISIBLE, ACC, M, TOTAL, scale2,
                D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows, keys = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    at, place = rows[:, None] * D + tl.arange(0, D), keys[:, None] * D + tl.arange(0, D)
    k, v = tl.load(K + place), tl.load(V + place)
    visible = tl.load(VISIBLE + rows[:, None] * BLOCK_N + keys) > 0
    acc, m, total = tl.load(ACC + at), tl.load(M + rows), tl.load(TOTAL + rows)
    acc, m, total = one_tile(acc, m, total, tl.load(Q + at), k, tl.load(KS + keys), v, tl.load(VS + keys), visible, scale2)
    tl.store(ACC + at, acc)
    tl.store(M + rows, m)
    tl.store(TOTAL + rows, total)


def tile_step(q, k, ks, v, vs, visible, *state):
    D = q.shape[-1]
    tile_kernel[(1,)](q, k, ks, v, vs, visible, *state, LOG2E / math.sqrt(D), D, BLOCK_M, BLOCK_N)
    return state


@triton.jit
def begin(ACC, M, TOTAL, OUT, LSE, at, wide, own, BLOCK_M: tl.constexpr, D: tl.constexpr, START: tl.constexpr):
    if START == 0:
        m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        return tl.zeros((BLOCK_M, D), tl.float32), m, tl.zeros((BLOCK_M,), tl.float32)
    elif START == 1:
        acc, total = tl.load(ACC + wide, mask=own[:, None], other=0.0), tl.load(TOTAL + at, mask=own, other=0.0)
        return acc, tl.load(M + at, mask=own, other=0.0), total
    else:  # the largest score is not known: any number that is near will do
        lse = tl.load(LSE + at, mask=own, other=0.0) / 0.6931471805599453
        m = tl.where(lse == -float("inf"), lse, tl.floor(lse))
        total = tl.where(lse == -float("inf"), 0.0, tl.math.exp2(lse - tl.floor(lse)))
        return tl.load(OUT + wide, mask=own[:, None], other=0.0) * total[:, None], m, total


@triton.jit
def finish(acc, m, total, ACC, M, TOTAL, OUT, LSE, at, wide, own, LAST: tl.constexpr):
    if not LAST:
        tl.store(TOTAL + at, total, mask=own)
        tl.store(M + at, m, mask=own)
        tl.store(ACC + wide, acc, mask=own[:, None])
    else:
        seen = total > 0.0
        out = tl.where(seen[:, None], acc / tl.where(seen, total, 1.0)[:, None], 0.0)
        lse = m * 0.6931471805599453 + tl.log(tl.where(seen, total, 1.0))
        tl.store(LSE + at, tl.where(seen, lse, -float("inf")), mask=own)
        tl.store(OUT + wide, out, mask=own[:, None])


@triton.jit
def ends_kernel(ACC, M, TOTAL, OUT, LSE, N,
                D: tl.constexpr, BLOCK_M: tl.constexpr, START: tl.constexpr, LAST: tl.constexpr):
    at = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    wide = at[:, None] * D + tl.arange(0, D)
    state = begin(ACC, M, TOTAL, OUT, LSE, at, wide, at < N, BLOCK_M, D, START)
    finish(state[0], state[1], state[2], ACC, M, TOTAL, OUT, LSE, at, wide, at < N, LAST)


def ends_step(*tensors, start, last):
    N, D = tensors[1].numel(), tensors[0].shape[-1]
    ends_kernel[(triton.cdiv(N, BLOCK_M),)](*tensors, N, D, BLOCK_M, start, last)
    return tensors


@triton.jit
def walk(acc, m, total, q, K, KS, V, VS, base, start, stop, rows, low, high, scale2, BLOCK_N: tl.constexpr):
    d = tl.arange(0, q.shape[1])
    for number in range((stop - start + BLOCK_N - 1) // BLOCK_N):
        keys = start + number * BLOCK_N + tl.arange(0, BLOCK_N)
        here, at = (keys < stop)[:, None], (base + keys)[:, None] * q.shape[1] + d
        ks = tl.load(KS + base + keys, mask=keys < stop, other=1.0)
        vs = tl.load(VS + base + keys, mask=keys < stop, other=1.0)
        k, v = tl.load(K + at, mask=here, other=0), tl.load(V + at, mask=here, other=0)
        ahead = keys[None, :] - rows[:, None]
        visible = (ahead >= low) & (ahead <= high) & (keys < stop)[None, :]
        acc, m, total = one_tile(acc, m, total, q, k, ks, v, vs, visible, scale2)
    return acc, m, total


@triton.jit
def visit(acc, m, total, q, K, KS, V, VS, base, start, stop, scale2, D: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.arange(0, q.shape[0])
    return walk(acc, m, total, q, K, KS, V, VS, base, start, stop, rows, -(1 << 30), 1 << 30, scale2, BLOCK_N)


@triton.jit
def step_kernel(Q, K, KS, V, VS, ACC, M, TOTAL, OUT, LSE, group, Lq, Lk, scale2, D: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, START: tl.constexpr, LAST: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.program_id(1) * Lq + rows
    wide = at[:, None] * D + tl.arange(0, D)
    q = tl.load(Q + wide, mask=(rows < Lq)[:, None], other=0.0)
    acc, m, total = begin(ACC, M, TOTAL, OUT, LSE, at, wide, rows < Lq, BLOCK_M, D, START)
    acc, m, total = visit(acc, m, total, q, K, KS, V, VS, tl.program_id(1) // group * Lk, 0, Lk, scale2, D, BLOCK_N)
    finish(acc, m, total, ACC, M, TOTAL, OUT, LSE, at, wide, rows < Lq, LAST)


def ring_step(q, k, ks, v, vs, *rest, start, last):
    (B, H, Lq, D), (_, K, Lk, _) = q.shape, k.shape
    step_kernel[(-(-Lq // BLOCK_M), B * H)](
        q, k, ks, v, vs, *rest, H // K, Lq, Lk, LOG2E * D**-0.5, D, BLOCK_M, BLOCK_N, start, last
    )
    return rest


@triton.jit
def table_kernel(Q, K, KS, V, VS, ACC, M, TOTAL, OUT, LSE, PROGRAMS, SEGMENTS, group, Lq, Lk, scale2,
                 D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 START: tl.constexpr, LAST: tl.constexpr):
    mine = 4 * tl.program_id(0)
    rows = tl.load(PROGRAMS + mine) + tl.arange(0, BLOCK_M)
    own, at = rows < tl.load(PROGRAMS + mine + 1), tl.program_id(1) * Lq + rows
    wide = at[:, None] * D + tl.arange(0, D)
    q = tl.load(Q + wide, mask=own[:, None], other=0.0)
    acc, m, total = begin(ACC, M, TOTAL, OUT, LSE, at, wide, own, BLOCK_M, D, START)
    base = tl.program_id(1) // group * Lk
    for number in range(tl.load(PROGRAMS + mine + 2), tl.load(PROGRAMS + mine + 3)):
        start, stop = tl.load(SEGMENTS + 6 * number), tl.load(SEGMENTS + 6 * number + 3)
        low, high = tl.load(SEGMENTS + 6 * number + 4), tl.load(SEGMENTS + 6 * number + 5)
        acc, m, total = walk(acc, m, total, q, K, KS, V, VS, base, start, stop, rows, low, high, scale2, BLOCK_N)
    finish(acc, m, total, ACC, M, TOTAL, OUT, LSE, at, wide, own, LAST)


def table_step(q, k, ks, v, vs, *rest, start, last):
    (B, H, Lq, D), (*state, programs, segments) = q.shape, rest
    table_kernel[(len(programs), B * H)](
        q, k, ks, v, vs, *rest, H // k.shape[1], Lq, k.shape[2], LOG2E * D**-0.5, D, BLOCK_M, BLOCK_N, start, last
    )
    return state
