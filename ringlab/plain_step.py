"""A training step over several ranks in one file: token ids in, the loss and the gradients of all weights out.

Attention is the part that communicates. The other parts can be wrong without an error: labels that are
shifted after the sequence was cut, positions that start at 0 on each rank, a mean over ranks of means over
tokens. Each of these three is one line below.
`ringlab check --kind step` checks a step like this one; `ringlab.nn.train` is a whole training program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ringlab.attention import ring_attention
from ringlab.comm.ring import Ring
from ringlab.comm.subgroup import SubGroup
from ringlab.layout import Layout, get_layout
from ringlab.mask import Mask
from ringlab.merge import state_dtype
from ringlab.types import KeyValue, Query

VOCABULARY, WIDTH, HEADS, LAYERS = 512, 16, 2, 2
IGNORE = -100
"""The label of a token that does not count; torch's own default."""
Attention = Callable[[Query, KeyValue, KeyValue], Query]


def step(
    ring: Ring,
    tokens: Int[Tensor, "B S"],
    labels: Int[Tensor, "B S"],
    *,
    cu_seqlens: Int[Tensor, " _"] | None = None,
    micro_batches: int = 1,
    replicas: int = 1,
    recompute: bool = False,
    evaluate: bool = False,
) -> tuple[Float[Tensor, ""], nn.Module]:
    """Return (loss, model) on every rank: the mean of −log p over the labels, and the model with gradients.

    tokens, labels: those of the whole batch, on every rank. Label i is token i itself, and position i − 1
    predicts it. The label IGNORE does not count in the mean.
    cu_seqlens: the start of each packed document, and the end of the last one.
    micro_batches: the number of parts of the batch that are computed one after the other.
    replicas: the number of parts of the batch that are computed at the same time, each by world_size /
    replicas ranks.
    recompute: whether layers compute their activations again in backward. evaluate: whether to skip the
    gradients.
    """
    model = Model(recompute)
    targets = next_tokens(labels)  # before anything is cut: the next token may be on another rank
    batch = Batch.of(ring, tokens, targets, cu_seqlens, replicas)
    total = torch.zeros((), dtype=torch.float64)
    with torch.set_grad_enabled(not evaluate):
        for part in torch.arange(len(batch.tokens)).tensor_split(micro_batches):
            logits = model(batch.tokens[part], batch.positions, batch.attention)
            loss = F.cross_entropy(
                logits.flatten(0, 1), batch.targets[part].flatten(), ignore_index=IGNORE, reduction="sum"
            )
            loss = loss / batch.count
            if not evaluate:
                loss.backward()
            total += loss.detach()
    if not evaluate:
        for weight in model.parameters():
            weight.grad = ring.all_reduce(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    return ring.all_reduce(total), model


def next_tokens(labels: Int[Tensor, "B S"]) -> Int[Tensor, "B S"]:
    """Return the label that each position of a sequence predicts: the next one, or IGNORE at the end."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE)


@dataclass
class Batch:
    """One rank's part of a batch.

    count: the number of labels other than IGNORE, on all ranks and in all micro-batches.
    """

    tokens: Int[Tensor, "B L"]
    targets: Int[Tensor, "B L"]
    positions: Int[Tensor, " L"]
    count: int
    attention: Attention

    @classmethod
    def of(
        cls,
        ring: Ring,
        tokens: Int[Tensor, "B S"],
        targets: Int[Tensor, "B S"],
        cu_seqlens: Int[Tensor, " _"] | None,
        replicas: int,
    ) -> Batch:
        """Return this rank's part.

        Sequences are dealt to the replicas, and their tokens to the ranks of a replica.
        """
        S, P = tokens.shape[1], ring.world_size // replicas
        replica = ring.rank // P
        context = Ring(SubGroup(ring.comm, range(replica * P, (replica + 1) * P)))
        layout = get_layout("zigzag", S, P)
        mine = torch.from_numpy(layout.positions(context.rank))
        rows = torch.arange(len(tokens)).tensor_split(replicas)[replica]
        tokens, targets = tokens[rows][:, mine], targets[rows][:, mine]
        count = int(ring.all_reduce((targets != IGNORE).sum()))
        bounds = [0, S] if cu_seqlens is None else cu_seqlens.tolist()
        lengths = [end - start for start, end in pairwise(bounds)]
        positions = torch.cat([torch.arange(length) for length in lengths])[mine]
        mask = Mask(causal=True, documents=tuple(lengths))
        return cls(tokens, targets, positions, count, attention_over(context, layout, mask))


def attention_over(ring: Ring, layout: Layout, mask: Mask) -> Attention:
    """Return attention over the tokens of all ranks of `ring`."""

    def attention(q: Query, k: KeyValue, v: KeyValue) -> Query:
        out: Query = ring_attention(q, k, v, ring=ring, layout=layout, mask=mask)
        return out

    return attention


class Model(nn.Module):
    """A small transformer in float64, whose weights are the same in each process."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
            self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(
        self, tokens: Int[Tensor, "B L"], positions: Int[Tensor, " L"], attention: Attention
    ) -> Float[Tensor, "B L vocabulary"]:
        """Return the logits of this rank's tokens. positions: the position of each token in its document."""
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, positions, attention, use_reentrant=False)
            else:
                x = layer(x, positions, attention)
        logits: Tensor = self.head(x)
        return logits


class Layer(nn.Module):
    """Attention with rotated queries and keys, and a feed-forward layer, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(
        self, x: Float[Tensor, "B L width"], positions: Int[Tensor, " L"], attention: Attention
    ) -> Float[Tensor, "B L width"]:
        """Return x plus the outputs of attention and of the feed-forward layer."""
        heads = self.qkv(F.layer_norm(x, x.shape[-1:])).unflatten(-1, (3, HEADS, -1))
        q, k, v = (each.transpose(1, 2) for each in heads.unbind(2))
        q, k = rotated(q, positions), rotated(k, positions)
        x = x + self.out(attention(q, k, v).transpose(1, 2).flatten(2))
        added: Tensor = x + self.down(F.gelu(self.up(F.layer_norm(x, x.shape[-1:]))))
        return added


def rotated(x: Float[Tensor, "B H L D"], positions: Int[Tensor, " L"]) -> Float[Tensor, "B H L D"]:
    """Return x with each pair of its dims turned by an angle that grows with the position (rotary embedding, RoPE)."""
    dtype = state_dtype(x.dtype)
    speeds = 100.0 ** -torch.linspace(0, 1, x.shape[-1] // 2, dtype=dtype)
    angles = positions.to(dtype)[:, None] * speeds
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)
