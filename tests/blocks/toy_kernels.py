"""A small attention-like kernel, to test the offline compiler with tiles that fit and tiles that do not."""

from __future__ import annotations

import triton
import triton.language as tl

from ringlab.blocks.triton.compiling import Source
from ringlab.blocks.triton.offline import Job

NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@triton.jit
def toy(
    Q,
    K,
    V,
    Out,
    keys,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
    P: tl.constexpr,
):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, D)
    q = tl.load(Q + rows[:, None] * D + d[None, :])
    out = tl.zeros((M, D), tl.float32)
    for start in tl.range(0, keys, N, num_stages=STAGES):
        n = start + tl.arange(0, N)
        k = tl.load(K + n[:, None] * D + d[None, :], mask=n[:, None] < keys, other=0.0)
        v = tl.load(V + n[:, None] * D + d[None, :], mask=n[:, None] < keys, other=0.0)
        p = tl.math.exp2(tl.dot(q, tl.trans(k), input_precision=P))
        out = tl.dot(p.to(v.dtype), v, out, input_precision=P)
    tl.store(Out + rows[:, None] * D + d[None, :], out)


@triton.jit
def wrong(Q, keys, D: tl.constexpr):
    tl.store(Q + tl.arange(0, D), tl.no_such_function(keys))


def source(job: Job) -> Source:
    pointer = f"*{NAMES[job.dtype]}"
    if job.kernel == "wrong":
        return Source(wrong, {"Q": pointer, "keys": "i32"}, {"D": job.head_dim})
    if job.kernel == "crashes":
        import os

        os._exit(7)
    config = job.config
    sizes = {"D": job.head_dim, "M": config.block_m, "N": config.block_n}
    return Source(
        toy,
        {"Q": pointer, "K": pointer, "V": pointer, "Out": "*fp32", "keys": "i32"},
        sizes | {"STAGES": config.num_stages, "P": config.precision},
        frozenset({"Q", "K", "V", "Out"}),
    )
