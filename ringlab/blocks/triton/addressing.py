"""Device functions that compute where a tile's numbers lie in memory, to load tiles and to store results."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from ringlab.blocks.triton.interpreter import repair

repair()  # must come before a kernel is defined; does nothing where kernels are compiled


@triton.jit
def strides(batch, heads, tokens, DIM: tl.constexpr):
    """Return strides in elements. They are given in units of gcd(DIM, 8) elements.

    The compiler then knows this factor, and loads rows 16 bytes at a time where DIM is a multiple of 8.
    """
    UNIT: tl.constexpr = (DIM | 8) & -(DIM | 8)
    # A tensor may have more than 2^31 elements; the offsets within a tile have 32 bits.
    return tl.cast(batch, tl.int64) * UNIT, tl.cast(heads, tl.int64) * UNIT, tokens * UNIT


# fmt: off
@triton.jit
def tile(
    base, start, stride, within,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):
# fmt: on
    """Return rows start … start + ROWS of a head; 0 where not `within`, and beyond the head dim."""
    offsets = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]
    # The pointer is advanced in 64 bits once per tile, because a long sequence has more than 2^31 elements.
    pointers = base + tl.cast(start, tl.int64) * stride + offsets
    deep = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    if MASKED:
        if BLOCK_D == HEAD_DIM:
            return tl.load(pointers, mask=within[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=within[:, None] & deep, other=0.0)
    else:
        if BLOCK_D == HEAD_DIM:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=deep, other=0.0)


@triton.jit
def places(row, owned, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return the offsets of ROWS rows of a dense tensor, from `row` on, and a mask of the valid ones.

    The mask selects the entries that are in `owned` rows and within the head dim.
    """
    offsets = tl.cast(row, tl.int64) * DIM
    offsets += tl.arange(0, ROWS)[:, None] * DIM + tl.arange(0, BLOCK)[None, :]
    return offsets, owned[:, None] & (tl.arange(0, BLOCK) < DIM)[None, :]
