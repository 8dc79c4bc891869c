"""torch's own flash attention operators, which return the lse that a ring needs."""

from __future__ import annotations

import torch
from torch import Tensor

from ringlab.blocks.blockwise import Blockwise
from ringlab.blocks.naive import unsupported_dtype
from ringlab.errors import BackendError
from ringlab.merge import Partial
from ringlab.scores import TileScores
from ringlab.types import KeyValue, Query, RowState

_aten = torch.ops.aten


class Native:
    """Flash attention of torch: on the CPU any float dtype, on CUDA float16 and bfloat16."""

    name = "native"
    thread_safe = True
    offers = Blockwise.offers
    """torch's operators cap no scores, and what they drop follows from no position: `blockwise` computes both here."""

    def __init__(self, largest_causal: int | None = None) -> None:
        # The CPU operator computes whole blocks of 512 keys on the diagonal. Smaller causal tiles waste less
        # there; on AVX-512 machines without AMX that paid, on those with it calls and merges cost more.
        self.largest_causal = largest_causal

    def supports(self, q: Query) -> str | None:
        if q.device.type == "cpu":
            return unsupported_dtype(q)
        if q.device.type != "cuda":
            return f"runs on cpu and cuda, not on {q.device.type}"
        if q.dtype not in (torch.float16, torch.bfloat16):
            return f"on cuda needs float16 or bfloat16, got {q.dtype}"
        if q.shape[-1] % 8 or q.shape[-1] > 256:
            return f"on cuda needs a head dim that is a multiple of 8 up to 256, got {q.shape[-1]}"
        return None

    def forward(
        self,
        q: Query,
        k: KeyValue,
        v: KeyValue,
        *,
        causal: bool,
        scale: float,
        how: TileScores | None = None,
    ) -> Partial:
        if how and how.scores.wishes:
            return Blockwise().forward(q, k, v, causal=causal, scale=scale, how=how)
        if q.numel() == 0 or k.numel() == 0:
            return Partial.identity(q)
        q, k, v = map(_dense, (q, k, v))
        if q.device.type == "cuda":
            return _cuda_forward(q, k, v, causal, scale)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        # The operator lets a non-finite value reach rows that do not see it (0·NaN = NaN), and gives a
        # row whose scores are all −inf, or are all NaN and fewer than a vector register holds, out 0 with lse 0.
        leaks = causal and not torch.isfinite(out.sum(dtype=lse.dtype))
        if leaks or (not lse.all() and ((lse == 0) & (out == 0).all(dim=-1)).any()):
            return Blockwise().forward(q, k, v, causal=causal, scale=scale)
        return Partial(out, lse)

    def backward(
        self,
        dout: Query,
        q: Query,
        k: KeyValue,
        v: KeyValue,
        out: Query,
        lse: RowState,
        delta: RowState,
        *,
        causal: bool,
        scale: float,
        how: TileScores | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if how and how.scores.wishes:
            return Blockwise().backward(dout, q, k, v, out, lse, delta, causal=causal, scale=scale, how=how)
        if q.numel() == 0 or k.numel() == 0:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dout, q, k, v, out = map(_dense, (dout, q, k, v, out))
        if q.device.type == "cuda":
            return _cuda_backward(dout, q, k, v, out, lse, causal, scale)
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, scale=scale
        )


def _dense(x: Tensor) -> Tensor:
    # The operators take any strides but on the last axis, which they read as if it were dense.
    return x if x.stride(-1) == 1 else x.contiguous()


def _square(q: Tensor, k: Tensor, causal: bool) -> None:
    # The CUDA operators align a rectangular causal mask differently from version to version.
    if causal and q.shape[-2] != k.shape[-2]:
        raise BackendError(
            "a square causal tile for the native block on CUDA",
            f"{q.shape[-2]} rows and {k.shape[-2]} keys",
            "cut the tile into a square and a full one, as ringlab.plan does",
        )


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Partial:
    _square(q, k, causal)
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return Partial(out, lse)


def _cuda_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    _square(q, k, causal)
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the random state of dropout
    return _aten._scaled_dot_product_flash_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        None,
        None,
        q.shape[-2],
        k.shape[-2],
        0.0,
        causal,
        unused,
        unused,
        scale=scale,
    )
