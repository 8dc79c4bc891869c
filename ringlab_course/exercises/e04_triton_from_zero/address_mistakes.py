"""Exercise 04: imitations of kernels that read or write rows or heads at wrong addresses of the buffers.

They have the same arguments and results as the imitations in `flash_mistakes`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringlab_course.exercises.e04_triton_from_zero.flash_mistakes import blocks_of, plain, scores_of


def axes_swapped(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Imitate a kernel that takes grid axis 0 for key heads and axis 1 for blocks."""
    blocks, key_heads = -(-S * len(q) // len(k) // m), len(k)
    if blocks > key_heads:
        raise ValueError("a kernel that looks for missing heads breaks off")
    right, block = plain(q, k, v, out, lse, S, shift)[0].float(), blocks_of(q, k, S, m)
    head = torch.arange(len(q))[:, None, None] // (len(q) // len(k))
    return torch.where((head < blocks) & (block < key_heads), right, out[:, :S].float())


def one_head_of_each_group(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Imitate a kernel that computes query head c with key head c and never writes the other query heads."""
    got, heads = out[:, :S].float().clone(), len(k)
    got[:heads] = plain(q[:heads], k, v, out, lse, S, shift)[0].float()
    return got


def heads_dealt(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Imitate a kernel in which query head h reads key head h mod K."""
    order = torch.arange(len(q)) % len(k)
    return plain(q, k[order], v[order], out, lse, S, shift)[0].float()


def packed_rows_cut(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Imitate a kernel that masks packed rows at S, although there are S · group packed rows."""
    right, group = plain(q, k, v, out, lse, S, shift)[0].float(), len(q) // len(k)
    rows = torch.arange(S)[:, None] * group + torch.arange(len(q))[:, None, None] % group
    return torch.where(rows < S, right, out[:, :S].float())


def head_stride_is_s(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Imitate a kernel in which heads begin S rows apart, in all buffers."""
    packed = [x.flatten(0, 1)[: len(x) * S].unflatten(0, (len(x), S)) for x in (q, k, v)]
    got = out.flatten(0, 1).float().clone()
    got[: len(q) * S] = plain(*packed, out, lse, S, shift)[0].flatten(0, 1).float()
    return got.unflatten(0, out.shape[:2])[:, :S]


def one_key_head(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Imitate a kernel in which all query heads read key head 0."""
    return plain(q, k[:1], v[:1], out, lse, S, shift)[0].float()


def query_stride_is_s(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Imitate a kernel in which query heads begin S rows apart, while key heads begin at the right rows."""
    packed = q.flatten(0, 1)[: len(q) * S].unflatten(0, (len(q), S))
    got = out.flatten(0, 1).float().clone()
    got[: len(q) * S] = plain(packed, k, v, out, lse, S, shift)[0].flatten(0, 1).float()
    return got.unflatten(0, out.shape[:2])[:, :S]


def lse_stride_is_s(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, S: int, shift: Any, m: int, n: int
) -> Tensor:
    """Imitate a kernel in which the lse of each head begins S places after the lse of the head before."""
    got = lse.flatten().clone()
    got[: len(q) * S] = torch.logsumexp(scores_of(q, k, S, shift), -1).flatten()
    return got.unflatten(0, lse.shape)[:, :S]
