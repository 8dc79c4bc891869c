"""The Triton kernels: one step of the ring forward, and its gradients with respect to q, and to k and v.

Every kernel runs one program per entry of a table of programs and per head (see `visits`). A program owns a
few rows of one tensor and walks over segments of the other. A segment has two parts: tiles in which everything is
visible, which need no mask, and tiles that are masked by

    key j is visible to row i   ⟺   j ≤ i + shift, and j (or i) is before the end of the segment,

with WINDOW also only where j ≥ i + low.

State is float32: `acc` = Σ e^(s−m) v, not normalized, `m` the largest score of a row in units of log 2, and
`total` = Σ e^(s−m), with s = scale·q·k. The state of a row that has seen no key is (0, −inf, 0). Products of
16-bit numbers are added in float32; `scale` multiplies float32 scores and is never folded into q.

With SOFTCAP s = cap·tanh(scale·q·k / cap), before the mask. With DROPOUT a weight that is not `kept` counts
only in `total`; the global positions ROWS_AT and KEYS_AT decide which weights are kept. The head dim of q
and k is HEAD_DIM, padded to BLOCK_D, a power of two. The head dim of v, out and their gradients is
VALUE_DIM, padded to BLOCK_V. Axes and letters are those of `ringlab.types`. The names of a tensor's strides
over batch, heads and tokens end in `_b`, `_h` and `_l`; they count the units of `addressing.strides`. The
head dim is dense.

Source: arXiv 2307.08691 (tiles and state), arXiv 2310.01889 (state carried from step to step).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from ringlab.blocks.triton.addressing import places, strides, tile
from ringlab.blocks.triton.interpreter import repair
from ringlab.blocks.triton.scoring import kept, spoil, tanh

repair()  # must come before a kernel is defined; does nothing where kernels are compiled

# These arguments differ between calls. Kernels specialised for multiples of 16 would be no faster, and there
# would be more of them to compile.
_COUNTS = ["n_programs", "n_rows", "n_keys", "H", "first_head", "seed_low", "seed_high", "dropped"]
_STRIDES = [f"{name}_{axis}" for name in ("q", "k", "v", "dout") for axis in ("b", "h", "l")]


# fmt: off
@triton.jit
def _attend(
    acc, m, total, q, k_base, v_base, key, end, shift, low, rows, k_l, v_l, unit, inner, rows_at, KEYS_AT, draw,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, NON_FINITE: tl.constexpr, PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, WINDOW: tl.constexpr,
):
# fmt: on
    """Return the state after one tile of keys, from `key` on. `unit` is log2(e) times the scale, or the cap if SOFTCAP."""
    keys = key + tl.arange(0, BLOCK_N)
    inside = keys < end
    k = tile(k_base, key, k_l, inside, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP:
        scores = tanh(scores * inner)
    if MASKED:
        visible = inside[None, :] & (keys[None, :] <= rows[:, None] + shift)
        if WINDOW:
            visible = visible & (keys[None, :] >= rows[:, None] + low)
        scores = tl.where(visible, scores * unit, -float("inf"))
        factor = 1.0
    else:
        factor = unit  # applied in the exponent, where it is part of a fused multiply-add
    m_new = tl.maximum(m, tl.max(scores, 1) * factor)
    # In a row that has seen no score above −inf, −inf − (−inf) would be NaN.
    m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
    p = tl.math.exp2(scores * factor - m_safe[:, None])
    decay = tl.math.exp2(m - m_safe)
    total = total * decay + tl.sum(p, 1)
    if DROPOUT:
        keys_at = tl.load(KEYS_AT + keys, mask=inside, other=0)
        alive = kept(keys_at[None, :], rows_at[:, None], draw)
        p = tl.where(alive, p, 0.0)
    v = tile(v_base, key, v_l, inside, BLOCK_N, VALUE_DIM, BLOCK_V, MASKED)
    acc = acc * decay[:, None]
    if MASKED and NON_FINITE:
        # A hidden key has weight 0, but 0·NaN = NaN, so its value is replaced by 0 if it is not finite.
        acc = tl.dot(p.to(v.dtype), tl.where(v - v == 0.0, v, 0.0), acc, input_precision=PRECISION)
        acc = spoil(acc, visible, v)
    else:
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, m_new, total


# fmt: off
@triton.jit(do_not_specialize=_COUNTS + _STRIDES)
def forward_step(
    Q, K, V, ACC, M, TOTAL, OUT, LSE, PROGRAMS, SEGMENTS, LOWS, ROWS_AT, KEYS_AT, q_b, q_h, q_l, k_b, k_h, k_l, v_b,
    v_h, v_l, n_programs, n_rows, H, first_head, seed_low, seed_high, dropped, scale, cap, keep,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    NEGATIVE: tl.constexpr, NON_FINITE: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, WINDOW: tl.constexpr,
):
# fmt: on
    """Compute one step of the ring: the rows of Q attend to the block (K, V).

    FIRST starts a state instead of loading it; LAST writes OUT, in its dtype, and LSE, a natural logarithm,
    instead of storing the state. ACC, M, TOTAL, OUT and LSE are contiguous. `scale` and `cap` include
    log2(e). `scale` is not negative; with NEGATIVE the scores change sign. `keep` is 1/(1 − dropout). With
    NON_FINITE, inf or NaN in V reach only the rows that see them. Without it, they may also spoil rows that
    share a masked tile.
    Grid: n_programs · B · H.
    """
    q_b, q_h, q_l = strides(q_b, q_h, q_l, HEAD_DIM)
    k_b, k_h, k_l = strides(k_b, k_h, k_l, HEAD_DIM)
    v_b, v_h, v_l = strides(v_b, v_h, v_l, VALUE_DIM)
    program = tl.program_id(0) % n_programs
    head = tl.program_id(0) // n_programs
    row = tl.load(PROGRAMS + 4 * program)
    row_stop = tl.load(PROGRAMS + 4 * program + 1)
    first_segment = tl.load(PROGRAMS + 4 * program + 2)
    last_segment = tl.load(PROGRAMS + 4 * program + 3)

    rows = row + tl.arange(0, BLOCK_M)
    owned = rows < row_stop
    batch = tl.cast(head // H, tl.int64)
    query_head = head % H
    k_base = K + batch * k_b + tl.cast(query_head // GROUP, tl.int64) * k_h
    v_base = V + batch * v_b + tl.cast(query_head // GROUP, tl.int64) * v_h
    q_base = Q + batch * q_b + tl.cast(query_head, tl.int64) * q_h
    q = tile(q_base, row, q_l, owned, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    if NEGATIVE:
        q = -q
    inner, unit = scale / cap, cap if SOFTCAP else scale
    rows_at = tl.load(ROWS_AT + rows, mask=owned, other=0) if DROPOUT else rows
    draw = (batch, first_head + query_head, seed_low, seed_high, dropped)
    state = tl.cast(head, tl.int64) * n_rows
    if FIRST:
        acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
        m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
    else:
        acc = tile(ACC + state * VALUE_DIM, row, VALUE_DIM, owned, BLOCK_M, VALUE_DIM, BLOCK_V, True)
        m = tl.load(M + state + rows, mask=owned, other=-float("inf"))
        total = tl.load(TOTAL + state + rows, mask=owned, other=0.0)

    for segment in tl.range(first_segment, last_segment):
        begin = tl.load(SEGMENTS + 4 * segment)
        split = tl.load(SEGMENTS + 4 * segment + 1)
        end = tl.load(SEGMENTS + 4 * segment + 2)
        shift = tl.load(SEGMENTS + 4 * segment + 3)
        low = tl.load(LOWS + segment) if WINDOW else shift
        for key in tl.range(begin, split, BLOCK_N):
            acc, m, total = _attend(
                acc, m, total, q, k_base, v_base, key, end, shift, low, rows, k_l, v_l, unit, inner, rows_at, KEYS_AT,
                draw, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N, False, NON_FINITE, PRECISION, SOFTCAP,
                DROPOUT, WINDOW,
            )  # fmt: skip
        for key in tl.range(split, end, BLOCK_N):
            acc, m, total = _attend(
                acc, m, total, q, k_base, v_base, key, end, shift, low, rows, k_l, v_l, unit, inner, rows_at, KEYS_AT,
                draw, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N, True, NON_FINITE, PRECISION, SOFTCAP,
                DROPOUT, WINDOW,
            )  # fmt: skip

    offsets, deep = places(row, owned, BLOCK_M, VALUE_DIM, BLOCK_V)
    if LAST:
        unseen = total == 0.0
        total = tl.where(unseen, 1.0, total)
        if DROPOUT:
            acc = acc * keep
        out = acc / total[:, None]
        lse = tl.where(unseen, -float("inf"), (m + tl.math.log2(total)) * 0.6931471805599453)
        tl.store(OUT + state * VALUE_DIM + offsets, out.to(OUT.dtype.element_ty), mask=deep)
        tl.store(LSE + state + rows, lse, mask=owned)
    else:
        tl.store(ACC + state * VALUE_DIM + offsets, acc, mask=deep)
        tl.store(M + state + rows, m, mask=owned)
        tl.store(TOTAL + state + rows, total, mask=owned)


@triton.jit
def _log2(lse):
    """Return a natural lse in units of log 2; +inf for a row that saw no key, which makes all its weights 0."""
    return tl.where(lse == -float("inf"), float("inf"), lse * 1.4426950408889634)


# fmt: off
@triton.jit
def _add_to_dq(
    dq, q, dout, lse, delta, k_base, v_base, key, end, shift, low, rows, k_l, v_l, unit, inner, rows_at, KEYS_AT,
    draw, keep,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, WINDOW: tl.constexpr,
):
# fmt: on
    """Return dQ without the factor scale after one tile of keys. `unit`: as in `_attend`."""
    keys = key + tl.arange(0, BLOCK_N)
    inside = keys < end
    k = tile(k_base, key, k_l, inside, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
    v = tile(v_base, key, v_l, inside, BLOCK_N, VALUE_DIM, BLOCK_V, MASKED)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP:
        scores = tanh(scores * inner)
    p = tl.math.exp2(scores * unit - lse[:, None])
    if MASKED:
        visible = inside[None, :] & (keys[None, :] <= rows[:, None] + shift)
        if WINDOW:
            visible = visible & (keys[None, :] >= rows[:, None] + low)
        p = tl.where(visible, p, 0.0)
    dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    if DROPOUT:
        keys_at = tl.load(KEYS_AT + keys, mask=inside, other=0)
        alive = kept(keys_at[None, :], rows_at[:, None], draw)
        dp = tl.where(alive, dp * keep, 0.0)
    ds = p * (dp - delta[:, None])
    if SOFTCAP:
        ds = ds * (1.0 - scores * scores)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


# fmt: off
@triton.jit(do_not_specialize=_COUNTS + _STRIDES)
def backward_dq(
    Q, K, V, DOUT, LSE, DELTA, ACC, DQ, PROGRAMS, SEGMENTS, LOWS, ROWS_AT, KEYS_AT, q_b, q_h, q_l, k_b, k_h, k_l, v_b,
    v_h, v_l, dout_b, dout_h, dout_l, n_programs, n_rows, H, first_head, seed_low, seed_high, dropped, scale, cap, keep,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    PRECISION: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, WINDOW: tl.constexpr,
):
# fmt: on
    """Add one block's part to dQ: dS = P·(dO·Vᵀ − delta), dQ += scale·dS·K.

    LSE and DELTA = rowsum(dO·O) are those of the whole attention, contiguous. FIRST starts a sum instead of
    loading ACC; LAST writes DQ, in its dtype, instead of storing ACC. ACC is the sum without the factor scale.
    Neither `scale` nor `cap` includes log2(e); `keep` is 1/(1 − dropout). Grid: n_programs · B · H.
    """
    q_b, q_h, q_l = strides(q_b, q_h, q_l, HEAD_DIM)
    k_b, k_h, k_l = strides(k_b, k_h, k_l, HEAD_DIM)
    v_b, v_h, v_l = strides(v_b, v_h, v_l, VALUE_DIM)
    dout_b, dout_h, dout_l = strides(dout_b, dout_h, dout_l, VALUE_DIM)
    program = tl.program_id(0) % n_programs
    head = tl.program_id(0) // n_programs
    row = tl.load(PROGRAMS + 4 * program)
    row_stop = tl.load(PROGRAMS + 4 * program + 1)
    first_segment = tl.load(PROGRAMS + 4 * program + 2)
    last_segment = tl.load(PROGRAMS + 4 * program + 3)

    rows = row + tl.arange(0, BLOCK_M)
    owned = rows < row_stop
    batch = tl.cast(head // H, tl.int64)
    query_head = tl.cast(head % H, tl.int64)
    key_head = query_head // GROUP
    k_base = K + batch * k_b + key_head * k_h
    v_base = V + batch * v_b + key_head * v_h
    q_base = Q + batch * q_b + query_head * q_h
    dout_base = DOUT + batch * dout_b + query_head * dout_h
    q = tile(q_base, row, q_l, owned, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    dout = tile(dout_base, row, dout_l, owned, BLOCK_M, VALUE_DIM, BLOCK_V, True)
    state = tl.cast(head, tl.int64) * n_rows
    lse = _log2(tl.load(LSE + state + rows, mask=owned, other=float("inf")))
    delta = tl.load(DELTA + state + rows, mask=owned, other=0.0)
    if FIRST:
        dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    else:
        dq = tile(ACC + state * HEAD_DIM, row, HEAD_DIM, owned, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    inner, unit = scale / cap, (cap if SOFTCAP else scale) * 1.4426950408889634
    rows_at = tl.load(ROWS_AT + rows, mask=owned, other=0) if DROPOUT else rows
    draw = (batch, first_head + query_head, seed_low, seed_high, dropped)

    for segment in tl.range(first_segment, last_segment):
        begin = tl.load(SEGMENTS + 4 * segment)
        split = tl.load(SEGMENTS + 4 * segment + 1)
        end = tl.load(SEGMENTS + 4 * segment + 2)
        shift = tl.load(SEGMENTS + 4 * segment + 3)
        low = tl.load(LOWS + segment) if WINDOW else shift
        for key in tl.range(begin, split, BLOCK_N):
            dq = _add_to_dq(
                dq, q, dout, lse, delta, k_base, v_base, key, end, shift, low, rows, k_l, v_l, unit, inner,
                rows_at, KEYS_AT, draw, keep, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N, False, PRECISION, SOFTCAP,
                DROPOUT, WINDOW,
            )  # fmt: skip
        for key in tl.range(split, end, BLOCK_N):
            dq = _add_to_dq(
                dq, q, dout, lse, delta, k_base, v_base, key, end, shift, low, rows, k_l, v_l, unit, inner,
                rows_at, KEYS_AT, draw, keep, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N, True, PRECISION, SOFTCAP,
                DROPOUT, WINDOW,
            )  # fmt: skip

    offsets, deep = places(row, owned, BLOCK_M, HEAD_DIM, BLOCK_D)
    if LAST:
        tl.store(DQ + state * HEAD_DIM + offsets, (dq * scale).to(DQ.dtype.element_ty), mask=deep)
    else:
        tl.store(ACC + state * HEAD_DIM + offsets, dq, mask=deep)


# fmt: off
@triton.jit
def _add_to_dkv(
    dk, dv, k, v, q_base, dout_base, lse_base, delta_base, row, end, shift, low, keys, q_l, dout_l, unit, inner,
    ROWS_AT, keys_at, draw, keep,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, WINDOW: tl.constexpr,
):
# fmt: on
    """Return dK without the factor scale, and dV without keep, after one tile of rows; scores are keys × rows."""
    rows = row + tl.arange(0, BLOCK_M)
    inside = rows < end
    q = tile(q_base, row, q_l, inside, BLOCK_M, HEAD_DIM, BLOCK_D, MASKED)
    dout = tile(dout_base, row, dout_l, inside, BLOCK_M, VALUE_DIM, BLOCK_V, MASKED)
    if MASKED:
        lse = tl.load(lse_base + rows, mask=inside, other=float("inf"))
        delta = tl.load(delta_base + rows, mask=inside, other=0.0)
    else:
        lse = tl.load(lse_base + rows)
        delta = tl.load(delta_base + rows)
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    if SOFTCAP:
        scores = tanh(scores * inner)
    p = tl.math.exp2(scores * unit - _log2(lse)[None, :])
    if MASKED:
        visible = inside[None, :] & (keys[:, None] <= rows[None, :] + shift)
        if WINDOW:
            visible = visible & (keys[:, None] >= rows[None, :] + low)
        p = tl.where(visible, p, 0.0)
    weights = p
    if DROPOUT:
        rows_at = tl.load(ROWS_AT + rows, mask=inside, other=0)
        alive = kept(keys_at[:, None], rows_at[None, :], draw)
        weights = tl.where(alive, p, 0.0)
    dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
    if DROPOUT:
        dp = tl.where(alive, dp * keep, 0.0)
    ds = p * (dp - delta[None, :])
    if SOFTCAP:
        ds = ds * (1.0 - scores * scores)
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


# fmt: off
@triton.jit(do_not_specialize=_COUNTS + _STRIDES)
def backward_dkv(
    Q, K, V, DOUT, LSE, DELTA, DK, DV, PROGRAMS, SEGMENTS, LOWS, ROWS_AT, KEYS_AT, q_b, q_h, q_l, k_b, k_h, k_l, v_b,
    v_h, v_l, dout_b, dout_h, dout_l, n_programs, n_rows, n_keys, H, first_head, seed_low, seed_high, dropped, scale,
    cap, keep,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, WINDOW: tl.constexpr,
):
# fmt: on
    """Write what the rows of this rank add to the gradients of a block: dV = Pᵀ·dO, dK = scale·dSᵀ·Q.

    A program owns keys and walks over rows, for each of the GROUP query heads that read its key/value head. One
    program writes each entry of DK and DV, contiguous and float32, so the order of the sum is fixed.
    In a segment the masked rows come first, begin … split, then split … end. `scale`, `cap`, `keep`: see `backward_dq`.
    Grid: n_programs · B · K.
    """
    q_b, q_h, q_l = strides(q_b, q_h, q_l, HEAD_DIM)
    k_b, k_h, k_l = strides(k_b, k_h, k_l, HEAD_DIM)
    v_b, v_h, v_l = strides(v_b, v_h, v_l, VALUE_DIM)
    dout_b, dout_h, dout_l = strides(dout_b, dout_h, dout_l, VALUE_DIM)
    program = tl.program_id(0) % n_programs
    head = tl.program_id(0) // n_programs
    key = tl.load(PROGRAMS + 4 * program)
    key_stop = tl.load(PROGRAMS + 4 * program + 1)
    first_segment = tl.load(PROGRAMS + 4 * program + 2)
    last_segment = tl.load(PROGRAMS + 4 * program + 3)

    keys = key + tl.arange(0, BLOCK_N)
    owned = keys < key_stop
    key_heads = H // GROUP
    batch = tl.cast(head // key_heads, tl.int64)
    key_head = tl.cast(head % key_heads, tl.int64)
    k = tile(K + batch * k_b + key_head * k_h, key, k_l, owned, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    v = tile(V + batch * v_b + key_head * v_h, key, v_l, owned, BLOCK_N, VALUE_DIM, BLOCK_V, True)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    inner, unit = scale / cap, (cap if SOFTCAP else scale) * 1.4426950408889634
    keys_at = tl.load(KEYS_AT + keys, mask=owned, other=0) if DROPOUT else keys

    for member in tl.range(0, GROUP):
        query_head = key_head * GROUP + member
        draw = (batch, first_head + query_head, seed_low, seed_high, dropped)
        q_base = Q + batch * q_b + query_head * q_h
        dout_base = DOUT + batch * dout_b + query_head * dout_h
        lse_base = LSE + (batch * H + query_head) * n_rows
        delta_base = DELTA + (batch * H + query_head) * n_rows
        for segment in tl.range(first_segment, last_segment):
            begin = tl.load(SEGMENTS + 4 * segment)
            split = tl.load(SEGMENTS + 4 * segment + 1)
            end = tl.load(SEGMENTS + 4 * segment + 2)
            shift = tl.load(SEGMENTS + 4 * segment + 3)
            low = tl.load(LOWS + segment) if WINDOW else shift
            for row in tl.range(begin, split, BLOCK_M):
                dk, dv = _add_to_dkv(
                    dk, dv, k, v, q_base, dout_base, lse_base, delta_base, row, split, shift, low, keys, q_l, dout_l,
                    unit, inner, ROWS_AT, keys_at, draw, keep, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_M,
                    True, PRECISION, SOFTCAP, DROPOUT, WINDOW,
                )  # fmt: skip
            for row in tl.range(split, end, BLOCK_M):
                dk, dv = _add_to_dkv(
                    dk, dv, k, v, q_base, dout_base, lse_base, delta_base, row, end, shift, low, keys, q_l, dout_l,
                    unit, inner, ROWS_AT, keys_at, draw, keep, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_M,
                    False, PRECISION, SOFTCAP, DROPOUT, WINDOW,
                )  # fmt: skip

    first = tl.cast(head, tl.int64) * n_keys + key
    offsets, deep = places(first, owned, BLOCK_N, HEAD_DIM, BLOCK_D)
    tl.store(DK + offsets, dk * scale, mask=deep)
    offsets, deep = places(first, owned, BLOCK_N, VALUE_DIM, BLOCK_V)
    tl.store(DV + offsets, dv * keep if DROPOUT else dv, mask=deep)
