"""The feed-forward of a layer, over all tokens at once or block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ringlab.errors import ShapeError


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)), tokens by themselves, so that it needs no ring.

    With `block`, so many tokens go through at a time, and backward computes each block anew: besides input and
    output, the hidden values of one block are held, not those of all tokens.

    Raises: ShapeError for a block below 1.
    Source: arXiv 2002.05202; by blocks, arXiv 2305.19370.
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


def again(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return `function(*args)`, of which nothing is kept for backward but `args`: it is computed anew there.

    What it sends, it sends anew, in the same order on every rank. No random state is kept, for nothing here is
    random, and virtual ranks share one.
    """
    result: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result
