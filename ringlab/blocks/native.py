"""The block backend `native`: torch's own flash attention operators, which return the lse that a ring needs.

The operators take only q, k and v of one head dim. If v has another head dim, the narrower tensors are padded
with zeros, which do not change scores, out or gradients, and the padding is cut off the results.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ringlab.blocks.blockwise import Blockwise
from ringlab.blocks.naive import unsupported_dtype
from ringlab.blocks.protocol import BackwardRows, Block
from ringlab.errors import BackendError
from ringlab.merge import Partial
from ringlab.scores import PLAIN_RULES, TileRules
from ringlab.types import KeyValue, Query, Value

_aten = torch.ops.aten


class Native(Block):
    """Flash attention of torch: any float dtype on the CPU, float16 and bfloat16 on GPUs from sm_80 on.

    torch's operators have no soft cap, their dropout does not depend on positions, and they take no gradient
    of lse. Tiles with these rules, and the backward of rows with a gradient of lse, are computed by
    `Blockwise`.
    """

    name = "native"
    thread_safe = True
    supported_rules = Blockwise.supported_rules

    def __init__(self, largest_causal: int | None = None) -> None:
        # On the diagonal the CPU operator computes whole blocks of 512 keys, so smaller causal tiles waste less.
        # They were faster on AVX-512 machines without AMX. With AMX the additional calls and merges cost more.
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
        return too_old(q.device)

    def forward(
        self,
        q: Query,
        k: KeyValue,
        v: Value,
        *,
        causal: bool,
        scale: float,
        rules: TileRules = PLAIN_RULES,
    ) -> Partial:
        if rules.requirements:
            return Blockwise().forward(q, k, v, causal=causal, scale=scale, rules=rules)
        if q.numel() == 0 or k.numel() == 0:
            return Partial.identity(q, v.shape[-1])
        if q.shape[-1] != v.shape[-1]:
            part = self.forward(*_of_one_width(q, k, v), causal=causal, scale=scale)
            return Partial(_cut(part.out, v), part.lse)
        if _on_cuda(q):
            return _cuda_forward(q, k, v, causal, scale)
        q, k, v = map(_dense, (q, k, v))
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        # The operator lets a non-finite value reach rows that do not see its key (0·NaN = NaN). It also returns
        # out 0 and lse 0 for a row whose scores are all −inf, or all NaN and too few to fill a vector register.
        leaks = causal and not torch.isfinite(out.sum(dtype=lse.dtype))
        if leaks or (not lse.all() and ((lse == 0) & (out == 0).all(dim=-1)).any()):
            return Blockwise().forward(q, k, v, causal=causal, scale=scale)
        return Partial(out, lse)

    def backward(
        self,
        rows: BackwardRows,
        k: KeyValue,
        v: Value,
        *,
        causal: bool,
        scale: float,
        rules: TileRules = PLAIN_RULES,
    ) -> tuple[Query, KeyValue, Value]:
        # torch's operators compute delta themselves, from dout and out.
        if rules.requirements or rows.through_lse or rows.out is None:
            return Blockwise().backward(rows, k, v, causal=causal, scale=scale, rules=rules)
        if rows.q.numel() == 0 or k.numel() == 0:
            return torch.zeros_like(rows.q), torch.zeros_like(k), torch.zeros_like(v)
        if rows.q.shape[-1] != v.shape[-1]:
            q, wide_k, wide_v, dout, out = _of_one_width(rows.q, k, v, rows.dout, rows.out)
            wide = replace(rows, q=q, dout=dout, out=out)
            found = self.backward(wide, wide_k, wide_v, causal=causal, scale=scale)
            dq, dk, dv = (_cut(x, like) for x, like in zip(found, (rows.q, k, v), strict=True))
            return dq, dk, dv
        if _on_cuda(rows.q):
            return _cuda_backward(rows.dout, rows.q, k, v, rows.out, rows.lse, causal, scale)
        dout, q, k, v, out = map(_dense, (rows.dout, rows.q, k, v, rows.out))
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, rows.lse, 0.0, causal, scale=scale
        )


def too_old(device: torch.device) -> str | None:
    """Return the reason why a GPU is too old for kernels that need Ampere's instructions, or None."""
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"needs a GPU of compute capability 8.0 or more, got {major}.{minor}"


def _on_cuda(x: Tensor) -> bool:
    return x.device.type == "cuda"


def _dense(x: Tensor) -> Tensor:
    # The CPU operators accept any strides of the first axes, but read the last axis as if it were dense.
    return x if x.stride(-1) == 1 else x.contiguous()


_LOAD = 16  # bytes that the CUDA kernels load at once; addresses must be multiples of this number


def _loadable(x: Tensor) -> Tensor:
    """Return `x`, or a dense copy if the CUDA kernels cannot load the rows of `x`."""
    rows = [x.data_ptr(), *(step * x.element_size() for step in x.stride()[:-1])]
    fits = x.stride(-1) == 1 and not any(place % _LOAD for place in rows)
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _of_one_width(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors padded with zeros to the largest of their head dims."""
    most = max(x.shape[-1] for x in tensors)
    return tuple(x if x.shape[-1] == most else F.pad(x, (0, most - x.shape[-1])) for x in tensors)


def _cut(x: Tensor, like: Tensor) -> Tensor:
    """Return `x` cut to the head dim of `like`, as a copy."""
    return x if x.shape[-1] == like.shape[-1] else x[..., : like.shape[-1]].contiguous()


def _check_square(q: Tensor, k: Tensor, causal: bool) -> None:
    """Return if a causal tile is square. Raises: BackendError."""
    # Versions of the CUDA operators differ in how they align a rectangular causal mask.
    if causal and q.shape[-2] != k.shape[-2]:
        raise BackendError(
            "a square causal tile for the native block on CUDA",
            f"{q.shape[-2]} rows and {k.shape[-2]} keys",
            "cut the tile into a square one and a full one, as ringlab.plan does",
        )


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Partial:
    _check_square(q, k, causal)
    q, k, v = map(_loadable, (q, k, v))
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return Partial(out, lse)


def _cuda_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check_square(q, k, causal)
    dout, q, k, v, out = map(_loadable, (dout, q, k, v, out))
    lse = lse.contiguous()  # the kernel ignores strides of lse, and torch makes no copy
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # in place of the random state of dropout
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
