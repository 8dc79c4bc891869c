"""What becomes of scores besides scale and mask: a soft cap, and dropout that every rank draws alike.

Dropout draws from Philox4x32-10, a function of a counter and a key: the key is the seed, the counter of a pair is
(key position, query position, batch, query head // 4), and of the four words that come out the head takes its own.
So backward, and every layout, schedule and number of ranks, drop the same pairs without sending or keeping a mask.
With f the factors, delta_i = Σ_j p_ij f_ij dO_i·v_j = dO_i·out_i: the dropped out gives it as it is.
Source: Salmon et al. 2011, doi 10.1145/2063384.2063405.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from ringlab.errors import DtypeError, MaskError
from ringlab.merge import state_dtype

_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


@dataclass(frozen=True)
class Scores:
    """Data, equal and hashable by value. Scores s become softcap·tanh(s/softcap); weights are dropped with
    probability `dropout` after the softmax and the others divided by 1 − dropout.

    `seed` is the same on all ranks of a sequence, and another for each layer, step and data-parallel replica.
    `first_head` is the number of the first query head here, where a rank holds only some of them.

    Raises: MaskError for a softcap that is not above 0, a dropout outside of [0, 1), or a seed outside of 64 bits.
    """

    softcap: float | None = None
    dropout: float = 0.0
    seed: int = 0
    first_head: int = 0

    def __post_init__(self) -> None:
        if self.softcap is not None and not (_number(self.softcap) and 0 < self.softcap < float("inf")):
            raise MaskError("softcap=, a finite number above 0, or None", repr(self.softcap))
        if not (_number(self.dropout) and 0 <= self.dropout < 1):
            raise MaskError("dropout=, a probability from 0 to below 1", repr(self.dropout))
        if not (isinstance(self.seed, int) and 0 <= self.seed < 1 << 64):
            raise MaskError("seed=, an integer of 64 bits, 0 or more, the same on all ranks", repr(self.seed))

    @property
    def wishes(self) -> frozenset[str]:
        """Return what a block must offer to compute them: of "softcap" and "dropout"."""
        asked = {"softcap": self.softcap is not None, "dropout": self.dropout > 0}
        return frozenset(name for name, is_asked in asked.items() if is_asked)

    def of_tile(self, rows: Int[np.ndarray, " rows"], keys: Int[np.ndarray, " keys"]) -> TileScores:
        """Return them for the tile of queries and keys at these global positions."""
        return TileScores(self, torch.from_numpy(rows), torch.from_numpy(keys))


@dataclass(frozen=True)
class TileScores:
    """`Scores` of one tile, whose tokens stand at global positions `rows` and `keys`."""

    scores: Scores
    rows: Int64[Tensor, " rows"]
    keys: Int64[Tensor, " keys"]

    def part(self, rows: slice, keys: slice) -> TileScores:
        """Return those of a part of the tile."""
        return replace(self, rows=self.rows[rows], keys=self.keys[keys])

    def backwards(self) -> TileScores:
        """Return those of the tile with rows and keys counted from the other end."""
        return replace(self, rows=self.rows.flip(0), keys=self.keys.flip(0))

    def capped(self, scores: Float[Tensor, "*heads rows keys"]) -> Float[Tensor, "*heads rows keys"]:
        """Return the scores under the cap."""
        cap = self.scores.softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def slope(self, capped: Float[Tensor, "*heads rows keys"]) -> Float[Tensor, "*heads rows keys"] | None:
        """Return what capped scores gain for each one of a score, 1 − tanh²; None without a cap."""
        cap = self.scores.softcap
        return None if cap is None else 1 - (capped / cap) ** 2

    def factors(self, batch: int, heads: int, like: Tensor) -> Float[Tensor, "B H rows keys"] | None:
        """Return what weights are multiplied by, 0 or 1/(1 − dropout), in the dtype and on the device of `like`.

        None without dropout.
        """
        rate, first = self.scores.dropout, self.scores.first_head
        if not rate:
            return None
        groups = torch.arange(first // 4, (first + heads - 1) // 4 + 1, device=like.device)
        words = philox(
            self.keys.to(like.device),
            self.rows.to(like.device)[:, None],
            torch.arange(batch, device=like.device)[:, None, None, None],
            groups[:, None, None],
            self.scores.seed,
        )
        drawn = torch.stack(torch.broadcast_tensors(*words), dim=2).flatten(1, 2)
        drawn = drawn[:, first % 4 : first % 4 + heads]
        return (drawn >= round(rate * 2**32)).to(like.dtype) / (1 - rate)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words of 32 bits that Philox4x32-10 makes of the counter (c0, c1, c2, c3) and a key of 64 bits.

    Words are int64 tensors; counters of different shapes are broadcast as they come to meet.
    """
    k0, k1 = key & _WORD, key >> 32
    for _ in range(_ROUNDS):
        # The products wrap around at 64 bits, which leaves their bits right; a shift to the right brings copies
        # of the sign in, which the mask takes off.
        a, b = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (b >> 32 & _WORD) ^ c1 ^ k0,
            b & _WORD,
            (a >> 32 & _WORD) ^ c3 ^ k1,
            a & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def check_scale(scale: Any, dtype: torch.dtype) -> None:
    """Raise DtypeError unless `scale` is None, or finite in the dtype that scores of tensors of `dtype` have."""
    if scale is None:
        return
    of_scores = state_dtype(dtype)
    largest = torch.finfo(of_scores).max
    if not (isinstance(scale, (int, float)) and -largest <= scale <= largest):  # NaN is not between them
        raise DtypeError(f"scale= a number that is finite in {of_scores}, or None for D^−½", repr(scale))
