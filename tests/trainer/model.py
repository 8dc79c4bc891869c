"""A small language model as in a user's own trainer, and one step of it: on one process, and over a ring.

The model does not use ringlab: its layers call an attention with the signature of torch's. Processes of a
launch import this module as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ringlab import sdpa_over, zigzag
from ringlab.comm.ring import Ring

VOCABULARY, WIDTH, HEADS, S, IGNORE = 13, 8, 2, 16, -100
Gradients = dict[str, Tensor]
LAYOUT = zigzag(S, 2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return x + self.out(attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A small language model. recompute: reentrant checkpointing if True, non-reentrant if False."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recompute = recompute
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(S, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            if self.recompute is None:
                x = layer(x, attention)
            else:
                x = checkpoint(layer, x, attention, use_reentrant=self.recompute)
        return self.head(x)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return whole sequences and their shifted labels, some of which are ignored."""
    tokens = torch.randint(VOCABULARY, (2, S), generator=torch.Generator().manual_seed(seed))
    labels = F.pad(tokens[:, 1:], (0, 1), value=IGNORE)
    labels[0, :5] = IGNORE
    return tokens, labels


def share(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    """Return this rank's share of the loss: its tokens' sum, divided by the labels counted on all ranks."""
    total = F.cross_entropy(logits.flatten(0, 1).float().to(logits.dtype), labels.flatten(), reduction="sum")
    return total / count


def alone(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[float, Gradients]:
    """Return the loss and the gradients on one process, by torch's own attention."""
    model, (tokens, labels) = Model().to(dtype), batch(seed)
    loss = share(model(tokens, torch.arange(S), F.scaled_dot_product_attention), labels, counted(labels))
    loss.backward()
    return loss.item(), gradients(model)


def counted(labels: Tensor) -> int:
    return int((labels != IGNORE).sum())


def share_over(ring: Ring, model: nn.Module, seed: int = 0, **options: Any) -> Tensor:
    """Return the share of the loss on this rank of a ring of two."""
    tokens, labels = batch(seed)
    mine, theirs = (LAYOUT.shard(x, ring.rank, dim=-1) for x in (tokens, labels))
    positions = torch.from_numpy(LAYOUT.positions(ring.rank))
    return share(model(mine, positions, sdpa_over(ring, LAYOUT, **options)), theirs, counted(labels))


def gradients(model: nn.Module) -> Gradients:
    """Return the gradients by the bare model's parameter names; sharded gradients are made whole."""
    return {
        name.removeprefix("module."): p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
