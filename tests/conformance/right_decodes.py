"""Correct decodes: one with every argument, one over torch.distributed, and ringlab's own blocks, masks and merges."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ringlab.blocks import get_block
from ringlab.comm.ring import Ring
from ringlab.mask import Mask
from ringlab.merge import Partial, merge, state_dtype, with_sinks
from ringlab.schedules.decode import attend_to_cache
from ringlab.scores import ScoreRules

Local: TypeAlias = Callable[[Tensor, Tensor, Tensor, int, Tensor], tuple[Tensor, Tensor]]


def local(q: Tensor, k: Tensor, v: Tensor, total: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the partial (out, lse) of the last of `total` tokens over these keys, in the state's dtype."""
    k, v = (x.to(state_dtype(q.dtype)).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q.to(k.dtype) @ k.mT / math.sqrt(q.shape[-1])
    rows = torch.arange(total - q.shape[2], total)
    scores = scores.masked_fill(rows[:, None] < positions, -math.inf)
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]) @ v, lse


def reduced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    positions: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Decode by two all-reduces: the largest lse of all ranks, then sums scaled by that lse."""
    n = len(positions)
    out, lse = local(q, k[:, :, :n], v[:, :, :n], sum(lengths), positions)
    top = lse.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    weight = torch.exp(lse - top)[..., None]
    sums = torch.cat([weight * out, weight], dim=-1)
    dist.all_reduce(sums, group=group)
    return (sums[..., :-1] / sums[..., -1:]).to(q.dtype)


def refuses(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], positions: Tensor, window: int = 0
) -> Tensor:
    """Decode over torch.distributed, and refuse each window."""
    if window:
        raise NotImplementedError("no window")
    return reduced(q, k, v, lengths, positions)


def full(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cache_seqlens: Tensor, seq_lens: Tensor, *,
    block_table: Tensor | None = None, k_new: Tensor | None = None, v_new: Tensor | None = None, scale: float = 0.25,
    window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None, alibi_slopes: Tensor | None = None,
    key_padding_mask: Tensor | None = None, blocks_to_copy: Tensor | None = None, ref_counts: Tensor | None = None,
    free_pages: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decode with every argument that the suite knows. `wrong_decodes.md` has edits of this function."""
    n = q.shape[2]
    if blocks_to_copy is not None:
        for source, copy in blocks_to_copy.tolist():
            k[copy], v[copy] = k[source], v[source]
    spare = [] if free_pages is None else free_pages.tolist()
    if k_new is not None and v_new is not None:
        for sequence, (used, total) in enumerate(zip(cache_seqlens.tolist(), seq_lens.tolist(), strict=True)):
            for slot in range(used):
                token = int(positions[slot]) - (total - n)
                if token >= 0:
                    page, place = sequence, slot
                    if block_table is not None:
                        entry, place = slot // k.shape[2], slot % k.shape[2]
                        page = int(block_table[sequence, entry])
                        if ref_counts is not None and ref_counts[page] > 1:
                            shared, page = page, spare.pop()
                            k[page], v[page] = k[shared], v[shared]
                            ref_counts[shared] -= 1
                            ref_counts[page] = 1
                            block_table[sequence, entry] = page
                    k[page, :, place] = k_new[sequence, :, token]
                    v[page, :, place] = v_new[sequence, :, token]
    if block_table is not None:
        pages = block_table.long()
        k, v = (x[pages].transpose(1, 2).flatten(2, 3) for x in (k, v))
    slots = torch.arange(k.shape[2])
    keys = pad(positions, (0, len(slots) - len(positions)))
    rows = seq_lens[:, None] - n + torch.arange(n)
    distance = rows[:, :, None] - keys
    visible = (slots < cache_seqlens[:, None])[:, None] & (distance >= 0)
    if window:
        visible = visible & (distance < window)
    if key_padding_mask is not None:
        visible = visible & ~key_padding_mask[:, None]
    dtype = state_dtype(q.dtype)
    k, v = (x.to(dtype).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q.to(dtype) @ k.mT * scale
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None].to(dtype) * distance[:, None]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    lse = torch.logsumexp(scores, -1)
    out = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]) @ v
    outs, lses = (torch.stack(ring.all_gather(x)) for x in (out, lse))
    if sinks is not None:
        lses = torch.cat([lses, sinks[:, None].to(dtype).expand(1, *lse.shape)])
        outs = torch.cat([outs, torch.zeros_like(outs[:1])])
    whole = torch.logsumexp(lses, 0)
    return ((lses - whole).exp()[..., None] * outs).sum(0).to(q.dtype), whole


def of_ringlab(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], positions: Tensor, *, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decode as `ringlab.decode` does, from slots in place of a `ShardedCache`, whose tokens are in order."""
    order = positions.argsort()
    k, v = (x[:, :, order] for x in (k, v))
    shard = SimpleNamespace(k=k, v=v, positions=positions[order].numpy(), length=sum(lengths))
    rules = ScoreRules(softcap)
    block = get_block("auto", q, rules.requirements, v)
    part = attend_to_cache(q, shard, Mask(window=window), block, scale, rules)
    outs, lses = ring.all_gather(part.out), ring.all_gather(part.lse)
    total, *others = map(Partial, outs, lses)
    for other in others:
        total = merge(total, other)
    total = with_sinks(total, sinks)
    return total.out.to(q.dtype), total.lse
