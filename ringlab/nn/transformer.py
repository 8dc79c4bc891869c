"""A small decoder with RMSNorm, ContextParallelAttention and SwiGLU. On one process it is an ordinary model.

The feed-forward layers compute all tokens at once or block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ringlab.errors import ShapeError
from ringlab.nn.attention import ContextParallelAttention
from ringlab.nn.context import Context


class FeedForward(nn.Module):
    """SwiGLU, down(silu(gate(x)) · up(x)), which computes each token separately and so needs no ring.

    With `block`, only `block` tokens are computed at a time, and backward computes each block again. Besides
    input and output, only the hidden values of one block are then in memory.

    Raises: ShapeError for a block below 1.
    Source: arXiv 2002.05202; by blocks, arXiv 2305.19370.

    >>> FeedForward(width=8, hidden=32, block=4)(torch.zeros(1, 10, 8)).shape
    torch.Size([1, 10, 8])
    """

    def __init__(self, width: int, hidden: int, block: int | None = None) -> None:
        super().__init__()
        if block is not None and block < 1:
            raise ShapeError("blocks of at least 1 token, or None for all at once", f"{block}")
        self.block = block
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Float[Tensor, "B L E"]) -> Float[Tensor, "B L E"]:
        """Return the output of each token of `x`."""
        if self.block is None or x.shape[1] <= self.block:
            return self._values(x)
        parts = x.split(self.block, dim=1)
        return torch.cat([again(self._values, part) for part in parts], dim=1)

    def _values(self, x: Tensor) -> Tensor:
        values: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return values


def again(function: Callable[..., Float[Tensor, "B L E"]], *args: Any) -> Float[Tensor, "B L E"]:
    """Return `function(*args)`. Only `args` are kept for backward, which calls the function again.

    The function's messages are also sent again, in the same order on every rank. The random state is not
    saved, because no layer here is random, and because virtual ranks share one random state.
    """
    result: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a Transformer. hidden: the feed-forward's width. head_dim: by default width / heads.

    `tied`: whether the output layer uses the embedding's table. `feed_forward_block`: the `block` of
    FeedForward. `recompute`: whether backward computes every layer again, including its ring, instead of
    keeping activations.

    Raises: ShapeError for a size below 1, or if head_dim is None and the heads do not divide the width.

    >>> ModelConfig(width=60, heads=8)
    Traceback (most recent call last):
    ringlab.errors.ShapeError: needed: a width that the heads divide
       got: width 60, 8 heads
    remedy: or give head_dim=
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
    """A layer: x + attention(norm(x)), and then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = ContextParallelAttention(
            config.width, config.heads, config.kv_heads, config.head_dim,
            qk_norm=config.qk_norm, rope_base=config.rope_base,
        )  # fmt: skip
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.feed_forward = FeedForward(config.width, config.hidden, config.feed_forward_block)

    def forward(self, x: Float[Tensor, "B L E"], context: Context | None = None) -> Float[Tensor, "B L E"]:
        """Return the layer's output. Raises: as ContextParallelAttention."""
        x = x + self.attention(self.attention_norm(x), context)
        x = x + self.feed_forward(self.feed_forward_norm(x))
        return x


class Transformer(nn.Module):
    """Computes logits from token ids. The same seed gives the same weights on every rank, so none are sent.

    >>> Transformer(ModelConfig())(torch.zeros(1, 8, dtype=torch.int64)).shape
    torch.Size([1, 8, 256])
    """

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
        """Return the logits of the token that follows each token.

        With a context, `tokens` are this rank's shard.
        """
        x = self.embedding(tokens)
        for layer in self.layers:
            x = again(layer, x, context) if self.config.recompute else layer(x, context)
        x = self.norm(x)
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    @torch.no_grad()
    def _draw(self, seed: int) -> None:
        """Draw matrices from N(0, 0.02²), with a smaller deviation before the residual stream.

        Norms stay at one.
        The model has its own random generator, because virtual ranks share torch's global generator.
        """
        generator = torch.Generator().manual_seed(seed)
        into_the_stream = (2 * self.config.layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                ends = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
                parameter.normal_(0.0, 0.02 * (into_the_stream if ends else 1.0), generator=generator)
