"""Device functions that change scores and weights inside the kernels: soft cap, dropout, non-finite values."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from ringlab.blocks.triton.interpreter import repair

repair()  # must come before a kernel is defined; does nothing where kernels are compiled


@triton.jit
def tanh(x):
    """Return tanh x in float32, accurate to a few units in the last place.

    This is true even near 0, where 1 − 2/(e^2x + 1) would lose digits.

    Source: Moshier, Cephes mathematical library, tanhf.
    """
    size, square = tl.abs(x), x * x
    large = 1.0 - 2.0 / (tl.math.exp2(size * 2.8853900817779268) + 1.0)
    small = (-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2
    small = (small * square + 1.33314422036e-1) * square - 3.33332819422e-1
    small = small * square * x + x
    return tl.where(size < 0.625, small, tl.where(x < 0.0, -large, large))


@triton.jit
def kept(keys_at, rows_at, draw):
    """Return whether dropout keeps the weight of each pair: the draw of `ringlab.scores`, bit for bit.

    keys_at, rows_at: global positions, which broadcast. draw: batch, head, the two halves of the seed, and the largest
    32-bit word that is dropped; the last three are int32 with the bits of a uint32.
    """
    batch, head, seed_low, seed_high, dropped = draw
    c0, c1 = keys_at.to(tl.uint32), rows_at.to(tl.uint32)
    c2, c3 = batch.to(tl.uint32), (head // 4).to(tl.uint32)
    k0, k1 = seed_low.to(tl.uint32), seed_high.to(tl.uint32)
    for _ in tl.static_range(10):
        a, b = c0, c2
        c0 = tl.umulhi(b, 0xCD9E8D57) ^ c1 ^ k0
        c2 = tl.umulhi(a, 0xD2511F53) ^ c3 ^ k1
        c1, c3 = b * 0xCD9E8D57, a * 0xD2511F53
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    lane = head % 4
    word = tl.where(lane < 2, tl.where(lane == 0, c0, c1), tl.where(lane == 2, c2, c3))
    return word > dropped.to(tl.uint32)


@triton.jit
def spoil(acc, visible, v):
    """Return `acc` with ±inf or NaN added where a row sees such a value.

    The numbers come from products that overflow. For hidden keys the products are 0.
    """
    large = tl.where(visible, 1.7e38, 0.0).to(tl.bfloat16)
    infinite = tl.where(v == -float("inf"), -1.7e38, tl.where(v - v == 0.0, 0.0, 1.7e38))
    acc = tl.dot(large, infinite.to(tl.bfloat16), acc)
    return tl.dot(large, tl.where(v == v, 0.0, -1.7e38).to(tl.bfloat16), acc)  # inf − inf for NaN
