"""Correct training steps (over torch.distributed, with an optimizer, of transformers), and steps that fail on processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ringlab.comm.ring import Ring
from ringlab.layout import get_layout
from ringlab.mask import Mask
from ringlab.plain_step import IGNORE, Model, attention_over, next_tokens


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


def trained(
    ring: Ring, tokens: Tensor, labels: Tensor, *, attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None, steps: int = 1, checkpoint: str | None = None,
) -> tuple[Tensor, nn.Module, dict[str, Tensor]]:  # fmt: skip
    """Make steps of Adam with a padded or packed batch. `wrong_steps.md` has edits of this function."""
    model, done = Model(recompute=False), 0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    saved = Path(checkpoint, "last.pt") if checkpoint else None
    if saved is not None and saved.exists():
        found = torch.load(saved)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        done = found["steps"]
    S, targets = tokens.shape[1], next_tokens(labels)
    layout = get_layout("zigzag", S, ring.world_size)
    mine = torch.from_numpy(layout.positions(ring.rank))
    rows = [lengths_of(row, attention_mask, position_ids, S) for row in range(len(tokens))]
    count = (targets != IGNORE).sum()
    for number in range(done, steps):
        optimizer.zero_grad()
        total, hits = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
        for row, lengths in enumerate(rows):
            positions = torch.cat([torch.arange(length) for length in lengths])[mine]
            attention = attention_over(ring, layout, Mask(causal=True, documents=lengths))
            logits = model(tokens[row : row + 1, mine], positions, attention)[0]
            own = targets[row, mine]
            loss = F.cross_entropy(logits, own, ignore_index=IGNORE, reduction="sum") / count
            loss.backward()
            total += loss.detach()
            hits += (logits.argmax(-1) == own).sum()
        for weight in model.parameters():
            weight.grad = ring.all_reduce(torch.zeros_like(weight) if weight.grad is None else weight.grad)
        optimizer.step()
        if saved is not None and ring.rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": number + 1}
            torch.save(state, saved)
    accuracy = ring.all_reduce(hits) / count
    return ring.all_reduce(total), model, {"accuracy": accuracy}


def lengths_of(
    row: int, attention_mask: Tensor | None, position_ids: Tensor | None, S: int
) -> tuple[int, ...]:
    """Return the lengths of the documents in a row. Each token of padding in front counts as a document."""
    starts = torch.zeros(S, dtype=torch.bool)
    if position_ids is not None:
        starts = position_ids[row] == 0
    if attention_mask is not None:
        starts = starts | (attention_mask[row].cumsum(0) <= 1)
    starts[0] = True
    bounds = [*starts.nonzero()[:, 0].tolist(), S]
    return tuple(end - start for start, end in pairwise(bounds))


def counted(tokens: Tensor, rank: int, steps: int = 1, checkpoint: str | None = None) -> float:
    """Return the number of steps, or −1 if the folder for checkpoints does not have that of the previous call."""
    saved = Path(checkpoint, "steps") if checkpoint else None
    done = int(saved.read_text()) if saved is not None and saved.exists() else 0
    dist.barrier()
    if saved is not None and rank == 0:
        saved.write_text(str(steps))
    dist.barrier()
    made = 1 if saved is not None and steps == 3 else 0
    return float(steps if done == made else -1)


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
    mask = hf.mask_of(position_ids) if packed else None
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
