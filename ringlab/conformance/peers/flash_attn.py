"""A stand-in for flash-attn's compiled kernels, with which packages that need them can be checked on a CPU.

It keeps the documented contract of `_flash_attn_forward` and `_flash_attn_backward` of flash-attn 2.7 and
later: tensors (B, L, H, D), any number of query heads per key/value head, a causal mask aligned to the bottom
right, out in the inputs' dtype, lse (B, H, L) in float32 with the natural logarithm, +∞ for a row that sees
no key, and gradients written into the tensors dq, dk and dv that the caller passes. The two functions for
packed sequences, (tokens, H, D) with lse (H, tokens), call these functions for one document after the other.
The stand-in computes in float32, one head at a time, with the scores of that head in memory. With
`Kernel.OPERATOR` it uses torch's own flash operator for CPUs, which is fast. Messages, masks and sums over
blocks are the package's own code. Options outside the contract above (dropout, windows, soft caps, ALiBi) are
refused.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ringlab.errors import BackendError

CONTRACT = "2.7.4"
"""The version of flash-attn whose functions the stand-in replaces; packages choose their arguments by this
version."""


class Kernel(Enum):
    """A way to compute blocks: with dense scores, or by torch's flash operator if the mask allows it."""

    DENSE = "dense"
    OPERATOR = "operator"


_chosen = [Kernel.DENSE]


def choose(kernel: Kernel) -> None:
    """Compute the blocks of this process by `kernel` from now on."""
    _chosen[0] = kernel


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (out, lse, empty, zeros). Raises: BackendError for options that are not supported."""
    _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
    if _operator_can(q, k, causal):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        given, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *heads_first, 0.0, causal, scale=softmax_scale
        )
        return given.transpose(1, 2), lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    for head in range(q.shape[2]):
        rows, keys, values = (x.float() for x in _of_head(head, q, k, v))
        scores = _scores(rows, keys, softmax_scale, causal)
        lse[:, head] = scores.logsumexp(-1)
        out[:, :, head] = _weights(scores, lse[:, head]) @ values
    return out, lse.masked_fill(lse == -math.inf, math.inf), q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write dq, dk and dv, and return delta (B, H, L). Raises: the errors of the forward."""
    _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    if _operator_can(q, k, causal):
        heads_first = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads_first, softmax_lse, 0.0, causal, scale=softmax_scale
        )
        for into, gradient in zip((dq, dk, dv), gradients, strict=True):
            into.copy_(gradient.transpose(1, 2))
        return delta
    group = q.shape[2] // k.shape[2]
    sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v)]
    for head in range(q.shape[2]):
        rows, keys, values = (x.float() for x in _of_head(head, q, k, v))
        weights = _weights(_scores(rows, keys, softmax_scale, causal), softmax_lse[:, head])
        of_out = dout[:, :, head].float()
        of_scores = weights * (of_out @ values.mT - delta[:, head, :, None])
        dq[:, :, head] = softmax_scale * (of_scores @ keys)
        sums[0][:, :, head // group] += softmax_scale * (of_scores.mT @ rows)
        sums[1][:, :, head // group] += weights.mT @ of_out
    dk.copy_(sums[0])
    dv.copy_(sums[1])
    return delta


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (out, lse, empty, zeros) of packed documents. Raises: the errors of `_flash_attn_forward`."""
    out = torch.zeros_like(q)
    lse = torch.full((q.shape[1], len(q)), math.inf, dtype=torch.float32, device=q.device)
    options = dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes
    for rows, keys in _documents(cu_seqlens_q, cu_seqlens_k):
        found = _flash_attn_forward(q[None, rows], k[None, keys], v[None, keys], *options)
        out[rows], lse[:, rows] = found[0][0], found[1][0]
    return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write dq, dk and dv of packed documents; return an empty tensor. Raises: as `_flash_attn_forward`."""
    options = dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes
    for gradient in (dq, dk, dv):
        gradient.zero_()
    for rows, keys in _documents(cu_seqlens_q, cu_seqlens_k):
        of_rows, of_keys = (dout, q, out, dq), (k, v, dk, dv)
        dout_, q_, out_, dq_ = (x[None, rows] for x in of_rows)
        k_, v_, dk_, dv_ = (x[None, keys] for x in of_keys)
        lse = softmax_lse[None, :, rows]
        _flash_attn_backward(dout_, q_, k_, v_, out_, lse, dq_, dk_, dv_, *options)
    return q.new_empty(0)


def _documents(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and the keys of each document that has both."""
    ends = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for (first, last), (begin, end) in ends:
        if last > first and end > begin:
            yield slice(first, last), slice(begin, end)


def _operator_can(q: Tensor, k: Tensor, causal: bool) -> bool:
    """Return whether torch's flash operator is chosen and can compute this call.

    It aligns a causal mask to the top left, and does not support grouped heads.
    """
    square = q.shape[1] == k.shape[1] or not causal
    return _chosen[0] is Kernel.OPERATOR and square and q.shape[2] == k.shape[2]


def _of_head(head: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (B, L, D) of one query head, and of the key/value head that it reads."""
    shared = head // (q.shape[2] // k.shape[2])
    return q[:, :, head], k[:, :, shared], v[:, :, shared]


def _scores(rows: Tensor, keys: Tensor, scale: float, causal: bool) -> Tensor:
    scores = scale * (rows @ keys.mT)
    if not causal:
        return scores
    count, seen = scores.shape[-2:]
    hidden = torch.ones(count, seen, dtype=torch.bool, device=rows.device).triu(seen - count + 1)
    return scores.masked_fill(hidden, -math.inf)


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return e^(scores − lse); 0 in rows that see no key, whether their lse is +∞ or −∞."""
    return torch.exp(scores - lse.masked_fill(lse.isinf(), 0.0)[..., None])


def _refuse(dropout: float, window: tuple[int, int], softcap: float, alibi: Tensor | None) -> None:
    asked = {
        "dropout": dropout,
        "a window": window != (-1, -1),
        "softcap": softcap,
        "ALiBi": alibi is not None,
    }
    found = [what for what, value in asked.items() if value]
    if found:
        raise BackendError("attention without dropout, windows, soft caps and ALiBi", ", ".join(found))


def _absent(*_: Any, **__: Any) -> Any:
    raise BackendError("a function that ends in _forward or _backward", "another function of flash-attn")


_KERNELS = (
    _flash_attn_forward,
    _flash_attn_backward,
    _flash_attn_varlen_forward,
    _flash_attn_varlen_backward,
)


@contextmanager
def in_place_of_flash_attn() -> Iterator[None]:
    """Replace `flash_attn` by the stand-in inside this context; an installed package is restored after it."""
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    package.__path__ = []
    package.__spec__ = ModuleSpec("flash_attn", None, is_package=True)
    interface.__spec__ = ModuleSpec("flash_attn.flash_attn_interface", None)
    package.__version__ = CONTRACT  # type: ignore[attr-defined]
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    package.flash_attn_func = _absent  # type: ignore[attr-defined]
    for function in _KERNELS:
        setattr(interface, function.__name__, function)
    names = {package.__name__: package, interface.__name__: interface}
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
