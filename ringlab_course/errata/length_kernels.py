"""Two kernels that add up a row of known length, as published and mended; imported only to compile them."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ringlab.blocks.triton.compiling import Source
from ringlab.blocks.triton.offline import Job


@triton.jit
def published(X: Any, LENGTH: Any, OUT: Any, BLOCK: tl.constexpr) -> None:
    """As published: the number of remaining numbers is loaded, and made a compile-time constant."""
    left: tl.constexpr = tl.minimum(tl.load(LENGTH), BLOCK)
    tl.store(OUT, tl.sum(tl.load(X + tl.arange(0, left)), 0))


@triton.jit
def mended(X: Any, LENGTH: Any, OUT: Any, BLOCK: tl.constexpr) -> None:
    """The block's size is the constant; the kernel masks the positions beyond the length."""
    index = tl.arange(0, BLOCK)
    tl.store(OUT, tl.sum(tl.load(X + index, mask=index < tl.load(LENGTH), other=0.0), 0))


def source(job: Job) -> Source:
    """Return one of the two kernels in the form that the compiler takes."""
    types = {"X": "*fp32", "LENGTH": "*i32", "OUT": "*fp32"}
    return Source(
        {"published": published, "mended": mended}[job.kernel], types, {"BLOCK": job.config.block_m}
    )
