"""The block backend `native`: torch's own flash attention operators, which return the lse that a ring needs."""

from __future__ import annotations

import torch
from torch import Tensor

from ringlab.blocks.blockwise import Blockwise
from ringlab.blocks.library import BackwardTile, Capability, LibraryBlock, on_cuda
from ringlab.blocks.naive import unsupported_dtype
from ringlab.blocks.protocol import BackwardRows
from ringlab.merge import Partial
from ringlab.types import Query

_aten = torch.ops.aten


class Native(LibraryBlock):
    """Flash attention of torch: any float dtype on the CPU, float16 and bfloat16 on GPUs from sm_80 on.

    torch's operators have no soft cap, their dropout does not depend on positions, and they take no gradient
    of lse. Tiles with these rules, and the backward of rows with a gradient of lse, are computed by
    `Blockwise`. The operators take only q, k and v of one head dim.
    """

    name = "native"

    def __init__(self, largest_causal: int | None = None) -> None:
        # On the diagonal the CPU operator computes whole blocks of 512 keys, so smaller causal tiles waste
        # less. They were faster on AVX-512 machines without AMX. With AMX the additional calls and merges
        # cost more than they save.
        self.largest_causal = largest_causal

    def supports(self, q: Query) -> str | None:
        if q.device.type == "cpu":
            return unsupported_dtype(q)
        if q.device.type != "cuda":
            return f"runs on cpu and cuda, not on {q.device.type}"
        return super().supports(q)

    def largest_head_dim(self, capability: Capability) -> int:
        return 256

    def _tile_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Partial:
        if on_cuda(q):
            return super()._tile_forward(q, k, v, causal, scale)
        q, k, v = map(_dense, (q, k, v))
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        # The operator lets a non-finite value reach rows that do not see its key (0·NaN = NaN). It also returns
        # out 0 and lse 0 for a row whose scores are all −inf, or all NaN and too few to fill a vector register.
        leaks = causal and not torch.isfinite(out.sum(dtype=lse.dtype))
        if leaks or (not lse.all() and ((lse == 0) & (out == 0).all(dim=-1)).any()):
            return Blockwise().forward(q, k, v, causal=causal, scale=scale)
        return Partial(out, lse)

    def _tile_backward(
        self, rows: BackwardRows, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if on_cuda(rows.q):
            return super()._tile_backward(rows, k, v, causal, scale)
        assert rows.out is not None
        dout, q, k, v, out = map(_dense, (rows.dout, rows.q, k, v, rows.out))
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, rows.lse, 0.0, causal, scale=scale
        )

    def _library_forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def _library_backward(self, tile: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
        # The operator requires a random state for dropout, which is not used here.
        unused = torch.zeros((), dtype=torch.int64, device=tile.q.device)
        lengths = tile.q.shape[-2], tile.k.shape[-2]
        return _aten._scaled_dot_product_flash_attention_backward(
            tile.dout, tile.q, tile.k, tile.v, tile.out, tile.lse, None, None, *lengths,
            0.0, tile.causal, unused, unused, scale=tile.scale,
        )  # fmt: skip


def _dense(x: Tensor) -> Tensor:
    # The CPU operators accept any strides of the first axes, but read the last axis as if it were dense.
    return x if x.stride(-1) == 1 else x.contiguous()
