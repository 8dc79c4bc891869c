"""The same attention with other numbers: inputs turned so that the true results are known from those before.

Heads change places, and numbers change signs: in each head and column q and k do so together, v and out's gradient do so
together, and all of a head's v at once. Scores and their softmax stay, out, dq, dk and dv follow by signs and places. Nothing
is rounded by this, so an error is as large as it was; but what is remembered of other numbers is wrong now.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Turned:
    """heads (H,): which head stands in each place; signs: qk and v (H, 1, D), values (H, 1, 1), +1 or −1 each."""

    heads: Tensor
    qk: Tensor
    v: Tensor
    values: Tensor

    @classmethod
    def drawn(cls, H: int, D: int, generator: torch.Generator) -> Turned:
        """Return one at random; the generator is the CPU's."""

        def signs(*shape: int) -> Tensor:
            return torch.randint(2, shape, generator=generator, dtype=torch.int8) * 2 - 1

        return cls(torch.randperm(H, generator=generator), signs(H, 1, D), signs(H, 1, D), signs(H, 1, 1))

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        """Return new q, k, v and gradient of out, (B, H, L, D) each, in the same dtype."""
        by = (self.qk, self.qk, self.v * self.values, self.v)
        return tuple(
            x.index_select(1, self.heads.to(x.device)) * signs.to(x)
            for x, signs in zip((q, k, v, dout), by, strict=True)
        )

    def back(self, name: str, rows: Tensor) -> Tensor:
        """Return rows (H, n, D) of a result, "out", "dq", "dk" or "dv", as they are without the turn."""
        signs = {
            "out": self.v * self.values,
            "dq": self.qk * self.values,
            "dk": self.qk * self.values,
            "dv": self.v,
        }[name]
        return (rows * signs.to(rows))[self.heads.argsort()]
