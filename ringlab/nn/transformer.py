"""A small decoder: RMSNorm, ContextParallelAttention, SwiGLU. On one process it is an ordinary model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from ringlab.errors import ShapeError
from ringlab.nn.attention import ContextParallelAttention
from ringlab.nn.context import Context
from ringlab.nn.feed_forward import FeedForward, again


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Transformer. `hidden` is the feed-forward's width, `head_dim` else width / heads.

    `tied`: the output layer is the embedding's table. `feed_forward_block`: tokens at a time, see FeedForward.
    `recompute`: backward computes every layer anew, its ring included, instead of keeping its activations.

    Raises: ShapeError for a size below 1, or a width that the heads do not divide where head_dim is not given.
    """

    vocabulary: int = 256
    width: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 192
    head_dim: int | None = None
    tied: bool = True
    qk_norm: bool = False
    rope_base: float = 10_000.0
    feed_forward_block: int | None = None
    recompute: bool = False

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "kv_heads", "hidden"):
            if getattr(self, name) < 1:
                raise ShapeError(f"{name}= at least 1", f"{getattr(self, name)}")
        if self.head_dim is None and self.width % self.heads:
            got = f"width {self.width}, {self.heads} heads"
            raise ShapeError("a width that the heads divide", got, "or give head_dim=")


class Layer(nn.Module):
    """x + attention(norm(x)), then the same with the feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = ContextParallelAttention(
            config.width, config.heads, config.kv_heads, config.head_dim,
            qk_norm=config.qk_norm, rope_base=config.rope_base,
        )  # fmt: skip
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.feed_forward = FeedForward(config.width, config.hidden, config.feed_forward_block)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Return the layer's output, of the shape of `x`."""
        x = x + self.attention(self.attention_norm(x), context)
        x = x + self.feed_forward(self.feed_forward_norm(x))
        return x


class Transformer(nn.Module):
    """Token ids → logits. The same seed gives the same weights on every rank, so that none need be sent."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.head = None if config.tied else nn.Linear(config.width, config.vocabulary, bias=False)
        self._draw(seed)

    def forward(
        self, tokens: Int[Tensor, "B L"], context: Context | None = None
    ) -> Float[Tensor, "B L vocabulary"]:
        """Return the logits of each token's successor; with a context `tokens` are this rank's shard."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = again(layer, x, context) if self.config.recompute else layer(x, context)
        x = self.norm(x)
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    @torch.no_grad()
    def _draw(self, seed: int) -> None:
        """Matrices from N(0, 0.02²), those that write into the residual stream smaller; norms stay at one.

        From a generator of its own: virtual ranks take turns at torch's global one.
        """
        generator = torch.Generator().manual_seed(seed)
        into_the_stream = (2 * self.config.layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                ends = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
                parameter.normal_(0.0, 0.02 * (into_the_stream if ends else 1.0), generator=generator)
