"""Correct training steps (over torch.distributed, of transformers), and steps that fail on processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ringlab.comm.ring import Ring
from ringlab.plain_step import IGNORE, Model, next_tokens


class _Whole(torch.autograd.Function):
    """The shards of all ranks side by side; backward gives each rank its shard's summed gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size(), dim=2)[dist.get_rank()]


def gathered(tokens: Tensor, labels: Tensor, rank: int, world_size: int) -> tuple[Tensor, nn.Module]:
    """Run a step that gathers the keys and values of all ranks; torch.distributed reduces the gradients."""
    mine = torch.arange(tokens.shape[1]).chunk(world_size)[rank]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = _Whole.apply(k), _Whole.apply(v)
        visible = mine[:, None] >= torch.arange(tokens.shape[1])
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible)

    targets = next_tokens(labels)
    model = Model(recompute=False)
    logits = model(tokens[:, mine], mine, attention).flatten(0, 1)
    loss = F.cross_entropy(logits, targets[:, mine].flatten(), ignore_index=IGNORE, reduction="sum")
    loss = loss / (targets != IGNORE).sum()
    loss.backward()
    total = loss.detach()
    for tensor in (total, *(weight.grad for weight in model.parameters() if weight.grad is not None)):
        dist.all_reduce(tensor)
    return total, model


def fails_on_three(tokens: Tensor, rank: int, world_size: int) -> float:
    """Fail on rank 1 of three, while the other ranks wait for rank 1."""
    if world_size == 3 and rank == 1:
        raise ValueError("three is one too many")
    total = torch.tensor(float(tokens.sum()))
    dist.all_reduce(total)
    return float(total) / world_size


def hangs_on_two(tokens: Tensor, rank: int, world_size: int) -> float:
    """Wait for ever on rank 0 of two."""
    if world_size == 2 and rank == 0:
        threading.Event().wait()
    return 1.0


def dies_on_two(tokens: Tensor, rank: int, world_size: int) -> float:
    """End the process on rank 1 of two."""
    if world_size == 2 and rank == 1:
        os._exit(3)
    return 1.0


def of_transformers(
    ring: Ring, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None, evaluate: bool = False
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Run the script of docs/huggingface.md on a small Llama, whose rotary angles are always float32."""
    from transformers import LlamaForCausalLM

    from ringlab import hf, per_document, zigzag
    from ringlab.nn import sum_gradients
    from tests.hf.models import llama

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM._from_config(llama(vocab_size=32), attn_implementation="ringlab")
    packed = position_ids is not None
    mask = hf.mask_of(position_ids[:1]) if packed else None
    S, P = input_ids.shape[1], ring.world_size
    layout = per_document(mask.documents, P) if packed else zigzag(S, P)
    with (
        torch.set_grad_enabled(not evaluate),
        hf.context(ring, layout, *([mask] if packed else [])) as context,
    ):
        more = {"position_ids": position_ids} if packed else {}
        loss = model(**hf.shard_batch(context, input_ids, labels=labels, **more)).loss
    if not evaluate:
        loss.backward()
        sum_gradients(model, ring)
    return ring.all_reduce(loss.detach()), [weight.grad for weight in model.parameters()]
